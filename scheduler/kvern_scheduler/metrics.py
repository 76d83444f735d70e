"""Prometheus metrics: vLLM's names, where existing dashboards know them, and Kvern's own."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvern.errors import KvernError
from kvern.rpc.metrics import COUNTS, LABELS, REQUEST_SECONDS, TOKENS
from kvern.v1 import error_pb2, worker_pb2
from kvern_scheduler.core.group import Group
from kvern_scheduler.core.plan import Plan
from kvern_scheduler.core.requests import Sequence
from kvern_scheduler.core.tiers import LOAD, STORE, WRITE

if TYPE_CHECKING:
    from kvern_scheduler.engine import Engine


WINDOW_S = 10.0
"""What gauges of recent steps look back."""


class Metrics:
    """One registry. Request metrics are observed at the end of a sequence; gauges are read when scraped."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engine: Engine | None = None
        self._labels: tuple[str, str] = ("", "0")
        # Counted at every step, so in plain numbers: a library's histogram costs a lock and a few calls.
        self._steps_by_tokens = [0] * (len(TOKENS) + 1)
        self._computed_tokens = 0
        # By group: microseconds of its steps in collectives, and outside of them.
        self._communicated: dict[int, list[int]] = {}

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(f"vllm:{name}", text, LABELS, buckets=tuple(buckets), registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", text, (*LABELS, *labels), registry=self.registry)

        self._rejections = counter("admission_rejections", "Refused requests", "reason")
        self._sources = counter("prompt_tokens_by_source", "Prompt tokens, computed or found", "source")
        self._queue = histogram("request_queue_time_seconds", "Waiting for a slot", REQUEST_SECONDS)
        self._prefill = histogram("request_prefill_time_seconds", "Slot to first token", REQUEST_SECONDS)
        self._decode = histogram("request_decode_time_seconds", "First to last token", REQUEST_SECONDS)
        self._inference = histogram("request_inference_time_seconds", "Slot to last token", REQUEST_SECONDS)
        self._longest = histogram(
            "request_max_num_generation_tokens", "Output tokens of a request's longest choice", TOKENS
        )
        self._computed = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens not found in the prefix cache", TOKENS
        )
        self._adapter_loads = Histogram(
            "kvern_adapter_load_seconds", "Filling a slot with an adapter", LABELS, registry=self.registry
        )
        self._adapter_failures = Counter(
            "kvern_adapter_load_failures",
            "Adapters that a worker could not load",
            LABELS,
            registry=self.registry,
        )
        self._preempted = histogram("request_num_preemptions", "Preemptions", (0, *COUNTS))
        self.named("")

    def watch(self, engine: Engine) -> None:
        """Gauges read ``engine`` from now on."""
        self._engine = engine
        self.registry.register(self)

    def named(self, model_name: str) -> None:
        """The label that all series bear."""
        self._labels = (model_name, "0")

    def stepped(self, plan: Plan) -> None:
        """A step's result was folded."""
        computed = plan.num_computed_tokens
        self._steps_by_tokens[bisect_left(TOKENS, computed)] += 1
        self._computed_tokens += computed

    def adapter_placed(self, seconds: float) -> None:
        """A slot was filled."""
        self._adapter_loads.labels(*self._labels).observe(seconds)

    def adapter_failed(self) -> None:
        self._adapter_failures.labels(*self._labels).inc()

    def communicated(self, group: int, result: worker_pb2.StepResult) -> None:
        """What a step of several ranks spent on talking to each other."""
        sums = self._communicated.setdefault(group, [0, 0])
        sums[0] += result.comm_us
        sums[1] += max(0, result.forward_us + result.sample_us - result.comm_us)

    def refused(self, error: KvernError) -> None:
        reason = error_pb2.ErrorCode.Name(error.code).removeprefix("ERROR_CODE_").lower()
        self._rejections.labels(*self._labels, reason).inc()

    def finished(self, sequence: Sequence) -> None:
        finish = sequence.finish
        assert finish is not None
        labels = self._labels
        self._queue.labels(*labels).observe(finish.queue_seconds)
        self._preempted.labels(*labels).observe(finish.num_preemptions)
        if sequence.first_token:
            inference = max(0.0, finish.e2e_seconds - finish.queue_seconds)
            computed = sequence.num_prompt - finish.num_cached_tokens
            self._prefill.labels(*labels).observe(finish.prefill_seconds)
            self._decode.labels(*labels).observe(max(0.0, inference - finish.prefill_seconds))
            self._inference.labels(*labels).observe(inference)
            self._computed.labels(*labels).observe(computed)
            self._sources.labels(*labels, "local_compute").inc(computed)
            self._sources.labels(*labels, "local_cache_hit").inc(finish.num_cached_tokens)
        if not sequence.request.num_unfinished:
            lengths = [s.finish.num_output_tokens for s in sequence.request.sequences if s.finish is not None]
            self._longest.labels(*labels).observe(max(lengths))

    def _collect_steps(self) -> Metric:
        steps = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens computed per step", labels=LABELS
        )
        bounds = [*map(str, TOKENS), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._steps_by_tokens), strict=True))
        steps.add_metric(self._labels, buckets, self._computed_tokens)
        return steps

    def collect(self) -> Iterable[Metric]:
        """What a scrape reads from the running state."""
        if self._engine is None:
            return
        yield self._collect_steps()
        cell, timings = self._engine.cell, self._engine.timings
        groups = list(cell.groups.values())

        def family(kind: type[Metric], name: str, text: str, values: Iterable[float]) -> Metric:
            metric = kind(name, text, labels=LABELS)  # type: ignore[call-arg]
            for group, value in zip(groups, values, strict=True):
                metric.add_metric((self._labels[0], str(group.index)), value)  # type: ignore[attr-defined]
            return metric

        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        running = [g.batch.num_running for g in groups]
        waiting = [g.queue.num_waiting for g in groups]
        used = [1 - g.pool.num_available / g.pool.num_blocks for g in groups]
        queries, hits = [g.num_prefix_queries for g in groups], [g.num_prefix_hits for g in groups]
        yield family(gauge, "vllm:num_requests_running", "In a slot", running)
        yield family(gauge, "kvern_num_requests_executing", "In a slot", running)
        yield family(gauge, "vllm:num_requests_waiting", "In the queue", waiting)
        yield family(gauge, "kvern_num_requests_waiting", "In the queue", waiting)
        yield self._waiting_by_reason(groups)
        yield family(gauge, "kvern_pending_tokens", "Not yet computed", [g.pending_tokens for g in groups])
        yield family(gauge, "vllm:kv_cache_usage_perc", "Held blocks, 0 to 1", used)
        yield family(gauge, "kvern_memory_usage", "KV memory that requests hold, 0 to 1", used)
        yield self._cache_config(groups)
        yield family(counter, "vllm:num_preemptions", "Preemptions", [g.num_preemptions for g in groups])
        yield family(counter, "vllm:prefix_cache_queries", "Tokens", queries)
        yield family(counter, "vllm:prefix_cache_hits", "Tokens", hits)
        yield from self._collect_tiers(groups)
        images, cached = [g.num_images for g in groups], [g.num_images_cached for g in groups]
        yield family(counter, "vllm:mm_cache_queries", "Images computed", images)
        yield family(counter, "vllm:mm_cache_hits", "Images that had been encoded before", cached)
        rates = [hit / query if query else 0.0 for hit, query in zip(hits, queries, strict=True)]
        yield family(gauge, "kvern_cache_hit_rate", "Prompt tokens found, 0 to 1, since the start", rates)
        if any(len(g.adapters) for g in groups):
            yield from self._adapters(groups)
        yield from self._collect_computing(groups)
        ratios = [comm / compute if compute else 0.0 for comm, compute in map(self._communication, groups)]
        yield family(
            gauge,
            "kvern_comm_compute_ratio",
            "Time in collectives of ranks, over time outside of them",
            ratios,
        )
        yield gauge("kvern_groups", "Worker groups that compute", value=len(groups))
        for name, ring in (
            ("plan", timings.plan),
            ("fold", timings.fold),
            ("commit", timings.commit),
            ("step", timings.step),
        ):
            yield GaugeMetricFamily(
                f"kvern_scheduler_{name}_us_p50", f"Median {name} time, microseconds", value=ring.median()
            )
        yield GaugeMetricFamily(
            "kvern_scheduler_sessions", "Gateways", value=len(self._engine.subscriptions.sessions)
        )

    def _adapters(self, groups: list[Group]) -> Iterable[Metric]:
        """vLLM's ``lora_requests_info`` names adapters in labels; its value is the time."""
        assert self._engine is not None
        registry = self._engine.cell.adapters.adapters
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters with requests that run and wait; the value is when",
            labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        )
        running, waiting = set(), set()
        for group in groups:
            running |= {group.adapters.number(slot - 1) for slot in group.batch.adapter_slot.tolist() if slot}
            waiting |= {s.request.submission.adapter for s in group.queue} - {0}
        names = [
            ",".join(sorted(registry[number].name for number in numbers if number in registry))
            for numbers in (waiting, running)
        ]
        info.add_metric((str(max(len(g.adapters) for g in groups)), *names), time.time())
        yield info
        served = sum(not adapter.draining for adapter in registry.values())
        yield GaugeMetricFamily("kvern_adapters", "Adapters that requests may name", value=served)
        yield GaugeMetricFamily(
            "kvern_adapters_draining",
            "Unloaded adapters that requests still have",
            value=len(registry) - served,
        )

    def _collect_tiers(self, groups: list[Group]) -> Iterable[Metric]:
        """Of the groups that have tiers below their device; nothing where none has."""
        tiers = [(str(group.index), group.tiers) for group in groups if group.tiers is not None]
        if not tiers:
            return
        model = self._labels[0]
        queries = CounterMetricFamily("vllm:external_prefix_cache_queries", "Tokens", labels=LABELS)
        hits = CounterMetricFamily("vllm:external_prefix_cache_hits", "Tokens", labels=LABELS)
        blocks = GaugeMetricFamily("kvern_kv_tier_blocks", "Blocks there", labels=(*LABELS, "tier"))
        capacity = GaugeMetricFamily("kvern_kv_tier_capacity_blocks", "Blocks", labels=(*LABELS, "tier"))
        for index, each in tiers:
            queries.add_metric((model, index), each.num_queries)
            hits.add_metric((model, index), each.num_hits)
            for tier, size in each.sizes().items():
                blocks.add_metric((model, index, tier), size)
                capacity.add_metric((model, index, tier), each.capacities[tier])
        yield from (queries, hits, blocks, capacity)
        for name, kind in (("store", STORE), ("load", LOAD), ("write", WRITE)):
            prefix = "kvern_kv_disk" if kind == WRITE else "vllm:kv_offload"
            moved = CounterMetricFamily(f"{prefix}_{name}_bytes", "KV moved", labels=LABELS)
            seconds = CounterMetricFamily(f"{prefix}_{name}_time", "Seconds of it", labels=LABELS)
            failed = CounterMetricFamily(f"kvern_kv_{name}_failures", "Blocks", labels=LABELS)
            for index, each in tiers:
                traffic = each.traffic[kind]
                moved.add_metric((model, index), traffic.num_bytes)
                seconds.add_metric((model, index), traffic.seconds)
                failed.add_metric((model, index), traffic.num_failed)
            yield from (moved, seconds, failed)

    def _collect_computing(self, groups: list[Group]) -> Iterable[Metric]:
        """What the workers said of the steps of the last seconds, one that took them all counting as such."""
        assert self._engine is not None
        busy = GaugeMetricFamily(
            "kvern_gpu_utilization",
            f"Share of the last {WINDOW_S:.0f} s that the worker computed, 0 to 1",
            labels=LABELS,
        )
        phases = GaugeMetricFamily(
            "kvern_step_phase_seconds", "Mean time of a step's phase, last seconds", labels=(*LABELS, "phase")
        )
        since = self._engine.clock() - WINDOW_S
        steps = self._engine.journal.newest(since)
        for group in groups:
            labels = (self._labels[0], str(group.index))
            own = steps[steps["group"] == group.index]
            seconds = {name: own[f"{name}_us"] / 1e6 for name in ("wait", "prepare", "forward", "sample")}
            computed = sum(float(seconds[name].sum()) for name in ("prepare", "forward", "sample"))
            busy.add_metric(labels, min(1.0, computed / WINDOW_S))
            for name, values in seconds.items():
                phases.add_metric((*labels, name), float(values.mean()) if len(own) else 0.0)
        yield busy
        yield phases

    def _communication(self, group: Group) -> tuple[int, int]:
        comm, compute = self._communicated.get(group.index, (0, 0))
        return comm, compute

    def _waiting_by_reason(self, groups: list[Group]) -> Metric:
        """Long prompts wait for others of their kind (``deferred``), all else for a slot or blocks."""
        metric = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "In the queue", labels=(*LABELS, "reason")
        )
        for group in groups:
            for reason, value in (
                ("capacity", group.queue.num_waiting - group.queue.num_long),
                ("deferred", group.queue.num_long),
            ):
                metric.add_metric((self._labels[0], str(group.index), reason), value)
        return metric

    def _cache_config(self, groups: list[Group]) -> Metric:
        metric = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV pool", labels=(*LABELS, "block_size", "num_gpu_blocks")
        )
        for group in groups:
            labels = (self._labels[0], str(group.index), str(group.block_size), str(group.pool.num_blocks))
            metric.add_metric(labels, 1)
        return metric
