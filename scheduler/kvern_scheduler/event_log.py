"""Records of requests and of steps, where they are asked for: what the core counted, under the names of the protos."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvern.rpc.logs import event
from kvern.v1 import error_pb2, sampling_pb2, worker_pb2
from kvern_scheduler.core.journal import Kind
from kvern_scheduler.core.requests import Request, Sequence

if TYPE_CHECKING:
    from kvern_scheduler.core.group import Group
    from kvern_scheduler.core.plan import Plan

log = logging.getLogger("kvern_scheduler.events")


class EventLog:
    """``requests`` and ``steps`` may be switched at any time."""

    def __init__(self, requests: bool = False, steps: bool = False) -> None:
        self.requests = requests
        self.steps = steps

    def admitted(self, request: Request) -> None:
        if not self.requests:
            return
        submission, params = request.submission, request.submission.params
        event(
            log,
            "request admitted",
            request_id=submission.request_id,
            tenant=submission.tenant,
            prompt_tokens=request.sequences[0].num_prompt,
            n=submission.n,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            priority=submission.priority,
            resumable=submission.resumable,
        )

    def ended(self, sequence: Sequence) -> None:
        """Its end is committed."""
        finish = sequence.finish
        if not self.requests or finish is None:
            return
        trail = sequence.trail or []
        code = "" if finish.error is None else error_pb2.ErrorCode.Name(finish.error.code)
        event(
            log,
            "request ended",
            request_id=sequence.request.submission.request_id,
            tenant=sequence.request.submission.tenant,
            choice=sequence.choice,
            reason=sampling_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower(),
            error=code.removeprefix("ERROR_CODE_").lower(),
            prompt_tokens=sequence.num_prompt,
            cached_tokens=finish.num_cached_tokens,
            output_tokens=finish.num_output_tokens,
            # Of each time that it got a slot.
            groups=[e.group for e in trail if e.kind is Kind.ADMITTED],
            blocks=[e.y for e in trail if e.kind is Kind.ADMITTED],
            chunks=[[e.step, e.x] for e in trail if e.kind is Kind.CHUNK],
            preemptions=finish.num_preemptions,
            lost_workers=sum(e.kind is Kind.LOST for e in trail),
            queue_seconds=round(finish.queue_seconds, 6),
            prefill_seconds=round(finish.prefill_seconds, 6),
            e2e_seconds=round(finish.e2e_seconds, 6),
        )

    def stepped(self, group: Group, plan: Plan, result: worker_pb2.StepResult) -> None:
        """A step was folded; what is counted is as it left it."""
        event(
            log,
            "step",
            group=group.index,
            step=plan.step,
            decoded=plan.decoded.size,
            prefilled=sum(plan.prefill_lengths),
            chunks=len(plan.prefill_lengths),
            running=group.batch.num_running,
            waiting=group.queue.num_waiting,
            waits_for=plan.blocked.name.lower(),
            free_blocks=group.pool.num_free,
            cached_blocks=group.pool.num_cached,
            wait_us=result.wait_us,
            prepare_us=result.prepare_us,
            forward_us=result.forward_us,
            sample_us=result.sample_us,
        )
