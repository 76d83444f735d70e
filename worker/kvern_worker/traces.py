"""A span for each step that computes a sequence whose client has its call traced: one a step and trace, not one a token."""

from __future__ import annotations

import time

from kvern.rpc.packing import unpack_u32
from kvern.rpc.tracing import Tracing
from kvern.v1 import worker_pb2


class StepTraces:
    """Follows the plans; called by the thread that runs them."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._parents: dict[int, str] = {}

    def reset(self) -> None:
        """Another leader drives the batch: its slots are empty."""
        self._parents.clear()

    def stepped(self, plan: worker_pb2.StepPlan, result: worker_pb2.StepResult, seconds: float) -> None:
        """The step has just ended, after ``seconds``."""
        parents = self._parents
        if parents:
            for slot in unpack_u32(plan.released_slots).tolist():
                parents.pop(slot, None)
        for new in plan.new_sequences:
            if _is_sampled(new.traceparent):
                parents[new.slot] = new.traceparent
        if not parents:
            return
        decoded, prefilled = unpack_u32(plan.decode_slots).tolist(), unpack_u32(plan.prefill_slots).tolist()
        traced = {parents[slot] for slot in (*prefilled, *decoded) if slot in parents}
        end = time.time_ns()
        attributes = {
            "kvern.step": plan.step,
            "kvern.num_decoded": len(decoded),
            "kvern.num_prefilled_tokens": int(unpack_u32(plan.prefill_lengths).sum()),
            "kvern.prepare_us": result.prepare_us,
            "kvern.forward_us": result.forward_us,
            "kvern.sample_us": result.sample_us,
        }
        for traceparent in traced:
            self._tracing.start("step", traceparent, attributes, end - int(seconds * 1e9)).end(end)


def _is_sampled(traceparent: str) -> bool:
    """By the flags at its end: the lowest bit of two hexadecimal digits."""
    return traceparent[-1:] in set("13579bdf")
