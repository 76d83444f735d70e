"""Tokenizers built from GGUF metadata, against byte-pair merging written out in Python."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvern_gateway.text.gguf_metadata import GGUFError, read_metadata
from kvern_gateway.text.gguf_tokenizer import build_tokenizer
from kvern_gateway.text.tokenizer import ModelFilesError, TextModel, load_text_model

# As llama.cpp publishes them in llama-vocab.cpp.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
PUBLISHED = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [
        CONTRACTIONS
        + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen2": [
        CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}
SAMPLES = [
    "Hello, world! It's 2026 and I've 1234567 reasons.",
    "def f(x):\n\treturn x ** 2  # squares\n\n\n    pass  \r\n",
    "日本語のテキスト 한국어 العربية עברית ελληνικά",
    "emoji 🎉👩‍👩‍👧‍👦 ½ Ⅷ ² x₁ 3.14e-10 $5 <=> ~|^",
    "   leading, trailing   ",
    "don't DON'T we'LL",
    "\n\n \n\t \n",
    "a" * 50 + "ffi" + "\u00e9" + "e\u0301",
]


def alphabet() -> dict[int, str]:
    """GPT-2's bytes_to_unicode."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in kept}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(kept))
    return table


BYTES = alphabet()


def pieces(text: str, expressions: list[str]) -> list[str]:
    parts = [text]
    for expression in expressions:
        divided: list[str] = []
        for part in parts:
            at = 0
            for match in regex.finditer(expression, part):
                divided += [part[at : match.start()], match.group()]
                at = match.end()
            divided.append(part[at:])
        parts = [part for part in divided if part]
    return parts


class ReferenceBPE:
    def __init__(self, metadata: dict[str, Any], pre: str) -> None:
        self.vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        merges = metadata["tokenizer.ggml.merges"]
        self.ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(merges)}
        self.expressions = PUBLISHED[pre]
        self.whole_first = pre == "llama-bpe"

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in pieces(text, self.expressions):
            ids += self._merge("".join(BYTES[byte] for byte in piece.encode()))
        return ids

    def _merge(self, word: str) -> list[int]:
        if self.whole_first and word in self.vocab:
            return [self.vocab[word]]
        # As Hugging Face's BPE: what the vocabulary lacks is left out first, so that its neighbours may merge.
        symbols = [symbol for symbol in word if symbol in self.vocab]
        while len(symbols) > 1:
            ranked = [(self.ranks.get(pair, 10**9), i) for i, pair in enumerate(itertools.pairwise(symbols))]
            rank, at = min(ranked)
            if rank == 10**9:
                break
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        return [self.vocab[symbol] for symbol in symbols]


@pytest.fixture(scope="module")
def metadata(smollm2_path: Path) -> dict[str, Any]:
    return read_metadata(smollm2_path)


@pytest.mark.parametrize("pre", sorted(PUBLISHED))
def test_pre_tokenizers_split_as_llama_cpp_does(metadata: dict[str, Any], pre: str) -> None:
    changed = {**metadata, "tokenizer.ggml.pre": pre, "tokenizer.ggml.token_type": []}
    tokenizer = build_tokenizer({**changed, "tokenizer.ggml.add_bos_token": False})
    reference = ReferenceBPE(metadata, pre)
    for text in SAMPLES:
        if pre == "qwen2":
            import unicodedata

            expected = reference.encode(unicodedata.normalize("NFC", text))
        else:
            expected = reference.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected, text


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40))
@example(text='"\x16:')
def test_smollm2_encodes_any_text_as_the_reference_and_back(smollm2: TextModel, text: str) -> None:
    reference = _reference(smollm2)
    ids = smollm2.encode(text, add_special_tokens=False)
    assert ids == reference.encode(text)
    # Its vocabulary lacks a few bytes that no assigned character of common scripts uses.
    if all(BYTES[byte] in reference.vocab for byte in text.encode()):
        assert smollm2.decode(ids, skip_special_tokens=False) == text


