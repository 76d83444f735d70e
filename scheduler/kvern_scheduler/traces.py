"""A sequence's life as spans, made at its end from the times that the core has kept."""

from __future__ import annotations

import time

from kvern.rpc.tracing import Tracing
from kvern.v1 import sampling_pb2
from kvern_scheduler.core.requests import Sequence


class Traces:
    """Spans of sequences whose request carries a traceparent."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def finished(self, sequence: Sequence) -> None:
        submission, finish = sequence.request.submission, sequence.finish
        assert finish is not None
        if not submission.traceparent:
            return
        end = time.time_ns()
        began = end - int(finish.e2e_seconds * 1e9)
        scheduled = began + int(finish.queue_seconds * 1e9)
        first = scheduled + int(finish.prefill_seconds * 1e9)
        reason = sampling_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()
        span = self._tracing.start(
            "sequence",
            submission.traceparent,
            {
                "gen_ai.request.id": submission.request_id,
                "gen_ai.usage.prompt_tokens": sequence.num_prompt,
                "gen_ai.usage.completion_tokens": finish.num_output_tokens,
                "gen_ai.response.finish_reasons": reason,
                "gen_ai.latency.time_in_queue": finish.queue_seconds,
                "gen_ai.latency.time_in_model_prefill": finish.prefill_seconds,
                "gen_ai.latency.e2e": finish.e2e_seconds,
                "kvern.choice": sequence.choice,
                "kvern.num_cached_tokens": finish.num_cached_tokens,
                "kvern.num_preemptions": finish.num_preemptions,
            },
            began,
        )
        phases = [("queue", began, scheduled), ("prefill", scheduled, first), ("decode", first, end)]
        for name, start, stop in phases:
            if stop > start:
                self._tracing.start(name, "", {}, start, span).end(stop)
        span.end(end)
