"""A Transformers v5 causal language model as a torchtitan model."""
