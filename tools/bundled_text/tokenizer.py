"""Trains a small byte-level BPE tokenizer laid out like the published Qwen3 one.

What is taken over from Qwen3, as facts of its ``tokenizer.json`` and ``tokenizer_config.json`` on the Hugging
Face hub: NFC normalization, the pre-tokenization pattern, byte-level encoding, the 26 added tokens with their
spelling, order and ``special`` flags, their place after the last BPE entry, and the settings of the config.
The vocabulary and the merges are our own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

VOCAB_SIZE = 2048  # as in torchtitan's debug models, which this tokenizer then suits
MODEL_MAX_LENGTH = 131_072  # as in Qwen3's tokenizer_config.json

# Qwen2 and Qwen3, tokenizer.json, "pre_tokenizer": contractions, words with at most one leading sign, single
# digits, runs of signs, line breaks, other white space.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"

# Qwen3, tokenizer_config.json, "added_tokens_decoder", in the order of their ids (151643 to 151668 there).
SPECIAL_TOKENS = (
    END_OF_TEXT,
    "<|im_start|>",
    END_OF_TURN,
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PLAIN_ADDED_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def added_tokens() -> list[AddedToken]:
    """The 26 added tokens in the order of their ids."""
    return [
        AddedToken(content, single_word=False, lstrip=False, rstrip=False, normalized=False, special=special)
        for group, special in ((SPECIAL_TOKENS, True), (PLAIN_ADDED_TOKENS, False))
        for content in group
    ]


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of ``VOCAB_SIZE`` entries: the 256 bytes, merges learnt from ``texts``, the added tokens.

    Raises:
        ValueError: the texts have too few different words for that many entries.
    """
    added = added_tokens()
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE - len(added),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(added)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"the texts give only {tokenizer.get_vocab_size()} of {VOCAB_SIZE} entries: "
            "train on more text or on more different words"
        )
    return tokenizer


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The contents of ``tokenizer_config.json``.

    End of sequence is ``<|im_end|>``, as in the files published with the Qwen3 models, so that whatever is
    tried with this tokenizer ends documents and chat turns as it will with the published one. Padding is the
    other token, ``<|endoftext|>``: masking it then never hides an end of sequence.
    """
    decoder = {
        str(tokenizer.token_to_id(token.content)): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for token in added_tokens()
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": decoder,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN,
        "errors": "replace",
        "model_max_length": MODEL_MAX_LENGTH,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
