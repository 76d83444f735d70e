"""`kvern bench sweep`: the same load on every combination of a server's flags, at several rates or concurrencies."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvern_gateway.cli import bench_serve
from kvern_gateway.cli.bench_serve import ServeOptions
from kvern_gateway.cli.stack import SERVICE_FLAGS, StackOptions, resolve_model
from kvern_gateway.cli.up import StartTimes, up

Row = dict[str, Any]

COLUMNS = {
    "output_throughput": "tok/s",
    "request_goodput": "goodput/s",
    "median_ttft_ms": "TTFT ms",
    "p99_ttft_ms": "p99",
    "median_tpot_ms": "TPOT ms",
    "p99_tpot_ms": "p99",
    "failed": "failed",
}


@dataclass(frozen=True)
class SweepOptions:
    """``grid`` has the values of each of `kvern up`'s flags, by Python name; ``fixed`` holds for all. Each server takes
    each of ``loads``."""

    model: str | None
    loads: Sequence[ServeOptions]
    grid: Mapping[str, Sequence[str]] = field(default_factory=dict)
    fixed: Mapping[str, str] = field(default_factory=dict)
    store: str = "redis"
    output: Path | None = None

    @property
    def servers(self) -> list[dict[str, str]]:
        return [
            dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())
        ]


def parse_grid(words: Sequence[str]) -> dict[str, list[str]]:
    """``["--max-num-seqs=8,64"]``, the dashes left out or not. Raises ValueError."""
    known = {name for names in SERVICE_FLAGS.values() for name in names}
    grid: dict[str, list[str]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if not equals or not values:
            raise ValueError(f"--set {word!r}: write it as FLAG=VALUE,VALUE")
        if name not in known:
            raise ValueError(f"--set {word!r}: `kvern up` passes no --{name.replace('_', '-')} to a service")
        grid[name] = values.split(",")
    return grid


async def run(options: SweepOptions) -> dict[str, Any]:
    """One row for each server and load. A server that does not start has one with ``error``. Raises UsageError,
    ConnectionError."""
    from rich.console import Console

    console = Console(file=sys.stderr, highlight=False)
    rows: list[Row] = []
    for settings in options.servers:
        found = await _measure(options, settings, console)
        rows += found
        if options.output:
            _save(options.output, rows)
        if len(found) < len(options.loads) and not any("error" in row for row in found):
            break  # interrupted
    if options.output:
        plot(rows, options.output / "pareto.png")
    return {"rows": rows, "output": str(options.output) if options.output else None}


async def _measure(options: SweepOptions, settings: Mapping[str, str], console: Any) -> list[Row]:
    path, name = resolve_model(options.model)
    rows: list[Row] = []

    async def load(serving: StackOptions) -> None:
        base_url = f"http://{serving.host}:{serving.http_port}"
        for one in options.loads:
            result = await bench_serve.run(replace(one, base_url=base_url))
            rows.append({**settings, **_load_of(one), **{key: result.get(key) for key in COLUMNS}})
            console.print(_line(rows[-1]), markup=False, soft_wrap=True)

    with tempfile.TemporaryDirectory(prefix="kvern-bench-", dir="/tmp") as directory:
        stack = StackOptions(
            model=path,
            served_model_name=name,
            data_dir=Path(directory),
            run_dir=Path(directory) / "run",
            http_port=0,
            grpc_port=0,
            store=options.store,
            flags={**options.fixed, **settings},
        )
        code = await up(stack, console, StartTimes(), load)
    return rows if code == 0 else [{**settings, "error": "the services did not start; their words are above"}]


def _load_of(load: ServeOptions) -> Row:
    rate = "inf" if load.request_rate == float("inf") else load.request_rate
    return {"request_rate": rate, "max_concurrency": load.max_concurrency}


def _line(row: Row) -> str:
    return " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in row.items()
        if value is not None
    )


def _save(directory: Path, rows: Sequence[Row]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_text(json.dumps(rows, indent=1))


def pareto(rows: Sequence[Row]) -> list[Row]:
    """The rows that no other beats in both total tokens per second and tokens per second of one stream."""
    points = [(row, *point) for row in rows if (point := _point(row)) is not None]
    return [
        row
        for row, alone, total in points
        if not any(a >= alone and t >= total and (a, t) != (alone, total) for _, a, t in points)
    ]


def _point(row: Row) -> tuple[float, float] | None:
    """Tokens per second that one stream sees, and that all do."""
    if not row.get("output_throughput") or not row.get("median_tpot_ms"):
        return None
    return 1000 / row["median_tpot_ms"], row["output_throughput"]


def plot(rows: Sequence[Row], path: Path) -> None:
    """A PNG: each server a line over its loads, the Pareto front ringed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    servers: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if (point := _point(row)) is not None:
            settings = {
                k: v for k, v in row.items() if k not in {*COLUMNS, "request_rate", "max_concurrency"}
            }
            servers.setdefault(_line(settings) or "defaults", []).append(point)
    for label, points in servers.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    if best := [point for row in pareto(rows) if (point := _point(row)) is not None]:
        alone, total = zip(*best, strict=True)
        axes.scatter(alone, total, s=140, facecolors="none", edgecolors="black", label="Pareto front")
    axes.set_xlabel("output tokens per second of one stream (1000 / median TPOT)")
    axes.set_ylabel("output tokens per second of all")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def render(result: dict[str, Any]) -> str:
    """A table; ``*`` marks the Pareto front."""
    rows: list[Row] = result["rows"]
    best = {id(row) for row in pareto(rows)}
    names = list(dict.fromkeys(name for row in rows for name in row if name not in {*COLUMNS, "error"}))
    shown = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    table = [[*names, *(COLUMNS[name] for name in shown), ""]]
    for row in rows:
        cells = [str(row.get(name, "")) if row.get(name) is not None else "-" for name in names]
        figures = ["-" if row.get(name) is None else f"{row[name]:.4g}" for name in shown]
        table.append([*cells, *figures, row.get("error") or ("*" if id(row) in best else "")])
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]) - 1)]
    lines = [
        "  ".join(
            [*(cell.rjust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]
        ).rstrip()
        for line in table
    ]
    if result["output"]:
        lines.append(f"{result['output']}/results.json, pareto.png (* above: the Pareto front)")
    return "\n".join(lines)
