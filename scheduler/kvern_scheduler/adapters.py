"""LoRA adapters of a cell: workers read them, the store has them, gateways are told; and slots are filled beside steps."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc.aio

from kvern.errors import KvernError, invalid
from kvern.rpc.errors import error_from_rpc
from kvern.v1 import adapter_pb2, error_pb2, worker_pb2
from kvern_scheduler.core.cell import no_slots
from kvern_scheduler.core.group import Group
from kvern_scheduler.core.registry import check_name
from kvern_scheduler.engine import Engine

PLACE_TIMEOUT_S = 120.0
RETRY_S = 0.1

log = logging.getLogger(__name__)


class AdapterHost:
    """One worker, as far as adapters go."""

    def __init__(self, stub: Any, epoch: int) -> None:
        self._stub = stub
        self._epoch = epoch

    async def place(
        self, path: str, digest: bytes = b"", slot: int | None = None
    ) -> worker_pb2.PlaceAdapterResponse:
        """Has the worker read the adapter, which must have that digest if one is given, and fill the slot if one is
        given. Raises KvernError."""
        request = worker_pb2.PlaceAdapterRequest(
            epoch=self._epoch, path=path, digest=digest, slot=0 if slot is None else slot + 1
        )
        try:
            response = await self._stub.PlaceAdapter(request, timeout=PLACE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        return response  # type: ignore[no-any-return]


class SlotFiller:
    """Fills a group's slots while its steps go on. It belongs to one connection, and ends with it."""

    def __init__(self, engine: Engine, group: Group, host: AdapterHost) -> None:
        self._engine = engine
        self._group = group
        self._host = host
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begins with what the planner has asked for."""
        for slot, number in self._group.adapters.take_loads():
            task = asyncio.create_task(self._fill(slot, number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _fill(self, slot: int, number: int) -> None:
        adapter = self._engine.cell.adapters.adapters[number]
        started = time.perf_counter()
        try:
            await self._until_placed(adapter, slot)
        except KvernError as error:
            log.warning("adapter %s cannot be loaded: %s", adapter.name, error.message)
            self._engine.metrics.adapter_failed()
            error.field = "model"
            self._group.adapter_failed(slot, number, error, self._engine.clock())
        else:
            self._engine.metrics.adapter_placed(time.perf_counter() - started)
            self._group.adapter_placed(slot, number)
        self._engine.settle()

    async def _until_placed(self, adapter: adapter_pb2.Adapter, slot: int) -> None:
        while True:
            try:
                await self._host.place(adapter.path, adapter.digest, slot)
                return
            except KvernError as error:
                # Not the adapter's fault; if the worker is lost, so are we.
                if error.code not in (error_pb2.ERROR_CODE_UNAVAILABLE, error_pb2.ERROR_CODE_FENCED):
                    raise
            await asyncio.sleep(RETRY_S)


class Adapters:
    """Loads and unloads. ``hosts`` gives the workers that are ready and have slots; ``modules`` (name → path) are those
    of --lora-modules, which ``run`` loads; ``settled`` is set when they are, or when nobody should wait for them."""

    def __init__(
        self,
        engine: Engine,
        hosts: Callable[[], Sequence[AdapterHost]],
        modules: Mapping[str, str],
        enabled: bool,
    ) -> None:
        self.settled = asyncio.Event()
        self._engine = engine
        self._hosts = hosts
        self._modules = modules
        self._enabled = enabled
        self._lock = asyncio.Lock()

    async def load(
        self, name: str, path: str, *, replace: bool, from_flags: bool = False
    ) -> adapter_pb2.Adapter:
        """Returns when new requests may have the adapter, wherever the leader goes. Raises KvernError with what is
        wrong with it."""
        if not self._enabled:
            raise not_enabled()
        cell = self._engine.cell
        if cell.model is None:
            raise _no_worker()
        check_name(name, cell.model.name)
        if not path:
            raise invalid(
                "lora_path", "lora_path is missing; give the folder that PEFT saved, as workers see it"
            )
        async with self._lock:
            read = await self._read(path)
            adapter = cell.load_adapter(
                name, path, read.digest, read.rank, replace=replace, from_flags=from_flags
            )
            await self._engine.committed()
        log.info("adapter %s is served: %s, rank %d", name, path, read.rank)
        return adapter

    async def unload(self, name: str) -> tuple[adapter_pb2.Adapter, int]:
        """The adapter, and how many requests go on with it. Raises MODEL_NOT_FOUND."""
        if not self._enabled:
            raise not_enabled()
        async with self._lock:
            adapter, users = self._engine.cell.unload_adapter(name)
            await self._engine.committed()
        log.info("adapter %s is unloaded; %d requests go on with it", name, users)
        return adapter, users

    async def _read(self, path: str) -> worker_pb2.PlaceAdapterResponse:
        """What all workers find there."""
        if not self._engine.cell.groups:
            raise _no_worker()
        hosts = self._hosts()
        if not hosts:
            raise no_slots()
        answers = await asyncio.gather(*(host.place(path) for host in hosts), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        found = [answer for answer in answers if isinstance(answer, worker_pb2.PlaceAdapterResponse)]
        if len({answer.digest for answer in found}) > 1:
            raise invalid(
                "lora_path", f"workers find different files at {path}; give all the same", value=path
            )
        return found[0]

    async def run(self) -> None:
        """Brings --lora-modules about: those of an earlier start that are no longer named go, the others come."""
        served = [a for a in self._engine.cell.adapters.adapters.values() if not a.draining]
        if not self._modules or self._engine.cell.requests:
            self.settled.set()  # streams go on; none of them waits for an adapter that it does not have
        for adapter in served:
            if adapter.from_flags and adapter.name not in self._modules:
                self._engine.cell.unload_adapter(adapter.name)
        self._engine.settle()
        try:
            for name, path in self._modules.items():
                await self._load_module(name, path)
        finally:
            self.settled.set()

    async def _load_module(self, name: str, path: str) -> None:
        while True:
            try:
                await self.load(name, path, replace=True, from_flags=True)
                return
            except KvernError as error:
                if error.code != error_pb2.ERROR_CODE_UNAVAILABLE:
                    log.error("--lora-modules %s=%s is not served: %s", name, path, error.message)
                    return
            await asyncio.sleep(RETRY_S)


def not_enabled() -> KvernError:
    return KvernError(
        error_pb2.ERROR_CODE_UNIMPLEMENTED,
        "adapters are not enabled; start the scheduler and its workers with --enable-lora",
        field="lora_name",
    )


def _no_worker() -> KvernError:
    return KvernError(
        error_pb2.ERROR_CODE_UNAVAILABLE, "no worker is ready; try again shortly", retry_after_ms=500
    )
