"""A timeline in words: one line a phase, that says how long it took and why."""

from __future__ import annotations

from dataclasses import dataclass

from kvern.v1 import operations_pb2 as pb
from kvern.v1 import sampling_pb2

KINDS = {
    pb.PHASE_KIND_HELD: "held",
    pb.PHASE_KIND_HOMELESS: "no worker",
    pb.PHASE_KIND_QUEUE: "queue",
    pb.PHASE_KIND_PREFILL: "prefill",
    pb.PHASE_KIND_DECODE: "decode",
}
CAUSES = {
    pb.PHASE_CAUSE_PREEMPTED: "preempted, since KV blocks ran out: its tokens are kept and computed again. ",
    pb.PHASE_CAUSE_WORKER_LOST: "its worker was lost: its tokens are kept and computed again. ",
    pb.PHASE_CAUSE_SCHEDULER_CHANGED: "a new scheduler took over, and read it from the store. ",
}
REASONS = {
    pb.WAIT_REASON_BATCH_FULL: "the batch was full (--max-num-seqs)",
    pb.WAIT_REASON_KV_FULL: "too few KV blocks were free (--kv-cache-memory-bytes)",
    pb.WAIT_REASON_TOKEN_BUDGET: "other requests used up the steps' tokens (--max-num-batched-tokens)",
    pb.WAIT_REASON_LONG_PROMPTS: "other long prompts were being prefilled (--max-long-partial-prefills)",
    pb.WAIT_REASON_ADAPTER: "its LoRA adapter was not in a slot",
    pb.WAIT_REASON_LOADING: "its KV blocks were being loaded from memory or disk",
    pb.WAIT_REASON_STEP: "a step had to end first",
}


@dataclass(frozen=True)
class Line:
    """A phase. ``start`` counts from the request's arrival; seconds."""

    choice: int
    kind: str
    start: float
    seconds: float
    text: str


@dataclass(frozen=True)
class Story:
    title: str
    lines: list[Line]
    seconds: float
    """From arrival to the end, or to now."""


def tell(timeline: pb.Timeline) -> Story:
    lines = []
    for number, choice in enumerate(timeline.choices):
        for phase in choice.phases:
            end = phase.end or timeline.now
            text = CAUSES.get(phase.cause, "") + _TELLERS[phase.kind](phase, end - phase.start)
            start = phase.start - timeline.arrived
            lines.append(Line(number, KINDS[phase.kind], start, end - phase.start, text))
    seconds = max((line.start + line.seconds for line in lines), default=0.0)
    title = (
        f"{timeline.request_id}: {_count(timeline.prompt_tokens, 'prompt token')}, "
        f"at most {_count(timeline.max_tokens, 'new token')}"
    )
    if timeline.priority:
        title += f", priority {timeline.priority}"
    choices = list(timeline.choices)
    if choices and all(choice.finished for choice in choices):
        reasons = {
            sampling_pb2.FinishReason.Name(c.reason).removeprefix("FINISH_REASON_").lower() for c in choices
        }
        tokens = sum(choice.output_tokens for choice in choices)
        title += (
            f"; ended after {_time(seconds)} with {_count(tokens, 'token')} ({', '.join(sorted(reasons))})"
        )
    else:
        title += f"; runs, for {_time(seconds)} so far"
    if timeline.steps_since > timeline.arrived:
        title += "; the first of its steps are not known any more"
    if any(choice.truncated for choice in choices):
        title += "; some of its events were not kept"
    return Story(title, lines, seconds)


def _held(phase: pb.Phase, seconds: float) -> str:
    return f"waited {_time(seconds)} for choice 0 to compute the prompt that they share"


def _homeless(phase: pb.Phase, seconds: float) -> str:
    return f"waited {_time(seconds)} because no worker was there that could hold it"


def _queue(phase: pb.Phase, seconds: float) -> str:
    waits = sorted(phase.waits, key=lambda wait: -wait.seconds)
    # What is little beside the rest explains nothing.
    waits = [wait for wait in waits if wait.seconds >= 0.05 * seconds] or waits[:1]
    text = f"waited {_time(seconds)}"
    if len(waits) == 1:
        text += f" because {REASONS[waits[0].reason]}"
    elif waits:
        text += ": " + ", ".join(f"{_time(wait.seconds)} because {REASONS[wait.reason]}" for wait in waits)
    if phase.HasField("routed_cached_tokens"):
        text += (
            f"; group {phase.group_id} was chosen: {_count(phase.routed_cached_tokens, 'token')} cached there"
        )
        text += f", {_count(phase.tokens_ahead, 'token')} in its queue"
    elif phase.tokens_ahead:
        text += f"; {_count(phase.tokens_ahead, 'token')} were in the queue before it"
    return text


def _prefill(phase: pb.Phase, seconds: float) -> str:
    chunks, computed = len(phase.chunks), sum(chunk.tokens for chunk in phase.chunks)
    text = f"computed {_count(computed, 'token')} in {_count(chunks, 'chunk')}"
    if chunks > 1:
        text += f" (steps {phase.chunks[0].step} to {phase.chunks[-1].step})"
    elif chunks:
        text += f" (step {phase.chunks[0].step})"
    text += f"; {_count(phase.cached_tokens, 'token')} came from the prefix cache; {_count(phase.blocks, 'KV block')}"
    others = max((chunk.other_tokens for chunk in phase.chunks), default=0)
    if others > computed:
        text += f"; its steps computed up to {_count(others, 'token')} of other requests, too"
    return text + _committing(phase.steps)


def _decode(phase: pb.Phase, seconds: float) -> str:
    steps = phase.steps
    if not steps.steps:
        return "ended with its first token"
    text = f"{_count(steps.steps, 'step')} of {_time(steps.p50)} each (median; mean {_time(steps.mean)}"
    if steps.forward_mean:
        text += f", of which {_time(steps.forward_mean)} forward pass"
    text += ")"
    slowest = steps.slowest
    if steps.longest > 2 * steps.p50 and steps.steps > 2:
        text += f"; the slowest, step {slowest.step}, took {_time(steps.longest)}"
        if slowest.prefilled:
            text += f" and computed {_count(slowest.prefilled, 'prompt token')} of other requests"
        elif slowest.decoded > 1:
            text += f" for {_count(slowest.decoded, 'sequence')}"
    return text + _committing(steps)


def _committing(steps: pb.StepSummary) -> str:
    # Next to a step it is only worth a word where it takes as long.
    if steps.commit_longest <= max(0.005, steps.p50 / 2):
        return ""
    return f"; the store took {_time(steps.commit_p50)} to have its tokens, at most {_time(steps.commit_longest)}"


_TELLERS = {
    pb.PHASE_KIND_HELD: _held,
    pb.PHASE_KIND_HOMELESS: _homeless,
    pb.PHASE_KIND_QUEUE: _queue,
    pb.PHASE_KIND_PREFILL: _prefill,
    pb.PHASE_KIND_DECODE: _decode,
}


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.0095 else f"{seconds * 1e3:.1f} ms"
