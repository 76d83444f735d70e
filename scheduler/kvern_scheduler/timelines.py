"""A request's timeline from what the journal kept: its events become phases, and the steps within each are summed up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from kvern.errors import KvernError
from kvern.v1 import error_pb2, operations_pb2
from kvern_scheduler.core.journal import MAX_EVENTS, MAX_STEPS, Event, Journal, Kind, Record

Rows = npt.NDArray[np.void]

# Blocked of the core → the wire.
WAIT_REASONS = (
    operations_pb2.WAIT_REASON_STEP,
    operations_pb2.WAIT_REASON_BATCH_FULL,
    operations_pb2.WAIT_REASON_KV_FULL,
    operations_pb2.WAIT_REASON_TOKEN_BUDGET,
    operations_pb2.WAIT_REASON_LONG_PROMPTS,
    operations_pb2.WAIT_REASON_ADAPTER,
    operations_pb2.WAIT_REASON_LOADING,
)
MAX_HEADS = 500
DEFAULT_HEADS = 50


def timeline(journal: Journal, request_id: str, tenant: str | None, now: float) -> operations_pb2.Timeline:
    """Raises KvernError REQUEST_NOT_FOUND."""
    record = journal.find(request_id, tenant)
    if record is None:
        raise KvernError(
            error_pb2.ERROR_CODE_REQUEST_NOT_FOUND,
            "no timeline of this request: it never came here, or newer ones have taken its place (the last "
            f"{journal.max_requests} are kept: kvern-scheduler --max-timelines), or the scheduler changed after its end",
            field="request_id",
            value=request_id,
        )
    steps = journal.steps()
    return operations_pb2.Timeline(
        request_id=record.request_id,
        tenant=record.tenant,
        arrived=record.arrived,
        prompt_tokens=record.num_prompt,
        max_tokens=record.max_tokens,
        priority=record.priority,
        choices=[_choice(trail, steps, now) for trail in record.trails],
        now=now,
        steps_since=float(steps["planned"][0]) if journal.num_steps > MAX_STEPS else 0.0,
    )


def heads(journal: Journal, tenant: str | None, limit: int) -> Iterator[operations_pb2.TimelineHead]:
    """The newest first."""
    left = min(limit or DEFAULT_HEADS, MAX_HEADS)
    for record in reversed(journal.records.values()):
        if left and (tenant is None or record.tenant == tenant):
            left -= 1
            yield _head(record)


def _head(record: Record) -> operations_pb2.TimelineHead:
    ends = [trail[-1] for trail in record.trails if trail and trail[-1].kind is Kind.FINISHED]
    first = min((e.at for trail in record.trails for e in trail if e.kind is Kind.PREFILLED), default=0.0)
    phases = {
        Kind.HELD: 1,
        Kind.HOMELESS: 2,
        Kind.QUEUED: 3,
        Kind.PREEMPTED: 3,
        Kind.ADMITTED: 4,
        Kind.CHUNK: 4,
    }
    trail = next((t for t in record.trails if not t or t[-1].kind is not Kind.FINISHED), record.trails[0])
    over = len(ends) == len(record.trails)
    return operations_pb2.TimelineHead(
        request_id=record.request_id,
        tenant=record.tenant,
        arrived=record.arrived,
        ended=max(e.at for e in ends) if over else 0.0,
        prompt_tokens=record.num_prompt,
        output_tokens=sum(e.y for e in ends),
        first_token_seconds=first - record.arrived if first else 0.0,
        phase=0 if over or not trail else phases.get(trail[-1].kind, 5),  # type: ignore[arg-type]
    )


def _choice(trail: list[Event], steps: Rows, now: float) -> operations_pb2.ChoiceTimeline:
    choice = operations_pb2.ChoiceTimeline(truncated=len(trail) >= MAX_EVENTS)
    phase: operations_pb2.Phase | None = None
    cause: operations_pb2.PhaseCause.ValueType = operations_pb2.PHASE_CAUSE_UNSPECIFIED
    # The step that sampled its last token before it began to decode.
    prefilled = 0

    def end(event: Event) -> None:
        nonlocal phase
        if phase is not None:
            phase.end = event.at
            _sum_up(phase, steps, prefilled, event.step, event.at)
        phase = None

    def begin(event: Event, kind: operations_pb2.PhaseKind.ValueType) -> operations_pb2.Phase:
        nonlocal phase, cause
        end(event)
        phase = choice.phases.add(kind=kind, start=event.at, group_id=str(event.group), cause=cause)
        cause = operations_pb2.PHASE_CAUSE_UNSPECIFIED
        return phase

    for event in trail:
        match event.kind:
            case Kind.HELD:
                begin(event, operations_pb2.PHASE_KIND_HELD)
            case Kind.HOMELESS:
                begin(event, operations_pb2.PHASE_KIND_HOMELESS).group_id = ""
            case Kind.QUEUED:
                queue = begin(event, operations_pb2.PHASE_KIND_QUEUE)
                queue.tokens_ahead = event.y
                if event.x >= 0:
                    queue.routed_cached_tokens = event.x
            case Kind.PREEMPTED:
                choice.preemptions += 1
                cause = operations_pb2.PHASE_CAUSE_PREEMPTED
                begin(event, operations_pb2.PHASE_KIND_QUEUE)
            case Kind.ADMITTED:
                admitted = begin(event, operations_pb2.PHASE_KIND_PREFILL)
                admitted.cached_tokens, admitted.blocks = event.x, event.y
            case Kind.CHUNK:
                if phase is not None:
                    phase.chunks.add(step=event.step, tokens=event.x)
            case Kind.PREFILLED:
                prefilled = event.step
                begin(event, operations_pb2.PHASE_KIND_DECODE)
            case Kind.LOST:
                end(event)
                cause = operations_pb2.PHASE_CAUSE_WORKER_LOST
            case Kind.RESTORED:
                cause = operations_pb2.PHASE_CAUSE_SCHEDULER_CHANGED
            case Kind.FINISHED:
                end(event)
                choice.finished, choice.reason, choice.output_tokens = True, event.x, event.y  # type: ignore[assignment]
    if phase is not None:
        _sum_up(phase, steps, prefilled, None, now)
    return choice


def _sum_up(phase: operations_pb2.Phase, steps: Rows, prefilled: int, last: int | None, until: float) -> None:
    """What the steps say of a phase that ended at ``until``; the group had folded step ``last`` then (None: all)."""
    if phase.kind in (operations_pb2.PHASE_KIND_HELD, operations_pb2.PHASE_KIND_HOMELESS):
        return
    own = steps[steps["group"] == int(phase.group_id)]
    if phase.kind == operations_pb2.PHASE_KIND_QUEUE:
        phase.waits.extend(_waits(own, phase.start, until))
    elif phase.kind == operations_pb2.PHASE_KIND_PREFILL:
        _time_chunks(phase.chunks, own)
        numbers = [chunk.step for chunk in phase.chunks]
        _summarize(phase.steps, own, np.isin(own["step"], numbers))
    else:
        mask = own["step"] > prefilled
        if last is not None:
            mask &= own["step"] <= last
        _summarize(phase.steps, own, mask)


def _waits(own: Rows, start: float, until: float) -> Iterator[operations_pb2.Wait]:
    """Each plan says why it took in no more; that holds until the next one."""
    planned = own["planned"]
    # The plan before the wait began says nothing of it: until the next one, it waits for a step.
    during = (planned >= start) & (planned < until)
    own, planned = own[during], planned[during]
    seconds = np.zeros(len(WAIT_REASONS))
    if len(own):
        seconds[0] = planned[0] - start
        np.add.at(seconds, own["blocked"], np.diff(planned, append=until))
    else:
        seconds[0] = until - start
    for reason, value in zip(WAIT_REASONS, seconds.tolist(), strict=True):
        if value > 0:
            yield operations_pb2.Wait(reason=reason, seconds=value)


def _time_chunks(chunks: Iterable[operations_pb2.Chunk], own: Rows) -> None:
    at = {int(step): index for index, step in enumerate(own["step"])}
    for chunk in chunks:
        if (index := at.get(chunk.step)) is not None:
            row = own[index]
            chunk.seconds = float(row["folded"] - row["planned"])
            chunk.other_tokens = int(row["decoded"] + row["prefilled"]) - chunk.tokens


def _summarize(summary: operations_pb2.StepSummary, own: Rows, mask: npt.NDArray[np.bool_]) -> None:
    rows = own[mask]
    if not len(rows):
        return
    # A step takes from the result before it, or from its own plan where nothing ran then.
    previous = np.concatenate([[0.0], own["folded"][:-1]])[mask]
    seconds = rows["folded"] - np.maximum(previous, rows["planned"])
    slowest = rows[int(np.argmax(seconds))]
    summary.steps = len(rows)
    summary.mean, summary.p50 = float(seconds.mean()), float(np.median(seconds))
    summary.longest = float(seconds.max())
    summary.forward_mean = float(rows["forward_us"].mean()) / 1e6
    summary.sample_mean = float(rows["sample_us"].mean()) / 1e6
    summary.slowest.CopyFrom(
        operations_pb2.StepTimeline(
            folded=float(slowest["folded"]),
            **{
                name: int(slowest[name])
                for name in (
                    "step",
                    "decoded",
                    "prefilled",
                    "wait_us",
                    "prepare_us",
                    "forward_us",
                    "sample_us",
                )
            },
        )
    )
    committed = rows[rows["committed"] > 0]
    if len(committed):
        waited = committed["committed"] - committed["folded"]
        summary.commit_p50, summary.commit_longest = float(np.median(waited)), float(waited.max())
