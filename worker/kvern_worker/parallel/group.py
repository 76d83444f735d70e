"""The ranks of a group at work: sums, gathers and broadcasts with one fixed order, and the time that they take.

gloo on CPUs, NCCL on GPUs. A sum over ranks is a gather and an addition in order of rank, in float32: each element has the
same bits whatever else is in the step, which a ring's sum of several ranks does not promise.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import kvern_kernels as kernels
from kvern_worker.parallel.topology import Topology, part_of, placed_experts

T = TypeVar("T")


@dataclass
class Clock:
    """Seconds spent in collectives, waiting for the slower ranks included."""

    seconds: float = 0.0

    def take(self) -> float:
        """What has come together since the last call."""
        taken, self.seconds = self.seconds, 0.0
        return taken


@dataclass(frozen=True)
class TensorParallel:
    """The ranks that each hold a part of every layer. The default is one that holds all of it."""

    size: int = 1
    rank: int = 0
    handle: Any = None
    clock: Clock = field(default_factory=Clock)
    expert_parallel: bool = False
    placement: str = "linear"

    def part(self, total: int, what: str = "outputs") -> slice:
        """This rank's part of ``total`` outputs or inputs."""
        return part_of(total, self.size, self.rank, what)

    def split(self, part: T) -> T | None:
        """``part``, or None where nothing is split."""
        return part if self.size > 1 else None

    def num_kv_heads(self, total: int) -> int:
        """Key heads of a rank: where there are fewer than ranks, several hold the same one."""
        return max(1, total // self.size)

    def kv_part(self, total: int, head_dim: int) -> slice:
        """The outputs of this rank's key (or value) heads."""
        count = self.num_kv_heads(total)
        first = self.rank * total // self.size
        return slice(first * head_dim, (first + count) * head_dim)

    def experts(self, num_experts: int) -> list[int]:
        """Those that this rank holds: all, of each a part, or some as wholes."""
        if not self.expert_parallel:
            return list(range(num_experts))
        return placed_experts(num_experts, self.size, self.rank, self.placement)

    def vocab_part(self, vocab_size: int) -> slice:
        """Rows of the embedding; the last rank's may be fewer."""
        each = -(-vocab_size // self.size)
        return slice(min(self.rank * each, vocab_size), min((self.rank + 1) * each, vocab_size))

    def linear(self, x: Tensor, packed: kernels.PackedLinear) -> Tensor:
        """x [T, K of this rank] → [T, N], the sum of all ranks' products."""
        if self.size == 1:
            return kernels.linear(x, packed)
        return self.sum(kernels.linear(x, packed, torch.float32)).to(x.dtype)

    def sum(self, x: Tensor) -> Tensor:
        """Over the ranks, in order of rank, in float32."""
        if self.size == 1:
            return x
        first, *others = self._gather(x.float())
        for other in others:
            first += other
        return first

    def embed(self, token_ids: Tensor, table: Tensor, vocab_size: int) -> Tensor:
        """Rows of an embedding [vocab_size, D] of which this rank holds ``table``, [rows of vocab_part, D]."""
        if self.size == 1:
            return table.index_select(0, token_ids)
        part = self.vocab_part(vocab_size)
        mine = (token_ids >= part.start) & (token_ids < part.stop)
        rows = table.index_select(0, torch.where(mine, token_ids - part.start, 0)) * mine.unsqueeze(1)
        return self.sum(rows).to(table.dtype)

    def logits(self, part: Tensor, vocab_size: int) -> Tensor:
        """[T, rows of vocab_part] of each rank → [T, vocab_size]."""
        if self.size == 1:
            return part
        each = -(-vocab_size // self.size)
        parts = self._gather(F.pad(part, (0, each - part.shape[1])))
        return torch.cat(parts, 1)[:, :vocab_size]

    def _gather(self, x: Tensor) -> list[Tensor]:
        started = time.perf_counter()
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self.handle)
        self.clock.seconds += time.perf_counter() - started
        return parts


ALONE = TensorParallel()


class WorkerGroup:
    """All ranks of one copy of the model. ``sampler``: the rank that chooses tokens and answers the scheduler."""

    def __init__(
        self,
        topology: Topology,
        addresses: Sequence[str],
        tp: TensorParallel,
        clock: Clock,
    ) -> None:
        self.topology = topology
        self.addresses = list(addresses)
        self.tp = tp
        self.clock = clock
        self.sampler = 0

    @property
    def samples(self) -> bool:
        return self.topology.rank == self.sampler

    def smallest(self, *numbers: int) -> list[int]:
        """The least of each number over the ranks."""
        each = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(each, dist.ReduceOp.MIN)
        return each.tolist()

    def agree(self, epoch: int, attempt: int, step: int) -> bool:
        """Whether all ranks are at this step. False where others have heard of a newer stream of plans, so that this
        plan is one that not all were sent; waits for those that have not heard of this one."""
        mine = torch.tensor((epoch, attempt, step), dtype=torch.int64)
        each = [torch.empty_like(mine) for _ in range(self.topology.world)]
        while True:
            dist.all_gather(each, mine)
            heard = [tuple(one.tolist()) for one in each]
            newest = max(heard)
            if all(one == newest for one in heard):
                return True
            if all(one[:2] == newest[:2] for one in heard):
                raise RuntimeError(f"ranks are at different steps of one stream: {[one[2] for one in heard]}")
            if newest[:2] != (epoch, attempt):
                return False

    def share(self, tokens: Tensor) -> Tensor:
        """``tokens`` (int64) as the sampling rank has them."""
        started = time.perf_counter()
        dist.broadcast(tokens, self.sampler)
        self.clock.seconds += time.perf_counter() - started
        return tokens
