"""`kvern bench start`: from the command to the first token, in an empty data directory."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from kvern_gateway.cli.load_client import Pool, StreamRecord, Target
from kvern_gateway.cli.stack import StackOptions, resolve_model
from kvern_gateway.cli.supervisor import ChildFailed
from kvern_gateway.cli.up import StartTimes, up

PHASES = {
    "worker_listening": "worker process up",
    "weights_loaded": "weights loaded",
    "serving": "gateway answers /health",
    "first_token": "first token",
}


async def run(model: str | None, store: str) -> dict[str, Any]:
    """Seconds since this process began, by phase. Raises ChildFailed, UsageError, ConnectionError."""
    times = StartTimes()
    path, name = resolve_model(model)

    async def first_token(options: StackOptions) -> None:
        pool = Pool(Target(options.host, options.http_port))
        body = {
            "model": name,
            "prompt": "Once upon a time",
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
        }
        record = StreamRecord(prompt_len=0)
        await pool.run(pool.target.post("/v1/completions", body), record)
        pool.close()
        if record.error:
            raise ConnectionError(record.error)
        times.mark("first_token")

    with tempfile.TemporaryDirectory(prefix="kvern-bench-", dir="/tmp") as directory:
        options = StackOptions(
            model=path,
            served_model_name=name,
            data_dir=Path(directory),
            run_dir=Path(directory) / "run",
            http_port=0,
            grpc_port=0,
            store=store,
        )
        if await up(options, Console(file=sys.stderr, highlight=False), times, first_token):
            raise ChildFailed("the services did not start")
    if not times.first_token:
        raise RuntimeError("interrupted")
    return {"model": name, "store": store, **{f"{phase}_s": getattr(times, phase) for phase in PHASES}}


def render(result: dict[str, Any]) -> str:
    return "\n".join(f"{result[f'{phase}_s']:6.2f} s  {title}" for phase, title in PHASES.items())
