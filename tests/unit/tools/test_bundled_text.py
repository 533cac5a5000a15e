"""The bundled text and tokenizer: reproducible, readable by stock torchtitan and transformers, worth learning."""

from __future__ import annotations

import json
import math
import random
import re
import unicodedata
from collections import Counter
from itertools import islice, pairwise

import datasets
import pytest
from tokenizers import Tokenizer, pre_tokenizers
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset
from transformers import AutoTokenizer

from tools.bundled_text import make
from tools.bundled_text import tokenizer as source
from tools.bundled_text.corpus import documents
from tools.bundled_text.draw import Draw
from tools.bundled_text.english import articles, in_words, joined, money, plural
from torchtitan_qwen3_trn.assets import text_path, tokenizer_path

ODD_TEXTS = (
    "",
    " leading and trailing  \n\n\t",
    "naïve café Zoë 25 °C – “quoted” … 1,234.5%",
    "日本語のテキスト, русский, العربية, हिन्दी, 한국어",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 \x00\x01\x7f\u200b\ufeff\U0010fffd",
    "def f(x):\r\n\treturn x**2  # don't\r\n",
    "<|im_start|>user\nhi<|im_end|>\n<think>\nhm\n</think><|endoftext|><|not_a_token|>",
)


@pytest.fixture(scope="module")
def collection() -> list[str]:
    """All documents that the script makes; the bundled text is the first of them."""
    return list(documents(make.DOCUMENTS))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """The bundled documents."""
    return [
        json.loads(line)["text"]
        for path in sorted(text_path().iterdir())
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


@pytest.fixture(scope="module")
def token_ids(texts) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(tokenizer_path() / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    return [[*encoding.ids, end] for encoding in tokenizer.encode_batch(texts)]


@pytest.fixture(scope="module")
def titan() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(tokenizer_path=str(tokenizer_path()))


@pytest.fixture(scope="module")
def hugging_face():
    return AutoTokenizer.from_pretrained(str(tokenizer_path()))


@pytest.fixture
def packed(tmp_path, monkeypatch, titan):
    """Stock torchtitan's dataset over the bundled text, with datasets' cache out of the home directory."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))

    def build(seq_len: int, rank: int = 0, ranks: int = 1, infinite: bool = False) -> HuggingFaceTextDataset:
        return HuggingFaceTextDataset(
            "c4_test", str(text_path()), titan, seq_len=seq_len, dp_rank=rank, dp_world_size=ranks, infinite=infinite
        )

    return build


def test_the_script_makes_the_bundled_text_again(tmp_path, collection):
    make.write_text(tmp_path, collection[: make.BUNDLED_DOCUMENTS])
    assert [path.name for path in sorted(tmp_path.iterdir())] == [path.name for path in sorted(text_path().iterdir())]
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (text_path() / path.name).read_bytes(), path.name


def test_the_script_makes_the_bundled_tokenizer_again(tmp_path, collection):
    make.write_tokenizer(tmp_path, collection)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["tokenizer.json", "tokenizer_config.json"]
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (tokenizer_path() / path.name).read_bytes(), path.name


def test_the_script_takes_at_most_one_folder():
    for arguments in (["one", "two"], ["--help"]):
        with pytest.raises(SystemExit, match="usage"):
            make.main(arguments)


def test_the_bundled_text_is_small_and_in_several_files(texts):
    sizes = [path.stat().st_size for path in text_path().iterdir()]
    assert len(sizes) == 3
    assert min(sizes) > 100_000
    assert sum(sizes) <= 400_000
    assert len(texts) == len(set(texts)) == 384


def test_documents_are_many_and_of_many_lengths(texts, collection):
    assert len(collection) >= 2500
    assert len(set(collection)) > 0.99 * len(collection)
    for group in (texts, collection):
        lengths = [len(text.split()) for text in group]
        assert min(lengths) >= 40
        assert max(lengths) > 1000


def test_each_of_64_ranks_has_text_and_long_samples_from_reading_it_again(token_ids, packed):
    share = len(token_ids) // 64
    tokens = [sum(map(len, token_ids[rank * share : (rank + 1) * share])) for rank in range(64)]
    assert min(tokens) > 512
    smallest = tokens.index(min(tokens))
    samples = [inputs["input"] for inputs, _ in islice(packed(4096, smallest, 64, infinite=True), 3)]
    assert [len(sample) for sample in samples] == [4096] * 3


def test_every_equation_in_the_text_holds(collection):
    equation = re.compile(r"(-?\(?\d[\d,]*(?: [-+x/] \(?[\d,]+\)?)+) = (-?[\d,]*\d)")
    found = [match.groups() for text in collection for match in equation.finditer(text)]
    assert len(found) > 1000
    for left, right in found:
        value = eval(left.replace("x", "*").replace(",", "").replace("/", "//"))
        assert value == int(right.replace(",", "")), f"{left} = {right}"


def test_stories_end_with_every_thing_where_it_was_last_put(collection):
    put = (
        r"left the {0} in the ([a-z ]+)\.|put the {0} on the [a-z]+ in the ([a-z ]+)\.|"
        r"no more use for the {0} and laid it down in the ([a-z ]+)\."
    )
    hold = r"(?:picked up|gave|asked for|look after) the {0}|took the {0} from|found the {0} and|saw the {0} and"
    checked = 0
    for text in collection:
        tale, _, ending = text.partition("When it was over,")
        for thing, place in re.findall(r"The ([a-zäöü\- ]+?) was ((?:with|in) [^.]+)\.", ending):
            name = re.escape(thing)
            last_put = max(re.finditer(put.format(name), tale), key=lambda match: match.start(), default=None)
            last_held = max((match.start() for match in re.finditer(hold.format(name), tale)), default=-1)
            if last_put and last_put.start() > last_held:
                (room,) = filter(None, last_put.groups())
                assert place == f"in the {room}", (thing, text)
            else:
                assert place.startswith("with" if last_held >= 0 else "in the "), (thing, text)
            checked += 1
    assert checked > 1000


def test_stock_dataset_packs_documents_and_restarts_positions(packed, titan):
    samples = [sample for sample, _ in zip(packed(seq_len=512), range(40), strict=False)]
    restarts = 0
    for inputs, labels in samples:
        ids, positions = inputs["input"].tolist(), inputs["positions"].tolist()
        assert len(ids) == len(positions) == len(labels) == 512
        assert positions[0] == 0
        for index, (here, after) in enumerate(pairwise(positions)):
            ends = labels[index] == titan.eos_id
            assert after == (0 if ends else here + 1)
            restarts += int(ends)
            if not ends:
                assert labels[index] == ids[index + 1]
    assert restarts > 40


def test_stock_dataset_reads_every_file_and_gives_ranks_different_text(packed, texts):
    assert len(packed(seq_len=64)._data) == len(texts)
    first, last = (next(iter(packed(seq_len=256, rank=rank, ranks=64)))[1] for rank in (0, 63))
    assert first.tolist() != last.tolist()


def test_text_has_a_wide_vocabulary_and_structure(token_ids):
    """A bigram model fitted on the even documents predicts the odd ones far better than word frequencies do."""
    fit, held_out = token_ids[::2], token_ids[1::2]
    single = Counter(token for ids in fit for token in ids)
    pairs = Counter(pair for ids in fit for pair in pairwise(ids))
    before = Counter(token for ids in fit for token in ids[:-1])
    total = sum(single.values()) + source.VOCAB_SIZE
    unigram, bigram, count = 0.0, 0.0, 0
    for ids in held_out:
        for first, second in pairwise(ids):
            frequency = (single[second] + 1) / total
            unigram -= math.log(frequency)
            bigram -= math.log(0.1 * frequency + 0.9 * pairs[first, second] / max(1, before[first]))
            count += 1
    # Measured: 6.1 and 3.7 nats a token; uniform over the vocabulary would be 8.3.
    assert unigram / count > 5.6
    assert bigram / count < unigram / count - 2.0


def test_special_tokens_are_qwen3s_and_come_last():
    raw = json.loads((tokenizer_path() / "tokenizer.json").read_text(encoding="utf-8"))
    added = [(token["id"], token["content"], token["special"]) for token in raw["added_tokens"]]
    names = (*source.SPECIAL_TOKENS, *source.PLAIN_ADDED_TOKENS)
    assert len(names) == 26
    assert added == [(2022 + index, name, index < 14) for index, name in enumerate(names)]
    assert added[0][1:] == ("<|endoftext|>", True)
    assert added[-1][1:] == ("</think>", False)
    config = json.loads((tokenizer_path() / "tokenizer_config.json").read_text(encoding="ascii"))
    assert {int(key): value["content"] for key, value in config["added_tokens_decoder"].items()} == {
        number: name for number, name, _ in added
    }


def test_every_byte_has_an_entry(titan):
    vocabulary = titan.get_vocab()
    assert len(vocabulary) == titan.get_vocab_size() == source.VOCAB_SIZE == 2048
    assert all(letter in vocabulary for letter in pre_tokenizers.ByteLevel.alphabet())


def test_torchtitan_finds_the_end_token_and_no_begin_token(titan):
    assert titan.eos_token == "<|im_end|>"
    assert titan.eos_id == titan.token_to_id("<|im_end|>")
    assert titan.bos_id is None
    plain = titan.encode("Good morning.")
    assert titan.encode("Good morning.", add_bos=True, add_eos=True) == [*plain, titan.eos_id]


def test_transformers_gives_the_same_ids_as_torchtitan(titan, hugging_face, texts):
    assert len(hugging_face) == titan.get_vocab_size()
    assert hugging_face.eos_token_id == titan.eos_id
    assert hugging_face.pad_token == "<|endoftext|>"
    assert hugging_face.bos_token is None
    for text in (*ODD_TEXTS, *texts[::97]):
        assert hugging_face(text)["input_ids"] == titan.encode(text), text


def test_text_comes_back_as_it_went_in(titan, hugging_face):
    """Up to NFC normalization, which the tokenizer does on purpose, as Qwen3's does."""
    draw = random.Random(5)
    # Letters and signs of many scripts; code points above U+2FFF only where normalization leaves them alone.
    noise = ["".join(chr(draw.choice((draw.randrange(1, 0x2FFF), draw.randrange(0x1F300, 0x1F6FF)))) for _ in range(40))
             for _ in range(200)]  # fmt: skip
    for text in (*ODD_TEXTS, *noise):
        expected = unicodedata.normalize("NFC", text)
        assert titan.decode(titan.encode(text), skip_special_tokens=False) == expected
        assert hugging_face.decode(hugging_face(text)["input_ids"]) == expected


def test_chat_template_renders_chatml_alike_in_both(titan, hugging_face):
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    expected = "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
    assert titan.apply_chat_template(messages) == expected
    assert hugging_face.apply_chat_template(messages, tokenize=False) == expected
    opened = hugging_face.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert opened == "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n"


def test_draws_stay_in_range_and_are_reproducible():
    draw = Draw(3)
    assert [draw.below(1000) for _ in range(4)] == [237, 544, 369, 603]
    assert {draw.between(2, 4) for _ in range(200)} == {2, 3, 4}
    lengths = [draw.long_tailed(4, 127) for _ in range(2000)]
    assert min(lengths) == 4
    assert max(lengths) <= 127
    assert sorted(draw.shuffled("abcd")) == list("abcd")
    assert {draw.weighted((("often", 1), ("never", 0))) for _ in range(100)} == {"often"}


def test_english_rules():
    assert articles("a apple, a unit, A hour, a one-eyed owl, a umbrella") == (
        "an apple, a unit, An hour, a one-eyed owl, an umbrella"
    )
    assert [plural(noun) for noun in ("box", "cherry", "key", "pocket knife", "sheep")] == [
        "boxes",
        "cherries",
        "keys",
        "pocket knives",
        "sheep",
    ]
    assert in_words(21_345) == "twenty-one thousand three hundred and forty-five"
    assert in_words(2_007) == "two thousand and seven"
    assert joined(["a", "b", "c"]) == "a, b and c"
    assert money(101) == "1 crown and 1 bit"
