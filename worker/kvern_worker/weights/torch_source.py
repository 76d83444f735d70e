"""Checkpoints pickled by torch (``.bin``, ``.pt``), memory-mapped, weights only: no code in them is run."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor

from kvern_worker.weights.source import TensorInfo, TensorSource, broken_file


class TorchSource(TensorSource):
    """``files`` are the shards; each holds a dictionary of tensors."""

    def __init__(self, files: list[Path]) -> None:
        self.infos = {}
        self._tensors: dict[str, Tensor] = {}
        for file in files:
            for name, tensor in _load(file).items():
                self._tensors[name] = tensor
                self.infos[name] = TensorInfo(tuple(tensor.shape), tensor.nbytes, file, tensor.dtype)

    def read_into(self, name: str, out: Tensor) -> None:
        out.copy_(self._tensors[name])


def _load(file: Path) -> dict[str, Tensor]:
    try:
        # Only the zip format of torch >= 1.6 can be mapped.
        mmap = torch.serialization._is_zipfile(file.open("rb"))
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise broken_file(file, error) from error
    if not isinstance(content, dict):
        raise broken_file(file, TypeError("it does not hold a dictionary of tensors"))
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}
