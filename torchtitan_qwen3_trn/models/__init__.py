"""Models as torchtitan trains them, from one description: ``qwen3`` is torchtitan's own, ``hf`` is Transformers'."""
