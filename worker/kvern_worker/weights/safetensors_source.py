"""safetensors checkpoints: memory-mapped, one file or shards."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvern_worker.weights.source import TensorInfo, TensorSource, broken_file

_BITS = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "F16": 16, "BF16": 16, "I16": 16}


class SafetensorsSource(TensorSource):
    """``files`` are the shards; each tensor is in exactly one of them."""

    def __init__(self, files: list[Path]) -> None:
        self.infos = {}
        self._handles: dict[Path, Any] = {}
        for file in files:
            try:
                handle = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise broken_file(file, error) from error
            self._handles[file] = handle
            for name in handle.keys():  # noqa: SIM118 - no mapping, it has no __iter__
                piece = handle.get_slice(name)
                shape = tuple(piece.get_shape())
                num_bytes = prod(shape) * _BITS.get(piece.get_dtype(), 8) // 8
                self.infos[name] = TensorInfo(shape, num_bytes, file)

    def read_into(self, name: str, out: Tensor) -> None:
        file = self.infos[name].file
        try:
            out.copy_(self._handles[file].get_tensor(name))
        except SafetensorError as error:
            raise broken_file(file, error) from error
