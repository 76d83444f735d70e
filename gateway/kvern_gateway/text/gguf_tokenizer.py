"""A tokenizer from a GGUF file's own metadata, as llama.cpp reads it.

Each ``tokenizer.ggml.pre`` names a way to split text before byte-pair merging. Guessing it wrong gives other tokens
than the model was trained on, so an unknown name is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

log = logging.getLogger(__name__)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_TAIL}"

# Regular expressions applied one after the other; what one leaves unmatched is a piece too.
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
}
_ALIASES = {
    "gpt2": "gpt-2",
    "mpt": "gpt-2",
    "olmo": "gpt-2",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "codeshell": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "smaug-bpe": "llama-bpe",
    "dbrx": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "megrez": "qwen2",
}
_NFC = {"qwen2"}


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that the metadata describes.

    Raises:
        ValueError: The tokenizer's model or pre-tokenizer is one that Kvern doesn't know, or its tables are missing.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata)
    else:
        raise ValueError(
            f"the GGUF file's tokenizer.ggml.model is {kind!r}; 'gpt2' (byte-level BPE) and 'llama' (SentencePiece) "
            "are supported. Serve the model's Hugging Face folder instead"
        )
    _add_special_tokens(tokenizer, metadata)
    _add_bos_eos(tokenizer, metadata)
    return tokenizer


def _byte_level(metadata: dict[str, Any]) -> Tokenizer:
    named = metadata.get("tokenizer.ggml.pre", "")
    if not named:
        log.warning(
            "the GGUF file names no pre-tokenizer; using llama.cpp's default, which may be the wrong one"
        )
    pre = _ALIASES.get(named or "default", named or "default")
    if pre not in _SPLITS:
        known = ", ".join(sorted({*_SPLITS, *_ALIASES}))
        raise ValueError(
            f"the GGUF file's tokenizer.ggml.pre is {named!r}, which Kvern does not know (it knows {known}). "
            "Serve the model's Hugging Face folder instead"
        )
    tokens = _required(metadata, "tokenizer.ggml.tokens")
    lines = _required(metadata, "tokenizer.ggml.merges")
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe", byte_fallback=False)
    )
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in _SPLITS[pre]]
    if metadata.get("tokenizer.ggml.add_space_prefix", False):
        steps.insert(0, pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: dict[str, Any]) -> Tokenizer:
    tokens = _required(metadata, "tokenizer.ggml.tokens")
    scores = _required(metadata, "tokenizer.ggml.scores")
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(tokens, scores, vocab),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    decoding: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges_from_scores(
    tokens: Sequence[str], scores: Sequence[float], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece merges the adjacent pair whose joint piece scores highest: as ranked merges."""
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for index, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[index], vocab[left], vocab[right], (left, right)))
    found.sort()
    return [pair for _, _, _, pair in found]


def _add_special_tokens(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    special: list[AddedToken] = []
    for token, kind in zip(tokens, kinds, strict=False):
        if kind == _CONTROL or (kind == _UNKNOWN and (sentencepiece or token.startswith("<"))):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            special.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_tokens(special)


def _add_bos_eos(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    """llama.cpp's rule: the flags in the file, else a BOS for SentencePiece and Llama 3 vocabularies."""
    bos_default = (
        metadata["tokenizer.ggml.model"] == "llama"
        or _ALIASES.get(metadata.get("tokenizer.ggml.pre", ""), metadata.get("tokenizer.ggml.pre"))
        == "llama-bpe"
    )
    tokens = metadata["tokenizer.ggml.tokens"]
    single: list[str] = ["$A:0"]
    special: list[tuple[str, int]] = []
    for flag, key, default, at in (
        ("add_bos_token", "bos_token_id", bos_default, 0),
        ("add_eos_token", "eos_token_id", False, 2),
    ):
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        if token_id is not None and metadata.get(f"tokenizer.ggml.{flag}", default):
            single.insert(at, f"{tokens[token_id]}:0")
            special.append((tokens[token_id], token_id))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=None, special_tokens=special
        )


def _required(metadata: dict[str, Any], key: str) -> list[Any]:
    values = metadata.get(key)
    if not isinstance(values, list) or not values:
        raise ValueError(f"the GGUF file has no {key}")
    return values
