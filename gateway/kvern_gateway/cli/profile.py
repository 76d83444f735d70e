"""`kvern profile`: where the time of a running stack goes, by phase and by kernel."""

from __future__ import annotations

import base64
import gzip
from pathlib import Path
from typing import Annotated, Any

import typer

from kvern_gateway.cli.api import LOCAL, Api, ApiKey, BaseUrl
from kvern_gateway.cli.report import fail


def profile(
    seconds: Annotated[float, typer.Option(min=0.1, max=60, help="For how long")] = 5.0,
    output: Annotated[
        Path, typer.Option(help="Where the trace goes, for chrome://tracing or Perfetto; .gz compresses it")
    ] = Path("kvern-trace.json"),
    base_url: BaseUrl = LOCAL,
    api_key: ApiKey = None,
) -> None:
    """Time steps and kernels for a few seconds; a table, and a Chrome trace."""
    try:
        found = Api(base_url, api_key).post("/v1/profile", {"seconds": seconds}, seconds + 30)
        trace = base64.b64decode(found.pop("trace"))
        output.write_bytes(trace if output.suffix == ".gz" else gzip.decompress(trace))
    except (ValueError, ConnectionError, OSError) as error:
        fail(error)
    print(render(found))
    print(f"\ntrace: {output}")


def render(found: dict[str, Any]) -> str:
    whole = found["seconds"]
    lines = [f"{found['steps']} steps in {whole:.1f} s", ""]
    lines.append(
        f"{'group':>5}  {'phase':<18} {'count':>8} {'total s':>9} {'share':>7} {'median':>10} {'longest':>10}"
    )
    lines += [_phase(phase, whole) for phase in found["phases"]]
    for group in found["kernels"]:
        lines += ["", f"{'group':>5}  {'kernel':<18} {'calls':>8} {'total s':>9} {'share':>7} {'mean':>10}"]
        if group["note"]:
            lines.append(f"{group['group_id']:>5}  {group['note']}")
        for kernel in sorted(group["kernels"], key=lambda kernel: -kernel["seconds"]):
            if kernel["calls"]:
                lines.append(
                    f"{group['group_id']:>5}  {kernel['name']:<18} {kernel['calls']:>8,} {kernel['seconds']:>9.3f} "
                    f"{kernel['seconds'] / whole:>7.1%} {_time(kernel['seconds'] / kernel['calls']):>10}"
                )
    return "\n".join(lines)


def _phase(phase: dict[str, Any], whole: float) -> str:
    return (
        f"{phase['group_id']:>5}  {phase['name']:<18} {phase['count']:>8,} {phase['seconds']:>9.3f} "
        f"{phase['seconds'] / whole:>7.1%} {_time(phase['p50']):>10} {_time(phase['longest']):>10}"
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.1f} µs"
