"""`kvern bench routing`: four groups in virtual time, by Kvern's routing and by rules that know less."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from kvern_gateway.cli.report import fail


def routing(
    requests: Annotated[int, typer.Option(min=100, help="Of each trace")] = 2000,
    groups: Annotated[int, typer.Option(min=2, help="Data-parallel groups")] = 4,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Time to first token, prefix hits and waiting tokens of data-parallel groups, on two traces; some seconds to run."""
    try:
        results = measure(requests, groups)
    except ImportError as error:
        fail(error)
    if as_json:
        print(json.dumps(results))
        return
    for trace, by_route in results.items():
        print(f"{trace}\n{'':16} {'hits':>7} {'TTFT p50':>10} {'p99':>10}   waiting tokens, max/min")
        for name, row in by_route.items():
            print(
                f"{name:16} {row['hit_rate'] * 100:5.1f} % {row['p50_s'] * 1e3:7.0f} ms {row['p99_s'] * 1e3:7.0f} ms"
                f"   {row['imbalance']:.2f}"
                if name != "one big cache"
                else f"{name:16} {row['hit_rate'] * 100:5.1f} %"
            )


def measure(requests: int, groups: int) -> dict[str, dict[str, Any]]:
    """By trace and rule: hit_rate (0 to 1), p50_s, p99_s, imbalance."""
    from kvern_gateway.cli import routing_trace as virtual

    results: dict[str, dict[str, Any]] = {}
    for trace, make, load in virtual.TRACES:
        arrivals = virtual.at_load(make(requests), load, groups)
        rows: dict[str, Any] = {"one big cache": {"hit_rate": virtual.ideal_hit_rate(arrivals)}}
        for name, rule in virtual.ROUTES.items():
            outcome = virtual.serve(arrivals, rule(), groups)
            rows[name] = {
                "hit_rate": outcome.hit_rate,
                "p50_s": outcome.percentile(50),
                "p99_s": outcome.percentile(99),
                "imbalance": outcome.imbalance,
            }
        results[trace] = rows
    return results
