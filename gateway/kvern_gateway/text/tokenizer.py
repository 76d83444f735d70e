"""The text side of a model: its tokenizer, special tokens, chat template and default sampling values."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# One text at a time is encoded in a pool of our own; rayon threads would only get in its way.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import Tokenizer

from kvern_gateway.text.gguf_metadata import read_metadata
from kvern_gateway.text.gguf_tokenizer import build_tokenizer

log = logging.getLogger(__name__)

# About 2 ms of tokenizing: longer texts leave the event loop.
INLINE_CHARACTERS = 4_096

# The sampling fields that a model's generation_config.json may preset, as vLLM takes them.
_PRESETS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class ModelFilesError(ValueError):
    """The model's files can't serve text: something is missing, damaged or of an unknown kind."""


@dataclass(eq=False, repr=False)
class TextModel:
    """Immutable once loaded; shared by all requests.

    ``chat_templates`` maps template names to Jinja sources; "default" is the usual one. ``special_tokens`` are what
    templates see (``bos_token``, ``eos_token`` …). ``sampling_defaults`` hold values for the names in ``_PRESETS``.
    """

    tokenizer: Tokenizer
    chat_templates: dict[str, str]
    special_tokens: dict[str, str]
    eos_token_ids: list[int] = field(default_factory=list)
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    context_length: int | None = None

    def __post_init__(self) -> None:
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.vocab_size = self.tokenizer.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(
            index for index, token in self.tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self.byte_level = _is_byte_level(self.tokenizer)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="tokenize")

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[
            0
        ].ids
        return ids

    async def encode_async(self, text: str, add_special_tokens: bool) -> list[int]:
        """Like :meth:`encode`; long texts are encoded in a thread, outside the GIL."""
        if len(text) <= INLINE_CHARACTERS:
            return self.encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self.encode, text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token alone, special tokens shown; "" for ids that the tokenizer lacks."""
        return self.tokenizer.decode([token_id], skip_special_tokens=False)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether a token's bytes don't depend on its neighbours: the GPT-2 byte alphabet and nothing else."""
    if tokenizer.decoder is None:
        return False
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    steps = state["decoders"] if state.get("type") == "Sequence" else [state]
    return [step.get("type") for step in steps] == ["ByteLevel"]


def load_text_model(path: str | Path) -> TextModel:
    """From a Hugging Face folder or a .gguf file.

    Raises:
        ModelFilesError: What is wrong with the files, and what would be right.
    """
    path = Path(path)
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if (path / "tokenizer.json").exists():
            return _from_folder(path)
        if len(ggufs) == 1:
            return _from_gguf(ggufs[0])
        raise ModelFilesError(
            f"{path} has no tokenizer.json; save the model with a fast tokenizer, or name a .gguf file"
        )
    if not path.exists():
        raise ModelFilesError(
            f"there is no model at {path}; --model takes a Hugging Face folder or a .gguf file"
        )
    return _from_gguf(path)


def _from_gguf(path: Path) -> TextModel:
    try:
        metadata = read_metadata(path)
        tokenizer = build_tokenizer(metadata)
    except ValueError as error:
        raise ModelFilesError(str(error)) from error
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {}
    for name, key in (
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ):
        index = metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(index, int) and index < len(tokens):
            special[name] = tokens[index]
    prefix = "tokenizer.chat_template"
    templates = {
        key[len(prefix) :].removeprefix(".") or "default": value
        for key, value in metadata.items()
        if key.startswith(prefix) and isinstance(value, str)
    }
    eos = {
        metadata[key]
        for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        if isinstance(metadata.get(key), int)
    }
    architecture = metadata.get("general.architecture", "")
    return TextModel(
        tokenizer,
        templates,
        special,
        sorted(eos),
        context_length=metadata.get(f"{architecture}.context_length"),
    )


def _from_folder(path: Path) -> TextModel:
    try:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # The library raises bare Exception.
        raise ModelFilesError(f"{path / 'tokenizer.json'} can't be read: {error}") from error
    config = _read_json(path / "tokenizer_config.json")
    generation = _read_json(path / "generation_config.json")
    special = {
        name: token
        for name, value in {**_read_json(path / "special_tokens_map.json"), **config}.items()
        if name.endswith("_token") and (token := _token_content(value)) is not None
    }
    eos = generation.get("eos_token_id", _read_json(path / "config.json").get("eos_token_id"))
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not ids and "eos_token" in special:
        found = tokenizer.token_to_id(special["eos_token"])
        ids = [] if found is None else [found]
    presets = {
        name: generation[name]
        for name in _PRESETS
        if isinstance(generation.get(name), int | float) and not isinstance(generation[name], bool)
    }
    if presets:
        log.info("sampling defaults from generation_config.json: %s", presets)
    return TextModel(tokenizer, _templates(path, config), special, ids, presets)


def _templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    named = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(named, str):
        templates["default"] = named
    elif isinstance(named, list):
        templates = {entry["name"]: entry["template"] for entry in named}
    # Of models that see: their processor's.
    if isinstance(own := _read_json(path / "chat_template.json").get("chat_template"), str):
        templates["default"] = own
    file = path / "chat_template.jinja"
    if file.exists():
        templates["default"] = file.read_text(encoding="utf-8")
    return templates


def _token_content(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFilesError(f"{path} is not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}
