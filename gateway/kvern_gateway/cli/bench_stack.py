"""The services on a simulated worker, in a temporary directory, for as long as a measurement takes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvern_gateway.cli import stack
from kvern_gateway.cli.load_client import Pool, Target
from kvern_gateway.cli.supervisor import Supervisor

START_TIMEOUT_S = 60.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Bench:
    """Running services. ``scheduler`` is a gRPC address."""

    options: stack.StackOptions
    supervisor: Supervisor
    names: tuple[str, ...]

    @property
    def scheduler(self) -> str:
        return f"unix:{self.options.socket('scheduler')}"

    def cpu_seconds(self) -> dict[str, float]:
        """User and system time of each process so far."""
        pids = {name: self.supervisor.pid(name) for name in self.names}
        return {name: cpu_seconds(pid) for name, pid in pids.items() if pid}

    def cpu_waited_seconds(self) -> dict[str, float]:
        """What each process could have run so far and was not, since others did."""
        pids = {name: self.supervisor.pid(name) for name in self.names}
        return {name: cpu_waited_seconds(pid) for name, pid in pids.items() if pid}


@contextlib.asynccontextmanager
async def running(
    *names: str,
    store: str,
    appendfsync: str,
    flags: Mapping[str, object],
    http_port: int = 0,
    grpc_port: int = 0,
) -> AsyncIterator[Bench]:
    """Starts the named services ("worker", "scheduler", "gateway") and, for the redis store, a private server.

    A child's death ends the block with ChildFailed when it cannot be made good by a restart.
    """
    with tempfile.TemporaryDirectory(prefix="kvern-bench-", dir="/tmp") as directory:
        options = stack.StackOptions(
            model=stack.find_default_model(),
            served_model_name=stack.DEFAULT_MODEL_NAME,
            data_dir=Path(directory),
            run_dir=Path(directory) / "run",
            http_port=http_port,
            grpc_port=grpc_port,
            store=store,
            appendfsync=appendfsync,
            flags={"device": "sim", **flags},
        )
        wanted = {*names, "store"}
        specs = [spec for spec in stack.stack_specs(options) if spec.name in wanted]
        supervisor = Supervisor(specs, say=lambda line: print(line, file=sys.stderr))
        try:
            supervisor.start()
            block = asyncio.current_task()
            assert block is not None
            supervisor.failed.add_done_callback(lambda _: block.cancel())
            yield Bench(options, supervisor, tuple(spec.name for spec in specs))
        except asyncio.CancelledError:
            if supervisor.failed.done():
                raise supervisor.failed.result() from None
            raise
        finally:
            await supervisor.stop()


async def until_healthy(target: Target) -> None:
    """Raises TimeoutError when /health does not say 200 in time."""
    pool = Pool(target)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await pool.is_healthy():
                await asyncio.sleep(0.05)
    finally:
        pool.close()


def cpu_waited_seconds(pid: int) -> float:
    """The longest that a thread of the process has waited for a processor in its life."""
    waited = [0]
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            waited.append(int(path.read_text().split()[1]))
    return max(waited) / 1e9


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, its finished children not included; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
