"""The contract of a checkpoint format: named tensors that are read one at a time."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvern.errors import KvernError, invalid


@dataclass(frozen=True)
class Part:
    """Some rows (outputs) of a matrix or vector, range after range, and of a matrix some columns (inputs); None: all."""

    rows: Sequence[slice] | None = None
    columns: slice | None = None

    def shape(self, *whole: int) -> tuple[int, ...]:
        """Of the part of a tensor of shape ``whole``."""
        sizes = list(whole)
        if self.rows is not None:
            sizes[0] = sum(rows.stop - rows.start for rows in self.rows)
        if self.columns is not None:
            sizes[1] = self.columns.stop - self.columns.start
        return tuple(sizes)

    def of(self, whole: Tensor) -> Tensor:
        if self.columns is not None:
            whole = whole[:, self.columns]
        return whole if self.rows is None else torch.cat([whole[rows] for rows in self.rows])


WHOLE = Part()


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. ``shape`` is the logical one; ``num_bytes`` what it takes in ``file``; ``dtype`` None in GGUF,
    which has types of its own."""

    shape: tuple[int, ...]
    num_bytes: int
    file: Path
    dtype: torch.dtype | None = None


class TensorSource(ABC):
    """Tensors under their Hugging Face names, whatever the file calls them."""

    infos: dict[str, TensorInfo]

    @abstractmethod
    def read_into(self, name: str, out: Tensor) -> None:
        """Writes the tensor into ``out`` (of the shape in ``infos``), converted to its dtype."""

    def read_part(self, name: str, shape: tuple[int, ...], part: Part, out: Tensor) -> None:
        """Writes a part of the tensor of ``shape`` into ``out``. This one reads all of it first."""
        whole = torch.empty(shape, dtype=out.dtype)
        self.read_into(name, whole)
        out.copy_(part.of(whole))

    def blocks(self, name: str) -> tuple[Tensor, str] | None:
        """The tensor as it is quantized, uint8 [rows, bytes of a row], and its ggml type; None where it is not."""
        return None

    def has(self, name: str) -> bool:
        return name in self.infos

    @property
    def files(self) -> list[Path]:
        return sorted({info.file for info in self.infos.values()})

    @property
    def total_bytes(self) -> int:
        return sum(info.num_bytes for info in self.infos.values())


class DummySource(TensorSource):
    """``--load-format dummy``: weights of the right shapes, reproducible, worth nothing.

    Norms are ones, biases zeros, everything else is drawn by a generator seeded with the tensor's name.
    """

    def __init__(self, config_file: Path) -> None:
        self.infos = {}
        self._file = config_file

    def has(self, name: str) -> bool:
        return True

    @property
    def files(self) -> list[Path]:
        return [self._file]

    def read_into(self, name: str, out: Tensor) -> None:
        if "norm" in name:
            out.fill_(1.0)
        elif name.endswith(".bias"):
            out.zero_()
        else:
            seed = int.from_bytes(name.encode()[-8:], "little")
            generator = torch.Generator().manual_seed(seed % 2**63)
            out.copy_(torch.empty(out.shape).normal_(0.0, 0.02, generator=generator))


class TextPart(TensorSource):
    """The tensors of ``whole`` under "language_model.", without that prefix: of a model that sees images, its text part."""

    PREFIX = "language_model."

    def __init__(self, whole: TensorSource) -> None:
        self._whole = whole
        self.infos = {
            name.removeprefix(self.PREFIX): info
            for name, info in whole.infos.items()
            if name.startswith(self.PREFIX)
        }

    def read_into(self, name: str, out: Tensor) -> None:
        self._whole.read_into(self.PREFIX + name, out)

    def read_part(self, name: str, shape: tuple[int, ...], part: Part, out: Tensor) -> None:
        self._whole.read_part(self.PREFIX + name, shape, part, out)


def text_part(source: TensorSource) -> TensorSource:
    """``source``, or its text part where it has one."""
    return TextPart(source) if any(name.startswith(TextPart.PREFIX) for name in source.infos) else source


class Rooted(TensorSource):
    """The tensors of ``bare``, a decoder that was saved without its head, under the names that it has with one."""

    PREFIX = "model."

    def __init__(self, bare: TensorSource) -> None:
        self._bare = bare
        self.infos = {self.PREFIX + name: info for name, info in bare.infos.items()}

    def read_into(self, name: str, out: Tensor) -> None:
        self._bare.read_into(name.removeprefix(self.PREFIX), out)

    def read_part(self, name: str, shape: tuple[int, ...], part: Part, out: Tensor) -> None:
        self._bare.read_part(name.removeprefix(self.PREFIX), shape, part, out)


def rooted(source: TensorSource) -> TensorSource:
    """``source``, with the prefix that its names lack where it does."""
    return Rooted(source) if "embed_tokens.weight" in source.infos else source


class Renamed(TensorSource):
    """The tensors of ``original``, each name replaced by the first of ``rules`` (pattern at its start, replacement) that
    matches it."""

    def __init__(self, original: TensorSource, rules: Sequence[tuple[str, str]]) -> None:
        self._original = original
        self._names = {_rename(name, rules): name for name in original.infos}
        self.infos = {new: original.infos[name] for new, name in self._names.items()}

    def read_into(self, name: str, out: Tensor) -> None:
        self._original.read_into(self._names[name], out)


def _rename(name: str, rules: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        new, count = re.subn(f"^{pattern}", replacement, name, count=1)
        if count:
            return new
    return name


def broken_file(file: Path, error: Exception) -> KvernError:
    """A file that its own format's reader rejects."""
    return invalid(
        "model", f"cannot read {file}: {error}; it may be truncated, download it again", value=file
    )
