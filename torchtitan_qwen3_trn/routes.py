"""Routes of this package: what each value of ``model.backend`` enables. Imports nothing, see `hooks`."""

NATIVE = ("qwen3", "sdpa", "gather-free-rope")
HUGGINGFACE_V5 = ("hf-transformers",)
NKI_MOE = ("qwen3", "sdpa", "nki-rope", "nki-moe")
