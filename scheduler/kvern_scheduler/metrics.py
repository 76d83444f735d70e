"""Prometheus metrics: vLLM's names, where existing dashboards know them, and Kvern's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvern.v1 import error_pb2, sampling_pb2
from kvern_scheduler.core.errors import RequestError
from kvern_scheduler.core.plan import Plan
from kvern_scheduler.core.requests import Sequence

if TYPE_CHECKING:
    from kvern_scheduler.engine import Engine

_REASONS = {
    sampling_pb2.FINISH_REASON_STOP: "stop",
    sampling_pb2.FINISH_REASON_LENGTH: "length",
    sampling_pb2.FINISH_REASON_ABORT: "abort",
    sampling_pb2.FINISH_REASON_ERROR: "error",
}
_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
_LABELS = ("model_name", "engine")


class Metrics:
    """One registry. Request metrics are observed at the end of a sequence; gauges are read when scraped."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engine: Engine | None = None
        self._labels: tuple[str, str] = ("", "0")

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(name, text, _LABELS, buckets=tuple(buckets), registry=self.registry)

        self._success = Counter(
            "vllm:request_success",
            "Finished sequences",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._rejections = Counter(
            "vllm:admission_rejections", "Refused requests", (*_LABELS, "reason"), registry=self.registry
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token", _SECONDS)
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token", _SECONDS)
        self._tpot = histogram("vllm:request_time_per_output_token_seconds", "Mean per token", _SECONDS)
        self._queue = histogram("vllm:request_queue_time_seconds", "Waiting for a slot", _SECONDS)
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds", "First schedule to first token", _SECONDS
        )
        self._decode = histogram("vllm:request_decode_time_seconds", "First to last token", _SECONDS)
        self._prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens", _TOKENS)
        self._output = histogram("vllm:request_generation_tokens", "Output tokens", _TOKENS)
        self._max_tokens = histogram("vllm:request_params_max_tokens", "max_tokens", _TOKENS)
        self._preempted = histogram("vllm:request_num_preemptions", "Preemptions", (0, 1, 2, 3, 5, 10))
        self._iteration = histogram("vllm:iteration_tokens_total", "Tokens computed per step", _TOKENS)
        self._generated = Counter("vllm:generation_tokens", "Output tokens", _LABELS, registry=self.registry)
        self._prompts = Counter("vllm:prompt_tokens", "Prompt tokens", _LABELS, registry=self.registry)
        self.named("")

    def watch(self, engine: Engine) -> None:
        """Gauges read ``engine`` from now on."""
        self._engine = engine
        self.registry.register(self)

    def named(self, model_name: str) -> None:
        """The label that all series bear."""
        self._labels = (model_name, "0")
        # Looked up once: labels() costs more than counting.
        self._observe_step = self._iteration.labels(*self._labels).observe
        self._count_tokens = self._generated.labels(*self._labels).inc

    def stepped(self, plan: Plan) -> None:
        """A step's result was folded."""
        self._observe_step(plan.num_computed_tokens)
        self._count_tokens(plan.slots.size - plan.num_unsampled)

    def refused(self, error: RequestError) -> None:
        reason = error_pb2.ErrorCode.Name(error.code).removeprefix("ERROR_CODE_").lower()
        self._rejections.labels(*self._labels, reason).inc()

    def finished(self, sequence: Sequence) -> None:
        finish = sequence.finish
        assert finish is not None
        labels = self._labels
        self._success.labels(*labels, _REASONS.get(finish.reason, "error")).inc()
        self._e2e.labels(*labels).observe(finish.e2e_seconds)
        self._queue.labels(*labels).observe(finish.queue_seconds)
        self._prompt.labels(*labels).observe(sequence.num_prompt)
        self._prompts.labels(*labels).inc(sequence.num_prompt)
        self._output.labels(*labels).observe(finish.num_output_tokens)
        self._max_tokens.labels(*labels).observe(sequence.request.submission.params.max_tokens)
        self._preempted.labels(*labels).observe(finish.num_preemptions)
        if sequence.first_token:
            first = finish.queue_seconds + finish.prefill_seconds
            decode = max(0.0, finish.e2e_seconds - first)
            self._ttft.labels(*labels).observe(first)
            self._prefill.labels(*labels).observe(finish.prefill_seconds)
            self._decode.labels(*labels).observe(decode)
            if finish.num_output_tokens > 1:
                self._tpot.labels(*labels).observe(decode / (finish.num_output_tokens - 1))

    def collect(self) -> Iterable[Metric]:
        """What a scrape reads from the running state."""
        if self._engine is None:
            return
        cell, timings = self._engine.cell, self._engine.timings
        groups = list(cell.groups.values())

        def family(kind: type[Metric], name: str, text: str, values: list[float]) -> Metric:
            metric = kind(name, text, labels=_LABELS)  # type: ignore[call-arg]
            for group, value in zip(groups, values, strict=True):
                metric.add_metric((self._labels[0], str(group.index)), value)  # type: ignore[attr-defined]
            return metric

        used = [1 - g.pool.num_available / g.pool.num_blocks for g in groups]
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        yield family(gauge, "vllm:num_requests_running", "In a slot", [g.batch.num_running for g in groups])
        yield family(
            gauge, "vllm:num_requests_waiting", "In the queue", [g.queue.num_waiting for g in groups]
        )
        yield family(gauge, "vllm:kv_cache_usage_perc", "Held blocks, 0 to 1", used)
        yield family(counter, "vllm:num_preemptions", "Preemptions", [g.num_preemptions for g in groups])
        yield family(counter, "vllm:prefix_cache_queries", "Tokens", [g.num_prefix_queries for g in groups])
        yield family(counter, "vllm:prefix_cache_hits", "Tokens", [g.num_prefix_hits for g in groups])
        for name, ring in (
            ("plan", timings.plan),
            ("fold", timings.fold),
            ("commit", timings.commit),
            ("step", timings.step),
        ):
            yield GaugeMetricFamily(
                f"kvern_scheduler_{name}_us_p50", f"Median {name} time, microseconds", value=ring.median()
            )
        yield GaugeMetricFamily("kvern_scheduler_sessions", "Gateways", value=len(self._engine.sessions))
