"""Writes dashboards/*.json for Grafana from the panels below: ``python deploy/observability/dashboards.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "dashboards"
DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
MODEL = 'model_name=~"$model_name"'
WIDTH, HEIGHT, COLUMNS = 8, 7, 3

Panel = tuple[str, str, list[tuple[str, str]]]
"""Title, unit, (query, legend)."""


def quantiles(name: str) -> list[tuple[str, str]]:
    buckets = f"sum by (le) (rate({name}_bucket{{{MODEL}}}[$__rate_interval]))"
    queries = [(f"histogram_quantile({q}, {buckets})", f"p{q * 100:.0f}") for q in (0.5, 0.9, 0.99)]
    mean = f"sum(rate({name}_sum{{{MODEL}}}[$__rate_interval])) / sum(rate({name}_count{{{MODEL}}}[$__rate_interval]))"
    return [*queries, (mean, "mean")]


def rate(name: str, by: str = "", more: str = "") -> str:
    labels = ", ".join(filter(None, (MODEL, more)))
    return f"sum{f' by ({by}) ' if by else ''}(rate({name}{{{labels}}}[$__rate_interval]))"


def gauge(name: str, by: str = "engine") -> str:
    return f"sum by ({by}) ({name}{{{MODEL}}})"


SERVING: list[Panel] = [
    ("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds")),
    ("Inter-token latency", "s", quantiles("vllm:inter_token_latency_seconds")),
    ("Request latency", "s", quantiles("vllm:e2e_request_latency_seconds")),
    (
        "Tokens",
        "short",
        [
            (rate("vllm:prompt_tokens_total"), "prompt/s"),
            (rate("vllm:generation_tokens_total"), "generated/s"),
        ],
    ),
    (
        "Requests ended",
        "reqps",
        [(rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}")],
    ),
    (
        "Refused",
        "reqps",
        [("sum by (code) (rate(kvern_gateway_refused_total[$__rate_interval]))", "{{code}}")],
    ),
    (
        "Running and waiting",
        "short",
        [
            (gauge("kvern_num_requests_executing"), "running {{engine}}"),
            (gauge("kvern_num_requests_waiting"), "waiting {{engine}}"),
        ],
    ),
    ("Pending tokens", "short", [(gauge("kvern_pending_tokens"), "group {{engine}}")]),
    ("KV cache held", "percentunit", [(gauge("vllm:kv_cache_usage_perc"), "group {{engine}}")]),
    (
        "Prefix cache hits",
        "percentunit",
        [
            (
                f"{rate('vllm:prefix_cache_hits_total', 'engine')} / {rate('vllm:prefix_cache_queries_total', 'engine')}",
                "group {{engine}}",
            )
        ],
    ),
    (
        "Where a request's time goes",
        "s",
        [
            (
                f"{rate(f'vllm:request_{phase}_time_seconds_sum')} / {rate(f'vllm:request_{phase}_time_seconds_count')}",
                phase,
            )
            for phase in ("queue", "prefill", "decode")
        ],
    ),
    ("Preemptions", "ops", [(rate("vllm:num_preemptions_total", "engine"), "group {{engine}}")]),
]

CONTROL: list[Panel] = [
    (
        "A scheduler step, median",
        "µs",
        [
            (f"max by (instance) (kvern_scheduler_{part}_us_p50)", f"{part} {{{{instance}}}}")
            for part in ("plan", "fold", "commit", "step")
        ],
    ),
    ("Steps", "ops", [(rate("vllm:iteration_tokens_total_count", "engine"), "group {{engine}}")]),
    (
        "Tokens a step",
        "short",
        [
            (
                f"{rate('vllm:iteration_tokens_total_sum')} / {rate('vllm:iteration_tokens_total_count')}",
                "mean",
            )
        ],
    ),
    ("Worker groups", "short", [("sum by (instance) (kvern_groups)", "{{instance}}")]),
    ("Gateways", "short", [("sum by (instance) (kvern_scheduler_sessions)", "{{instance}}")]),
    ("Open requests", "short", [("sum by (instance) (kvern_gateway_open_requests)", "{{instance}}")]),
    (
        "Refused by the scheduler",
        "reqps",
        [(rate("vllm:admission_rejections_total", "reason"), "{{reason}}")],
    ),
    (
        "Waiting, by reason",
        "short",
        [(gauge("vllm:num_requests_waiting_by_reason", "reason"), "{{reason}}")],
    ),
    (
        "Prompt tokens, by source",
        "short",
        [(rate("vllm:prompt_tokens_by_source_total", "source"), "{{source}}/s")],
    ),
]


def dashboard(uid: str, title: str, panels: list[Panel]) -> dict[str, Any]:
    """The JSON model of a Grafana dashboard (schemaVersion 39)."""
    variable = {
        "name": "model_name",
        "type": "query",
        "datasource": DATASOURCE,
        "query": "label_values(vllm:num_requests_running, model_name)",
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }
    return {
        "uid": uid,
        "title": title,
        "tags": ["kvern"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": [variable]},
        "panels": [_panel(index, *panel) for index, panel in enumerate(panels)],
    }


def _panel(index: int, title: str, unit: str, queries: list[tuple[str, str]]) -> dict[str, Any]:
    row, column = divmod(index, COLUMNS)
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": title,
        "datasource": DATASOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + n), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend}
            for n, (expr, legend) in enumerate(queries)
        ],
    }


def files() -> dict[Path, str]:
    """Each file's content."""
    return {
        FOLDER / f"{uid}.json": json.dumps(dashboard(uid, title, panels), indent=1, ensure_ascii=False) + "\n"
        for uid, title, panels in (
            ("kvern-serving", "Kvern: serving", SERVING),
            ("kvern-control", "Kvern: scheduler and gateways", CONTROL),
        )
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
