"""One rank of a group behind the worker service.

Every rank is sent every plan, and runs it when all have it: a plan that the leader wrote to some ranks only, because it or
a rank was lost halfway, is dropped by all. One rank samples, and the others append its tokens to their batches.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from kvern.errors import KvernError
from kvern.rpc.packing import unpack_u32
from kvern.v1 import error_pb2, worker_pb2
from kvern_worker.executor import Ints, ModelExecutor
from kvern_worker.parallel.group import WorkerGroup
from kvern_worker.parallel.launch import leave
from kvern_worker.plan_checks import claimed, is_empty

log = logging.getLogger(__name__)


class GroupExecutor(ModelExecutor):
    """``run`` takes part in the collectives of ``group``. Where one fails, a rank is gone, and this process ends with it."""

    def __init__(self, *args: Any, group: WorkerGroup, held_bytes: int) -> None:
        super().__init__(*args, held_bytes=held_bytes)
        self._group = group

    def describe(self) -> worker_pb2.DescribeResponse:
        description = super().describe()
        description.rank_addresses.extend(self._group.addresses)
        description.rank = self._group.topology.rank
        description.sampling_rank = self._group.sampler
        return description

    def run(self, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
        try:
            if not self._group.agree(plan.epoch, plan.attempt, plan.step) or is_empty(plan):
                return claimed(plan)
            self._group.clock.take()
            result = super().run(plan)
            result.comm_us = int(self._group.clock.take() * 1e6)
            return result
        except KvernError:
            # The plan is malformed, and so it is on every rank.
            raise
        except Exception as error:
            log.exception("step %d failed", plan.step)
            leave(f"in step {plan.step}: {str(error).split('. ')[0]}")
            raise

    def _sample(
        self,
        slots: Ints,
        logits: torch.Tensor,
        reports: dict[int, worker_pb2.SlotLogprobs],
        result: worker_pb2.StepResult,
    ) -> None:
        """−1 stands for a sequence that failed."""
        tokens = np.full(len(slots), -1, np.int64)
        if not self._group.samples:
            self._group.share(torch.from_numpy(tokens))
            fine = tokens >= 0
            self._batch.failed[slots[~fine]] = True
            self._batch.append_tokens(slots[fine], tokens[fine])
            self._sampling.record(slots[fine], tokens[fine])
            return
        try:
            super()._sample(slots, logits, reports, result)
        except Exception as error:
            # The other ranks wait for this one: only the step's sequences fail.
            log.exception("sampling of step %d failed", result.step)
            wrong = KvernError(
                error_pb2.ERROR_CODE_INTERNAL,
                f"sampling failed in this request's step: {type(error).__name__}",
            )
            for slot in slots.tolist():
                self._fail(slot, wrong, result)
            result.slots = result.token_ids = b""
        tokens[np.isin(slots, unpack_u32(result.slots))] = np.frombuffer(result.token_ids, "<i4")
        self._group.share(torch.from_numpy(tokens))
