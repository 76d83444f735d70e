"""A whole Kvern to break: a store, two schedulers, two gateways and the workers, each a process of its own.

Whatever dies is started again at once, as an operator's supervisor would.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import grpc.aio

from kvern.rpc.channel import create_channel
from kvern.v1 import session_pb2, session_pb2_grpc
from kvern_gateway.cli import stack
from kvern_gateway.cli.load_client import Pool, Target
from kvern_gateway.cli.ports import claim_port
from kvern_gateway.cli.supervisor import ChildSpec, RestartPolicy, Supervisor

HOST = "127.0.0.1"
NUM_SCHEDULERS = 2
NUM_GATEWAYS = 2
START_TIMEOUT_S = 90.0
_POLL_S = 0.05
_PROBE_TIMEOUT_S = 0.5
_AT_ONCE = RestartPolicy(first_s=0.01, most_s=0.01)


@dataclass(frozen=True)
class GatewayAddress:
    """``name`` is the process's."""

    name: str
    http_port: int
    grpc_port: int

    @property
    def grpc(self) -> str:
        return f"{HOST}:{self.grpc_port}"


class ChaosStack:
    """The running processes. ``names`` lists them by kind."""

    def __init__(
        self,
        options: stack.StackOptions,
        supervisor: Supervisor,
        names: Mapping[str, list[str]],
        gateways: list[GatewayAddress],
        deaths: list[str],
    ) -> None:
        self.options = options
        self.supervisor = supervisor
        self.names = names
        self.gateways = gateways
        # The supervisor's lines about them.
        self.deaths = deaths
        self._channels = {name: create_channel(_address(options, name)) for name in names["scheduler"]}
        self._pools = [Pool(Target(HOST, gateway.http_port)) for gateway in gateways]

    async def leader(self) -> str | None:
        """Name of the scheduler that leads, if one answers and says so."""
        answers = await asyncio.gather(*(self._status(name) for name in self.names["scheduler"]))
        leading = [
            (answer.epoch, name)
            for name, answer in zip(self.names["scheduler"], answers, strict=True)
            if answer is not None and answer.leader
        ]
        return max(leading)[1] if leading else None

    async def steady(self) -> bool:
        """Whether everything is up: one leader with all workers, one standby, all gateways healthy."""
        if any(self.supervisor.pid(name) is None for names in self.names.values() for name in names):
            return False
        answers = await asyncio.gather(*(self._status(name) for name in self.names["scheduler"]))
        found = [answer for answer in answers if answer is not None]
        leaders = [answer for answer in found if answer.leader]
        if len(found) != NUM_SCHEDULERS or len(leaders) != 1:
            return False
        groups = leaders[0].groups
        if len(groups) != len(self.names["worker"]) or not all(group.ready for group in groups):
            return False
        return all(await asyncio.gather(*(self._is_healthy(pool) for pool in self._pools)))

    async def until_steady(self, timeout_s: float) -> bool:
        """False when it did not become so in time."""
        deadline = monotonic() + timeout_s
        while not await self.steady():
            if monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def until_idle(self, timeout_s: float) -> bool:
        """Whether the leader came to compute nothing any more. Nobody asks for anything meanwhile."""
        deadline = monotonic() + timeout_s
        while monotonic() < deadline:
            leader = await self.leader()
            answer = await self._status(leader) if leader else None
            if answer is not None and not any(g.num_running + g.num_waiting for g in answer.groups):
                return True
            await asyncio.sleep(_POLL_S)
        return False

    async def _status(self, name: str) -> session_pb2.GetStatusResponse | None:
        stub = session_pb2_grpc.SchedulerServiceStub(self._channels[name])
        with contextlib.suppress(grpc.aio.AioRpcError):
            return await stub.GetStatus(session_pb2.GetStatusRequest(), timeout=_PROBE_TIMEOUT_S)
        return None

    async def _is_healthy(self, pool: Pool) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                return await pool.is_healthy()
        return False

    async def close(self) -> None:
        for pool in self._pools:
            pool.close()
        await asyncio.gather(*(channel.close(None) for channel in self._channels.values()))


@dataclass
class Kept:
    """Set ``directory`` to keep the logs there after the run."""

    directory: Path | None = None


