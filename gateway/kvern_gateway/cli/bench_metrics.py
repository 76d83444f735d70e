"""From timed requests to the figures of a serving benchmark, under the names that vLLM's `bench serve` uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvern_gateway.cli.load_client import StreamRecord

METRIC_TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")

Floats = npt.NDArray[np.float64]


def event_times(record: StreamRecord) -> Floats:
    """When each token event arrived, seconds, shape [events]."""
    return np.repeat(np.asarray(record.times, dtype=np.float64), np.asarray(record.counts, dtype=np.int64))


def num_output_tokens(record: StreamRecord) -> int:
    """As the server counted them, or one per event where it did not say."""
    return record.num_output_tokens or sum(record.counts)


def summarize(
    records: Sequence[StreamRecord],
    duration_s: float,
    *,
    metrics: Sequence[str] = ("ttft", "tpot", "itl", "e2el"),
    percentiles: Sequence[float] = (99,),
    goodput_ms: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """All figures of a run as a flat dict. Times are milliseconds, rates per second; failed requests count only as such."""
    done = [record for record in records if record.success and record.times]
    arrivals = [event_times(record) for record in done]
    lengths = np.array([num_output_tokens(record) for record in done], dtype=np.int64)
    starts = np.array([record.start for record in done])
    ttft = np.array([times[0] for times in arrivals]) - starts
    e2el = np.array([record.end for record in done]) - starts
    # A request of one token has no time per further token; for goodput it counts as 0.
    tpot_all = np.where(lengths > 1, (e2el - ttft) / np.maximum(lengths - 1, 1), 0.0)
    samples = {
        "ttft": ttft,
        "tpot": tpot_all[lengths > 1],
        "itl": np.concatenate([np.diff(times) for times in arrivals]) if arrivals else np.empty(0),
        "e2el": e2el,
    }
    total_input = sum(record.prompt_len for record in done)
    total_output = int(lengths.sum())
    good = np.ones(len(done), dtype=bool)
    for name, limit_ms in (goodput_ms or {}).items():
        good &= {"ttft": ttft, "tpot": tpot_all, "e2el": e2el}[name] * 1e3 <= limit_ms
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(done) / duration_s,
        "request_goodput": int(good.sum()) / duration_s if goodput_ms else None,
        "output_throughput": total_output / duration_s,
        "total_token_throughput": (total_input + total_output) / duration_s,
        "max_output_tokens_per_s": _peak_rate(arrivals),
        "max_concurrent_requests": _peak_concurrency(starts, starts + e2el),
    }
    for name in metrics:
        values = samples[name] * 1e3 if samples[name].size else np.zeros(1)
        result[f"mean_{name}_ms"] = float(np.mean(values))
        result[f"median_{name}_ms"] = float(np.median(values))
        result[f"std_{name}_ms"] = float(np.std(values))
        for percentile in percentiles:
            result[f"p{percentile:g}_{name}_ms"] = float(np.percentile(values, percentile))
    return result


def detail(records: Sequence[StreamRecord]) -> dict[str, Any]:
    """Per request, in order of submission; seconds."""
    arrivals = [event_times(record) for record in records]
    return {
        "input_lens": [record.prompt_len for record in records],
        "output_lens": [num_output_tokens(record) for record in records],
        "ttfts": [
            float(times[0] - r.start) if len(times) else 0.0
            for times, r in zip(arrivals, records, strict=True)
        ],
        "itls": [np.diff(times).tolist() for times in arrivals],
        "start_times": [record.start for record in records],
        "errors": [record.error for record in records],
    }


def render_table(result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The result for people, 50 columns wide."""
    rows = [f"{' Serving Benchmark Result ':=^50}"]

    def row(label: str, value: float | int | None) -> None:
        if value is not None:
            rows.append(
                f"{label:<40} {value:<10}" if isinstance(value, int) else f"{label:<40} {value:<10.2f}"
            )

    row("Successful requests:", result["completed"])
    row("Failed requests:", result["failed"])
    row("Maximum request concurrency:", result.get("max_concurrency"))
    if isinstance(result.get("request_rate"), float):
        row("Request rate configured (RPS):", result["request_rate"])
    row("Benchmark duration (s):", result["duration"])
    row("Total input tokens:", result["total_input_tokens"])
    row("Total generated tokens:", result["total_output_tokens"])
    row("Request throughput (req/s):", result["request_throughput"])
    row("Request goodput (req/s):", result["request_goodput"])
    row("Output token throughput (tok/s):", result["output_throughput"])
    row("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"])
    row("Peak concurrent requests:", result["max_concurrent_requests"])
    row("Total token throughput (tok/s):", result["total_token_throughput"])
    for name in metrics:
        short, title = METRIC_TITLES[name]
        rows.append(f"{title:-^50}")
        row(f"Mean {short} (ms):", result[f"mean_{name}_ms"])
        row(f"Median {short} (ms):", result[f"median_{name}_ms"])
        for percentile in percentiles:
            row(f"P{percentile:g} {short} (ms):", result[f"p{percentile:g}_{name}_ms"])
    rows.append("=" * 50)
    return "\n".join(rows)


def _peak_rate(arrivals: Sequence[Floats]) -> float:
    """Most token events in one second, in whole seconds from the first."""
    if not arrivals:
        return 0.0
    times = np.concatenate(arrivals)
    return float(np.bincount((times - times.min()).astype(np.int64)).max())


def _peak_concurrency(starts: Floats, ends: Floats) -> int:
    if not len(starts):
        return 0
    moments = np.concatenate([starts, ends])
    changes = np.concatenate([np.ones(len(starts), dtype=np.int64), -np.ones(len(ends), dtype=np.int64)])
    # At the same moment a departure comes first.
    order = np.lexsort((changes, moments))
    return int(np.cumsum(changes[order]).max())
