"""From a sequence's final hidden states to its embedding, as sentence-transformers' files describe it.

``modules.json`` lists what follows the model (https://sbert.net/docs/sentence_transformer/usage/custom_models.html): a
pooling, whose folder's ``config.json`` says which, and perhaps a normalization. ``sentence_bert_config.json`` bounds the
length, and ``matryoshka_dimensions`` or ``is_matryoshka`` in the model's ``config.json`` allow shorter vectors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvern.errors import invalid
from kvern.v1 import model_pb2
from kvern_worker.config import unsupported

RUNNERS = ("auto", "generate", "pooling")

_MEAN, _CLS, _LAST = (
    model_pb2.POOLING_KIND_MEAN,
    model_pb2.POOLING_KIND_CLS,
    model_pb2.POOLING_KIND_LAST,
)
_KINDS = {"mean": _MEAN, "cls": _CLS, "last": _LAST, "lasttoken": _LAST}
# As the first versions of the pooling's config.json say it.
_FLAGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class PoolingConfig:
    """``max_length``: tokens that the model was made for, where its files say so. ``sizes``: see ModelInfo.pooling."""

    kind: model_pb2.PoolingKind.ValueType
    normalized: bool = True
    max_length: int | None = None
    truncatable: bool = False
    sizes: tuple[int, ...] = ()

    def to_pb(self, size: int, bidirectional: bool) -> model_pb2.Pooling:
        return model_pb2.Pooling(
            kind=self.kind,
            size=size,
            normalized=self.normalized,
            truncatable=self.truncatable,
            sizes=self.sizes,
            bidirectional=bidirectional,
        )


def choose_pooling(
    path: Path, bidirectional: bool, runner: str = "auto", override: str | None = None
) -> PoolingConfig | None:
    """What a model in ``path`` gives embeddings by; None: it generates. ``override``: ``--pooler-config``.

    Raises KvernError where the files, or the flags, ask for what cannot be done.
    """
    if runner not in RUNNERS:
        raise invalid(
            "runner", f"runner {runner} is unknown; choose one of {', '.join(RUNNERS)}", value=runner
        )
    modules = path / "modules.json"
    if bidirectional and runner == "generate":
        raise unsupported("an encoder gives embeddings; it cannot generate", field="runner", value=runner)
    if runner == "generate" or (runner == "auto" and not bidirectional and not modules.is_file()):
        if override is not None:
            raise invalid("pooler_config", "pooler-config is for --runner pooling", value=override)
        return None
    config = PoolingConfig(_CLS if bidirectional else _LAST)
    if modules.is_file():
        config = _read_modules(path, modules)
    config = _add_sizes(path, config)
    if override is not None:
        config = _overridden(config, override)
    if not bidirectional and config.kind != _LAST:
        raise unsupported(
            "a decoder, whose prompts are computed in chunks, is pooled by its last token only; mean and cls pooling "
            "are for encoders",
            field="pooler_config",
            value=model_pb2.PoolingKind.Name(config.kind),
        )
    return config


def _read_modules(path: Path, modules: Path) -> PoolingConfig:
    kind, normalized, max_length = None, False, None
    for module in _read_json(modules, list):
        name = str(module.get("type", "")).rpartition(".")[2]
        if name == "Transformer":
            config = _read_json(path / module.get("path", "") / "sentence_bert_config.json", dict)
            max_length = config.get("max_seq_length")
        elif name == "Pooling":
            kind = _read_pooling(path / module.get("path", "") / "config.json")
        elif name == "Normalize":
            normalized = True
        else:
            raise unsupported(
                f"{modules}: the module {name} is not supported; supported are Transformer, Pooling and Normalize",
                field="modules.json",
                value=name,
            )
    if kind is None:
        raise invalid("modules.json", f"{modules} names no pooling", value=modules)
    return PoolingConfig(kind, normalized, max_length)


def _read_pooling(file: Path) -> model_pb2.PoolingKind.ValueType:
    config = _read_json(file, dict)
    modes = config.get("pooling_mode") or [
        name for name, value in config.items() if name.startswith("pooling_mode_") and value is True
    ]
    modes = [modes] if isinstance(modes, str) else modes
    names = [_FLAGS.get(mode, mode) for mode in modes]
    if len(names) != 1 or names[0] not in _KINDS:
        raise unsupported(
            f"{file}: pooling by {', '.join(names) or 'nothing'} is not supported; supported is one of mean, cls and "
            "the last token",
            field="pooling_mode",
            value=", ".join(names),
        )
    return _KINDS[names[0]]


def _add_sizes(path: Path, config: PoolingConfig) -> PoolingConfig:
    raw = _read_json(path / "config.json", dict) if path.is_dir() else {}
    sizes = tuple(sorted(raw.get("matryoshka_dimensions") or ()))
    return replace(config, truncatable=bool(sizes or raw.get("is_matryoshka")), sizes=sizes)


def _overridden(config: PoolingConfig, override: str) -> PoolingConfig:
    try:
        values = json.loads(override)
    except ValueError as error:
        raise invalid("pooler_config", f"pooler-config is not valid JSON: {error}", value=override) from error
    if not isinstance(values, dict) or not set(values) <= {"pooling_type", "normalize"}:
        raise invalid(
            "pooler_config", 'pooler-config takes {"pooling_type": …, "normalize": …}', value=override
        )
    kind = str(values.get("pooling_type", "")).lower()
    if kind and kind not in _KINDS:
        raise invalid(
            "pooler_config", f"pooling_type {kind} is unknown; choose MEAN, CLS or LAST", value=kind
        )
    return replace(
        config,
        kind=_KINDS.get(kind, config.kind),
        normalized=bool(values.get("normalize", config.normalized)),
    )


def _read_json(file: Path, kind: type) -> Any:
    """The file's contents; empty where it is not there. Raises KvernError where they are something else."""
    if not file.is_file():
        return kind()
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise invalid("model", f"cannot read {file}: {error}", value=file) from error
    if not isinstance(value, kind):
        raise invalid("model", f"{file} must hold a JSON {kind.__name__}", value=file)
    return value


def pool(
    config: PoolingConfig,
    model: Any,
    states: Any,
    lengths: npt.NDArray[np.int64],
    ends: npt.NDArray[np.bool_],
) -> npt.NDArray[np.float32]:
    """One vector, float32, for each sequence of a step that ends in it. ``lengths`` [S]: tokens of each, one after the
    other in ``states``; ``ends`` [S]. By mean or first token, all sequences are whole."""
    last = np.cumsum(lengths) - 1
    if config.kind == _MEAN:
        hidden = model.hidden(states, slice(None))
        each = torch.from_numpy(lengths).to(hidden.device)
        means = torch.segment_reduce(hidden, "mean", lengths=each, axis=0)
        return means.cpu().numpy()[ends]
    rows = last if config.kind == _LAST else last - lengths + 1
    vectors: npt.NDArray[np.float32] = model.hidden(states, torch.from_numpy(rows[ends])).cpu().numpy()
    return vectors
