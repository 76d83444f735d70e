"""The way of a step's arrays to the GPU: side by side into pinned memory, and over in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from kvern_worker.layers.attention import StepInputs

_ALIGNMENT = 64  # bytes, so that kernels may read any element type in vectors


class Staging:
    """Memory of the host and its twin on ``place``. What :meth:`put` returned holds until its next call; tensors of the
    same shapes lie at the same addresses each time, as a graph needs it, unless larger ones came between."""

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._pinned = place.type == "cuda"
        self._host = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._twin = torch.empty(0, dtype=torch.uint8, device=place)
        self._sent: torch.cuda.Event | None = None

    def put(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same values on ``place``."""
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._sent is not None:
            self._sent.synchronize()  # the copy before may still read the pinned memory
        if end > len(self._host):
            size = 1 << (end - 1).bit_length()
            self._host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
            self._twin = torch.empty(size, dtype=torch.uint8, device=self._place)
        for start, tensor in zip(starts, tensors, strict=True):
            _view(self._host, start, tensor).copy_(tensor)
        self._twin[:end].copy_(self._host[:end], non_blocking=True)
        if self._pinned:
            self._sent = self._sent or torch.cuda.Event()
            self._sent.record()
        return [_view(self._twin, start, tensor) for start, tensor in zip(starts, tensors, strict=True)]

    def put_step(self, step: StepInputs) -> StepInputs:
        """``step``, its tensors on ``place``."""
        here = {field.name: getattr(step, field.name) for field in fields(step)}
        here = {name: value for name, value in here.items() if isinstance(value, Tensor)}
        there: dict[str, Any] = dict(zip(here, self.put(list(here.values())), strict=True))
        return replace(step, **there)


def _view(memory: Tensor, start: int, like: Tensor) -> Tensor:
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
