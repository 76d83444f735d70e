"""Memory for the adapters that steps may use: every linear layer of a model has room for each slot's A and B.

A slot is filled by a background thread while steps run that use others; the scheduler plans a sequence with a slot only
after it has been filled, and has it filled anew only after no step in flight uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import kvern_kernels as kernels
from kvern_worker.adapters.peft import Adapter, Target


@dataclass(slots=True)
class AdaptedLinear:
    """What slots add to one linear layer's output. ``a`` [slots, slices, rank, in], ``b`` [slots, out, rank] (outputs side
    by side in memory on a CPU), ``scales`` float32 [slots], 0 where the slot's adapter leaves this layer alone, which
    ``adapted`` says on the host, [slots]."""

    slots: AdapterSlots
    a: Tensor
    b: Tensor
    scales: Tensor
    prefixes: tuple[str, ...]
    widths: tuple[int, ...]
    adapted: npt.NDArray[np.bool_]

    @property
    def active(self) -> bool:
        """Whether this step has sequences with an adapter."""
        return self.slots.plan is not None

    def add(self, x: Tensor, out: Tensor) -> None:
        """Adds B·A·x·scale of each row's adapter to ``out`` [T, out]; x [T, in]."""
        plan = self.slots.plan
        if plan is None or not self.adapted[self.slots.used].any():
            return
        hidden = kernels.lora_shrink(x, self.a, plan)
        kernels.lora_expand(hidden, self.b, self.scales, plan, out, self.widths)

    def fill(self, slot: int, adapter: Adapter) -> None:
        """Slices that the adapter leaves alone become zeros."""
        pairs = [adapter.pairs.get(prefix) for prefix in self.prefixes]
        given = [pair for pair in pairs if pair is not None]
        self.adapted[slot] = bool(given)
        if not given:
            self.scales[slot] = 0.0
            return
        # One factor for all slices where they agree; else each is multiplied into its B.
        factors = {pair.scale for pair in given}
        common = factors.pop() if len(factors) == 1 else 1.0
        a, b = self.a[slot].zero_(), self.b[slot].zero_()
        for pair, down, up in zip(pairs, a, b.split(self.widths), strict=True):
            if pair is not None:
                rank = pair.a.shape[0]
                down[:rank] = pair.a
                up[:, :rank] = pair.b if pair.scale == common else pair.b.float() * (pair.scale / common)
        self.scales[slot] = common


class AdapterSlots:
    """``num_slots`` adapters of up to ``max_rank``, in ``dtype`` on ``place``. ``plan`` and ``used`` are those of the
    running step."""

    def __init__(
        self, num_slots: int, max_rank: int, dtype: torch.dtype, place: torch.device | None = None
    ) -> None:
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.plan: Any = None
        self.used: list[int] = []
        self.targets: dict[str, Target] = {}
        self._dtype = dtype
        self._place = place or torch.device("cpu")
        self._linears: list[AdaptedLinear] = []

    def adapt(self, packed: Any, prefixes: Sequence[str], sizes: Sequence[int], in_size: int) -> Any:
        """The packed layer, whose output gets what the adapters of a step add to its modules ``prefixes``. Memory is
        only touched when a slot is filled."""
        slots, rank, out_size = self.num_slots, self.max_rank, sum(sizes)
        zeros = partial(torch.zeros, dtype=self._dtype, device=self._place)
        on_cpu = self._place.type == "cpu"
        linear = AdaptedLinear(
            self,
            zeros(slots, len(sizes), rank, in_size),
            zeros(slots, rank, out_size).transpose(1, 2) if on_cpu else zeros(slots, out_size, rank),
            torch.zeros(slots, device=self._place),
            tuple(prefixes),
            tuple(sizes),
            np.zeros(slots, np.bool_),
        )
        self._linears.append(linear)
        for prefix, size in zip(prefixes, sizes, strict=True):
            self.targets[prefix] = Target(size, in_size)
        return replace(packed, delta=linear)

    def begin(self, slots: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64]) -> None:
        """A step starts, in which sequence i runs ``lengths[i]`` tokens with the adapter in ``slots[i]``, −1: none."""
        used = np.unique(slots)
        self.used = used[used >= 0].tolist()
        self.plan = None
        if self.used:
            rows = torch.from_numpy(np.repeat(slots, lengths)).to(self._place)
            self.plan = kernels.lora_plan(rows, self.num_slots)

    @torch.inference_mode()
    def fill(self, slot: int, adapter: Adapter) -> None:
        for linear in self._linears:
            linear.fill(slot, adapter)
