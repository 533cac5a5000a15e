"""Operators with a PyTorch reference and an NKI kernel: one module per operator.

``operator.py`` holds the way to declare one, ``limits.py`` what a kernel demands of a job. ``rope.py``,
``qk_norm_rope.py`` and ``experts.py`` declare operators, each beside its reference; ``nki_rope.py``,
``nki_qk_norm_rope.py``, ``nki_qk_norm_rope_backward.py`` and ``nki_experts.py`` (with ``nki_expert_tiles.py``) hold the
kernels and are imported on Neuron only.
"""