def _reference(model: TextModel, cache: list[ReferenceBPE] = []) -> ReferenceBPE:  # noqa: B006 - built once
    if not cache:
        state = json.loads(model.tokenizer.to_str())["model"]
        tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
        merges = [" ".join(pair) for pair in state["merges"]]
        cache.append(
            ReferenceBPE({"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}, "smollm")
        )
    return cache[0]


def test_digits_are_split_one_by_one(smollm2: TextModel) -> None:
    tokens = smollm2.tokenizer.encode("in 2026").tokens
    assert tokens == ["in", "Ġ", "2", "0", "2", "6"]


def test_special_tokens_in_text_are_single_ids(smollm2: TextModel) -> None:
    assert smollm2.encode("<|im_start|>user", False)[0] == 1
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.eos_token_ids == [2]
    assert smollm2.context_length == 8192


def test_long_text_is_encoded_off_the_loop_with_the_same_result(smollm2: TextModel) -> None:
    import asyncio

    text = "".join(SAMPLES) * 40
    assert asyncio.run(smollm2.encode_async(text, False)) == smollm2.encode(text, False)


def test_an_unknown_pre_tokenizer_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'future-bpe', which Kvern does not know"):
        build_tokenizer({**metadata, "tokenizer.ggml.pre": "future-bpe"})


def test_an_unknown_tokenizer_model_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'bert'"):
        build_tokenizer({**metadata, "tokenizer.ggml.model": "bert"})


def test_llama3_adds_its_bos_unless_the_file_says_otherwise(metadata: dict[str, Any]) -> None:
    llama3 = {**metadata, "tokenizer.ggml.pre": "llama-bpe"}
    del llama3["tokenizer.ggml.add_bos_token"]
    assert build_tokenizer(llama3).encode("Hi").ids[0] == 1
    llama3["tokenizer.ggml.add_bos_token"] = False
    assert build_tokenizer(llama3).encode("Hi").ids[0] != 1


# SentencePiece.

WORDS = [
    "▁",
    "l",
    "o",
    "w",
    "e",
    "r",
    "n",
    "s",
    "lo",
    "low",
    "er",
    "▁low",
    "▁lower",
    "▁n",
    "ne",
    "new",
    "▁new",
    "es",
]


def sentencepiece_metadata() -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *WORDS]
    scores = [0.0] * 259 + [-1000.0 if len(word) == 1 else -float(rank) for rank, word in enumerate(WORDS)]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(WORDS)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def sentencepiece_reference(metadata: dict[str, Any], text: str) -> list[int]:
    """llama.cpp's: merge the neighbours whose joint piece has the best score, the leftmost on a tie."""
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores = metadata["tokenizer.ggml.scores"]
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [
            (-scores[vocab[a + b]], i)
            for i, (a, b) in enumerate(itertools.pairwise(symbols))
            if a + b in vocab
        ]
        if not joined:
            break
        _, at = min(joined)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids: list[int] = []
    for symbol in symbols:
        ids += [vocab[symbol]] if symbol in vocab else [vocab[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return ids


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet="lowerns é", min_size=1, max_size=24))
def test_sentencepiece_merges_by_score(text: str) -> None:
    metadata = sentencepiece_metadata()
    tokenizer = build_tokenizer(metadata)
    expected = sentencepiece_reference(metadata, text)
    encoded = tokenizer.encode(text)
    assert encoded.ids == [1, *expected]
    assert tokenizer.decode(encoded.ids) == text


# Files.


def test_a_folder_gives_what_its_files_say(smollm2: TextModel, tmp_path: Path) -> None:
    smollm2.tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {
        "eos_token": {"content": "<|im_end|>"},
        "bos_token": "<|im_start|>",
        "chat_template": "{{ bos_token }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "temperature": 0.7}))
    model = load_text_model(tmp_path)
    assert model.encode("Hello 42", False) == smollm2.encode("Hello 42", False)
    assert model.eos_token_ids == [2, 0]
    assert model.sampling_defaults == {"temperature": 0.7}
    assert model.special_tokens == {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    assert model.chat_templates == {"default": "{{ bos_token }}"}
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert load_text_model(tmp_path).chat_templates == {"default": "newer"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not a gguf file at all, but long enough", "is not a GGUF file"),
        (struct.pack("<IIQQ", 0x46554747, 9, 0, 0), "GGUF version 9"),
        (struct.pack("<IIQQ", 0x46554747, 3, 0, 5) + b"\x01", "cut off or damaged"),
        (struct.pack("<IIQQQ", 0x46554747, 3, 0, 1, 2**60) + b"key", "cut off or damaged"),
        (
            struct.pack("<IIQQQ", 0x46554747, 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**61),
            "cut off or damaged",
        ),
    ],
)
def test_damaged_gguf_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError, match=message):
        read_metadata(path)
    with pytest.raises(ModelFilesError, match=message):
        load_text_model(path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="no model at"):
        load_text_model(tmp_path / "nothing")
    with pytest.raises(ModelFilesError, match=r"no tokenizer\.json"):
        load_text_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFilesError, match="can't be read"):
        load_text_model(tmp_path)
