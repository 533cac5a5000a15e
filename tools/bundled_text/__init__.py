"""Generates the text and the tokenizer in ``torchtitan_qwen3_trn/assets``; see ``make.py``."""
