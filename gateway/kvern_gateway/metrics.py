"""Prometheus metrics that a gateway knows, under vLLM's names and labels.

Per-token observations are a bisect and two additions; prometheus_client's own histograms cost about 2 µs each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvern.errors import KvernError
from kvern.rpc.metrics import COUNTS, INTER_TOKEN, LABELS, REQUEST_SECONDS, TIME_TO_FIRST_TOKEN, TOKENS
from kvern.v1 import error_pb2


class Histogram:
    """Counts by upper bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def totals(self) -> dict[str, float]:
        return {"count": sum(self.counts), "seconds": self.total}

    def buckets(self) -> list[tuple[str, float]]:
        cumulative, rows = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            cumulative += count
            rows.append(("+Inf" if bound == float("inf") else repr(bound), float(cumulative)))
        return rows


@dataclass(eq=False)
class Metrics(Collector):
    """``model`` labels everything. ``running`` is the number of requests that are open at this gateway."""

    model: str = ""
    running: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0)
    )
    refused: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.time_to_first_token = Histogram(TIME_TO_FIRST_TOKEN)
        self.inter_token = Histogram(INTER_TOKEN)
        self.time_per_output_token = Histogram(INTER_TOKEN)
        self.latency = Histogram(REQUEST_SECONDS)
        self.request_prompt_tokens = Histogram(TOKENS)
        self.request_generation_tokens = Histogram(TOKENS)
        self.request_n = Histogram(COUNTS)
        self.request_max_tokens = Histogram(TOKENS)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def count_refusal(self, error: KvernError) -> None:
        code = error_pb2.ErrorCode.Name(error.code).removeprefix("ERROR_CODE_").lower()
        self.refused[code] = self.refused.get(code, 0) + 1

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts the error that ends the block."""
        try:
            yield
        except KvernError as error:
            self.count_refusal(error)
            raise

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        values = [self.model, "0"]
        for name, help_text, histogram in (
            ("time_to_first_token_seconds", "Time to first token", self.time_to_first_token),
            ("inter_token_latency_seconds", "Time between two tokens of a choice", self.inter_token),
            (
                "request_time_per_output_token_seconds",
                "Mean time per token after the first",
                self.time_per_output_token,
            ),
            ("e2e_request_latency_seconds", "From request to last token", self.latency),
            ("request_prompt_tokens", "Prompt tokens of a request", self.request_prompt_tokens),
            ("request_generation_tokens", "Output tokens of a choice", self.request_generation_tokens),
            ("request_params_n", "Choices asked for", self.request_n),
            ("request_params_max_tokens", "max_tokens asked for", self.request_max_tokens),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", help_text, labels=LABELS)
            family.add_metric(values, histogram.buckets(), histogram.total)
            yield family
        for name, help_text, count in (
            ("prompt_tokens", "Prompt tokens of admitted requests", self.prompt_tokens),
            ("generation_tokens", "Tokens sent to clients", self.generation_tokens),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", help_text, labels=LABELS)
            counter.add_metric(values, count)
            yield counter
        success = CounterMetricFamily(
            "vllm:request_success", "Ended choices", labels=(*LABELS, "finished_reason")
        )
        for reason, count in self.finished.items():
            success.add_metric([*values, reason], count)
        yield success
        refused = CounterMetricFamily("kvern_gateway_refused", "Refused requests", labels=("code",))
        for code, count in self.refused.items():
            refused.add_metric([code], count)
        yield refused
        yield GaugeMetricFamily("kvern_gateway_open_requests", "Requests open at this gateway", self.running)


class RequestClock:
    """Times one request for :class:`Metrics`. All times from one clock, in seconds."""

    __slots__ = ("_last", "_metrics", "first", "start")

    def __init__(self, metrics: Metrics, start: float, num_choices: int) -> None:
        self._metrics = metrics
        self.start = start
        self.first: float | None = None
        self._last: list[float | None] = [None] * num_choices

    def tokens(self, index: int, count: int, now: float) -> None:
        """``count`` more tokens of choice ``index`` came together."""
        last = self._last[index]
        metrics = self._metrics
        metrics.generation_tokens += count
        if last is None:
            if self.first is None:
                self.first = now
                metrics.time_to_first_token.observe(now - self.start)
            count -= 1
            last = now
        if count:
            metrics.inter_token.observe((now - last) / count, count)
        self._last[index] = now

    def choice_finished(self, reason: str, num_tokens: int, now: float) -> None:
        metrics = self._metrics
        metrics.finished[reason] = metrics.finished.get(reason, 0) + 1
        metrics.latency.observe(now - self.start)
        metrics.request_generation_tokens.observe(num_tokens)
        if self.first is not None and num_tokens > 1:
            metrics.time_per_output_token.observe((now - self.first) / (num_tokens - 1))