@contextlib.asynccontextmanager
async def running(
    model: Path | None, num_workers: int, flags: Mapping[str, object], kept: Kept
) -> AsyncIterator[ChaosStack]:
    """Starts everything and waits until it serves; ``model`` None takes the simulated worker.

    No process outlives the block, however it ends. Raises ChildFailed, UsageError, TimeoutError.
    """
    directory = Path(tempfile.mkdtemp(prefix="kvern-chaos-", dir="/tmp"))
    options = stack.StackOptions(
        model=model or stack.find_default_model(),
        served_model_name="chaos",
        data_dir=directory,
        run_dir=directory / "run",
        flags=flags if model else {"device": "sim", **flags},
    )
    try:
        stack.prepare_directories(options)
        specs, names, gateways = _specs(options, num_workers)
        deaths: list[str] = []
        supervisor = Supervisor(specs, say=deaths.append, policy=_AT_ONCE)
        chaos = ChaosStack(options, supervisor, names, gateways, deaths)
        try:
            supervisor.start()
            await _until_serving(chaos)
            supervisor.mark_ready()
            yield chaos
        finally:
            await chaos.close()
            # Nothing in it is needed any more, and what is frozen could not stop by itself.
            at_once = asyncio.Event()
            at_once.set()
            await supervisor.stop(at_once)
    finally:
        if kept.directory is not None:
            shutil.move(directory / "logs", kept.directory)
        shutil.rmtree(directory, ignore_errors=True)


async def _until_serving(chaos: ChaosStack) -> None:
    steady = asyncio.ensure_future(chaos.until_steady(START_TIMEOUT_S))
    failed = chaos.supervisor.failed
    waited: set[asyncio.Future[Any]] = {steady, failed}
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            raise failed.result()
        if not steady.result():
            raise TimeoutError(f"the services did not serve within {START_TIMEOUT_S:g} s")
    finally:
        steady.cancel()


def _specs(
    options: stack.StackOptions, num_workers: int
) -> tuple[list[ChildSpec], dict[str, list[str]], list[GatewayAddress]]:
    workers = [f"worker-{i}" for i in range(num_workers)]
    schedulers = [f"scheduler-{i}" for i in range(NUM_SCHEDULERS)]
    gateways = [
        GatewayAddress(f"gateway-{i}", claim_port(HOST, 0, "--http-port"), claim_port(HOST, 0, "--grpc-port"))
        for i in range(NUM_GATEWAYS)
    ]
    worker = stack.worker_spec(options)
    specs = [
        stack.store_spec(options),
        *(_renamed(options, worker, name, listen=_address(options, name)) for name in workers),
    ]
    for name in schedulers:
        spec = _renamed(options, stack.scheduler_spec(options), name, listen=_address(options, name))
        argv = _with(spec.argv, "--worker", _address(options, workers[0]))
        for other in workers[1:]:
            argv += ["--worker", _address(options, other)]
        specs.append(replace(spec, argv=argv))
    addresses = ",".join(_address(options, name) for name in schedulers)
    for gateway in gateways:
        own = replace(options, http_port=gateway.http_port, grpc_port=gateway.grpc_port)
        spec = _renamed(options, stack.gateway_spec(own), gateway.name)
        specs.append(replace(spec, argv=_with(spec.argv, "--scheduler", addresses)))
    # All end with this process, whatever becomes of it.
    specs = [replace(spec, death_signal=signal.SIGKILL) for spec in specs]
    names = {
        "store": ["store"],
        "worker": workers,
        "scheduler": schedulers,
        "gateway": [gateway.name for gateway in gateways],
    }
    return specs, names, gateways


def _address(options: stack.StackOptions, name: str) -> str:
    return f"unix:{options.socket(name)}"


def _renamed(options: stack.StackOptions, spec: ChildSpec, name: str, listen: str | None = None) -> ChildSpec:
    argv = list(spec.argv) if listen is None else _with(spec.argv, "--listen", listen)
    return replace(spec, name=name, argv=argv, log_path=options.log(name))


def _with(argv: Sequence[str], flag: str, value: str) -> list[str]:
    """A copy with the word after ``flag`` replaced."""
    words = list(argv)
    words[words.index(flag) + 1] = value
    return words
