"""Operators with a PyTorch reference and an NKI kernel: one module per operator.

``operator.py`` declares an operator, ``limits.py`` the sizes that a kernel supports. ``rope.py``, ``qk_norm_rope.py``
and ``experts.py`` declare operators, each beside its reference. Their kernels are in ``rope_nki.py``,
``qk_norm_rope_nki.py``, ``qk_norm_rope_backward_nki.py`` and ``experts_nki.py`` (with ``expert_tiles_nki.py``), which
are imported on Neuron only. ``routing.py`` sorts tokens by expert.
"""
