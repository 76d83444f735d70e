"""The WorkerService over any executor: ordering, epoch fencing, heartbeats, errors that kill no process.

::

    reader (event loop) ──plans──▶ executor (inline, or its one compute thread) ──results──▶ writer (event loop)

An executor only computes. It never sees a stream, an epoch or a heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt

from kvern.errors import KvernError, invalid
from kvern.rpc.packing import pack_u32
from kvern.rpc.server import Server, stop_on_signals
from kvern.rpc.tls import Tls
from kvern.v1 import error_pb2, worker_pb2, worker_pb2_grpc
from kvern_worker.compute_thread import ComputeThread
from kvern_worker.plan_checks import check_plan, claimed, failed_step, is_empty
from kvern_worker.traces import StepTraces

SERVICE_NAME = "kvern.v1.WorkerService"
HEARTBEAT_S = 0.25
MAX_PROFILE_MS = 60_000
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it

log = logging.getLogger(__name__)


class Executor(Protocol):
    """One rank's model. ``run`` is called in order of step, always from one thread."""

    inline: bool
    """True: run() takes microseconds, and is called in the event loop."""

    @property
    def transfers(self) -> Transfers | None:
        """None: there are no tiers."""
        ...

    def describe(self) -> worker_pb2.DescribeResponse:
        """model, num_blocks, block_size, bytes_per_block, max_num_seqs, max_num_batched_tokens, device."""
        ...

    def run(self, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
        """Runs one step. A :class:`KvernError` means that the plan is malformed and ends the stream; any other
        exception fails the sequences of the step, and only those."""
        ...

    def generations(self) -> npt.NDArray[np.uint32]:
        """The generation that each block holds, [num_blocks]; 0 when never handed out."""
        ...

    def reset(self) -> None:
        """A new leader's stream: drop the batch, keep the KV blocks and their generations."""
        ...

    def place_adapter(self, request: worker_pb2.PlaceAdapterRequest) -> worker_pb2.PlaceAdapterResponse:
        """Reads an adapter, and fills a slot with it that no step in flight uses. Called beside :meth:`run`, from one
        thread. Raises KvernError with what is wrong with the adapter."""
        ...


class Transfers(Protocol):
    """Blocks on their way between the device and the tiers below it."""

    notify: Callable[[], None]
    """Called, from any thread, when a transfer has ended."""

    def take_done(self) -> list[worker_pb2.TransferDone]:
        """Those that have ended since the last call."""
        ...

    def inventory(self) -> tuple[bytes, bytes]:
        """Hashes of what lies in memory and on disk, the least recently used first."""
        ...


class Progress:
    """How far loading is. Written by the loading thread, read by Describe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.loaded_bytes = 0
        self.total_bytes = 0
        self.phase: worker_pb2.WorkerPhase.ValueType = worker_pb2.WORKER_PHASE_STARTING
        self.error: KvernError | None = None
        # What this process serves on; 0 where that is a unix socket.
        self.port = 0

    def start(self, total_bytes: int) -> None:
        """Loading begins, of ``total_bytes`` in all."""
        with self._lock:
            self.total_bytes = total_bytes
            self.phase = worker_pb2.WORKER_PHASE_LOADING

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.loaded_bytes += num_bytes

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self.phase = worker_pb2.WORKER_PHASE_FAILED
            self.error = (
                error
                if isinstance(error, KvernError)
                else KvernError(error_pb2.ERROR_CODE_INTERNAL, f"loading failed: {error}")
            )

    def ready(self) -> None:
        with self._lock:
            self.phase = worker_pb2.WORKER_PHASE_READY


class _Stream:
    """One Execute call: its place in the order of steps, and its writes."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self.context = context
        self.epoch: int | None = None
        self.step: int | None = None
        self.replaced = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.outcomes: list[worker_pb2.StepResult] = []
        self.has_transfers = False
        self.take_transfers: Callable[[], list[worker_pb2.TransferDone]] = list
        self.wake = asyncio.Event()
        self.last_write = 0.0
        self._write_lock = asyncio.Lock()

    def fail(self, error: BaseException) -> None:
        """Ends the call with ``error``; the first one counts."""
        if not self.failed.done():
            self.failed.set_exception(error)

    async def write(self, results: list[worker_pb2.StepResult]) -> None:
        async with self._write_lock:
            self.last_write = time.monotonic()
            response = worker_pb2.ExecuteResponse(results=results, transfers=self.take_transfers())
            await self.context.write(response)

    async def heartbeat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if time.monotonic() - self.last_write >= HEARTBEAT_S * 0.9:
                await self.write([])


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves one executor; before :meth:`attach` it only describes how far loading is."""

    def __init__(self, progress: Progress, traces: StepTraces | None = None) -> None:
        self._traces = traces
        self.instance_id = uuid.uuid4().hex
        self._progress = progress
        self._executor: Executor | None = None
        self._compute: ComputeThread | None = None
        self._description = worker_pb2.DescribeResponse()
        self._epoch = 0
        self._step = 0
        self._steps = 0
        self._last_step_unix_ms = 0
        self._owner: _Stream | None = None
        self._streams: set[_Stream] = set()
        self._last_done = 0.0
        self._profiling = False
        # Adapters are placed one after the other, in the order asked: also those whose caller has hung up.
        self._placing = ThreadPoolExecutor(1, "adapters")

    def attach(self, executor: Executor) -> None:
        """Loading is over. Call in the event loop."""
        self._description = executor.describe()
        if not executor.inline:
            self._compute = ComputeThread(asyncio.get_running_loop())
        if executor.transfers is not None:
            loop = asyncio.get_running_loop()
            executor.transfers.notify = partial(_call_soon, loop, self._tell_transfers)
        self._executor = executor
        self._progress.ready()

    def _tell_transfers(self) -> None:
        if self._owner is not None:
            self._owner.has_transfers = True
            self._owner.wake.set()

    def drain(self) -> None:
        """Ends all streams with UNAVAILABLE: the scheduler takes their sequences elsewhere."""
        for stream in self._streams:
            stream.fail(KvernError(error_pb2.ERROR_CODE_UNAVAILABLE, "the worker is shutting down"))
        if self._compute is not None:
            self._compute.stop()

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.DescribeResponse:
        response = worker_pb2.DescribeResponse()
        response.CopyFrom(self._description)
        progress = self._progress
        response.phase = progress.phase
        response.loaded_bytes = progress.loaded_bytes
        response.total_bytes = progress.total_bytes
        response.instance_id = self.instance_id
        response.steps = self._steps
        response.last_step_unix_ms = self._last_step_unix_ms
        if progress.error is not None:
            response.error.CopyFrom(progress.error.to_pb())
        return response

    async def GetInventory(
        self, request: worker_pb2.GetInventoryRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.GetInventoryResponse:
        executor = self._ready_executor()
        return worker_pb2.GetInventoryResponse(
            instance_id=self.instance_id,
            epoch=self._epoch,
            step=self._step,
            generations=pack_u32(executor.generations()),
            **_tiers_of(executor),
        )

    async def PlaceAdapter(
        self, request: worker_pb2.PlaceAdapterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.PlaceAdapterResponse:
        executor = self._ready_executor()
        slots = self._description.max_loras
        if request.slot > slots:
            raise invalid("slot", f"there is no adapter slot {request.slot}", value=request.slot, limit=slots)
        if request.epoch < self._epoch:
            raise _old_epoch("adapter", request.epoch, self._epoch)
        # Shielded: what has been asked for is done before what is asked next, or an old one could come last.
        placing = asyncio.get_running_loop().run_in_executor(self._placing, executor.place_adapter, request)
        return await asyncio.shield(placing)

    async def Profile(
        self, request: worker_pb2.ProfileRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.ProfileResponse:
        self._ready_executor()
        if not 0 < request.milliseconds <= MAX_PROFILE_MS:
            raise invalid(
                "milliseconds",
                f"milliseconds is {request.milliseconds}, it must be 1 to {MAX_PROFILE_MS}",
                value=request.milliseconds,
                limit=MAX_PROFILE_MS,
            )
        seconds = request.milliseconds / 1000
        if self._description.device != "cpu":
            await asyncio.sleep(seconds)
            return worker_pb2.ProfileResponse(
                note=f"kernels are timed on CPUs only, and this worker computes on {self._description.device}"
            )
        if self._profiling:
            raise KvernError(
                error_pb2.ERROR_CODE_UNAVAILABLE, "a profile is being taken; try again", retry_after_ms=1000
            )
        from kvern_worker.profiling import KernelTimers

        timers = KernelTimers()
        self._profiling = True
        timers.start()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._profiling = False
            answer = timers.stop()
        return answer

    async def Execute(
        self,
        request_iterator: AsyncIterator[worker_pb2.ExecuteRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        executor = self._ready_executor()
        stream = _Stream(context)
        self._streams.add(stream)
        serve = self._read_inline if executor.inline else self._read_threaded
        tasks = [asyncio.create_task(serve(stream)), asyncio.create_task(stream.heartbeat())]
        if not executor.inline:
            tasks.append(asyncio.create_task(self._write_outcomes(stream)))
        try:
            done, _ = await asyncio.wait([*tasks, stream.failed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in (*tasks, stream.failed):
                future.cancel()
            self._streams.discard(stream)
            if self._owner is stream:
                self._owner = None
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            error = task.exception()
            # A peer that hung up is no error of ours, and there is no one left to tell.
            if error is not None and not isinstance(error, asyncio.InvalidStateError | grpc.aio.BaseError):
                raise error
        if False:
            yield  # the error interceptor wants an async generator

    def _ready_executor(self) -> Executor:
        if self._executor is None:
            raise KvernError(
                error_pb2.ERROR_CODE_UNAVAILABLE, "the worker is still loading", retry_after_ms=500
            )
        return self._executor

    async def _read_inline(self, stream: _Stream) -> None:
        assert self._executor is not None
        while (request := await stream.context.read()) is not EOF:
            if not request.plans:
                continue
            results = []
            for plan in request.plans:
                self._accept(stream, plan)
                results.append(self._run(plan))
                self._record()
            await stream.write(results)

    async def _read_threaded(self, stream: _Stream) -> None:
        assert self._compute is not None
        while (request := await stream.context.read()) is not EOF:
            for plan in request.plans:
                self._accept(stream, plan)
                self._compute.submit(partial(self._run, plan), partial(self._deliver, stream))

    def _deliver(self, stream: _Stream, outcome: worker_pb2.StepResult | BaseException) -> None:
        if isinstance(outcome, BaseException):
            stream.fail(outcome)
            return
        self._record()
        stream.outcomes.append(outcome)
        stream.wake.set()

    async def _write_outcomes(self, stream: _Stream) -> None:
        while True:
            await stream.wake.wait()
            stream.wake.clear()
            if stream.outcomes or stream.has_transfers:
                stream.has_transfers = False
                outcomes, stream.outcomes = stream.outcomes, []
                await stream.write(outcomes)

    def _accept(self, stream: _Stream, plan: worker_pb2.StepPlan) -> None:
        """Fences the plan and puts the stream in possession of the batch. Raises what ends the stream."""
        if plan.epoch < self._epoch or (stream.replaced and plan.epoch <= self._epoch):
            raise _old_epoch("plan", plan.epoch, self._epoch)
        if self._owner is not stream or stream.epoch != plan.epoch:
            self._take_over(stream, plan.epoch)
        elif plan.step != (stream.step or 0) + 1:
            raise invalid(
                "step",
                f"plan of step {plan.step} came after step {stream.step}",
                value=plan.step,
                limit=(stream.step or 0) + 1,
            )
        stream.step = plan.step
        self._step = plan.step
        description = self._description
        check_plan(plan, description.max_num_seqs, description.num_blocks, description.num_state_blocks)

    def _take_over(self, stream: _Stream, epoch: int) -> None:
        """The stream's first plan: whoever drove the batch before does so no longer."""
        assert self._executor is not None
        if self._owner is not None and self._owner is not stream:
            self._owner.replaced = True
            self._owner.take_transfers = list
            self._owner.fail(
                KvernError(error_pb2.ERROR_CODE_FENCED, f"replaced by a stream of epoch {epoch}")
            )
        log.info("epoch %d drives this worker", epoch)
        self._owner, stream.epoch, self._epoch = stream, epoch, epoch
        if self._compute is None:
            self._reset_batch()
            self._reset_for(stream)
        else:
            self._compute.submit(self._reset_batch, lambda _: self._reset_for(stream))

    def _reset_batch(self) -> None:
        assert self._executor is not None
        self._executor.reset()
        if self._traces is not None:
            self._traces.reset()

    def _reset_for(self, stream: _Stream) -> None:
        """Nothing moves any more that an earlier stream began: what ends from now on is this one's."""
        assert self._executor is not None
        if self._owner is stream and self._executor.transfers is not None:
            stream.take_transfers = self._executor.transfers.take_done

    def _run(self, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
        assert self._executor is not None
        started = time.perf_counter()
        try:
            # In a group even a claim waits until all ranks have it.
            alone = not self._description.rank_addresses
            result = claimed(plan) if alone and is_empty(plan) else self._executor.run(plan)
        except KvernError:
            raise
        except Exception as error:
            log.exception("step %d failed", plan.step)
            result = failed_step(plan, error)
        if self._last_done:
            result.wait_us = int(min(max(started - self._last_done, 0.0) * 1e6, 2**32 - 1))
        self._last_done = time.perf_counter()
        if self._traces is not None:
            self._traces.stepped(plan, result, self._last_done - started)
        return result

    def _record(self) -> None:
        self._steps += 1
        self._last_step_unix_ms = time.time_ns() // 1_000_000


def _tiers_of(executor: Executor) -> dict[str, bytes]:
    if executor.transfers is None:
        return {}
    memory, disk = executor.transfers.inventory()
    return {"memory_hashes": memory, "disk_hashes": disk}


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(call)


def _old_epoch(what: str, epoch: int, newest: int) -> KvernError:
    return KvernError(
        error_pb2.ERROR_CODE_FENCED,
        f"{what} of epoch {epoch} refused: this worker follows epoch {newest}",
        field="epoch",
        value=epoch,
        limit=newest,
    )


async def serve(
    listen: str,
    load: Callable[[Progress], Executor],
    *,
    grace_s: float = 5.0,
    stop: asyncio.Event | None = None,
    tls: Tls | None = None,
    traces: StepTraces | None = None,
) -> None:
    """Starts gRPC at once, runs ``load`` in a thread, serves until SIGTERM or ``stop``.

    Raises what ``load`` raised, two seconds after Describe began to say so, and OSError when the address is taken.
    """
    stop = stop or stop_on_signals()
    progress = Progress()
    servicer = WorkerServicer(progress, traces)
    server = Server([SERVICE_NAME], tls=tls)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.grpc)
    port = progress.port = await server.start(listen)
    log.info("worker %s listens on %s (port %d)", servicer.instance_id[:8], listen, port)
    stopping = asyncio.create_task(stop.wait())
    loading = asyncio.create_task(_load_in_thread(load, progress))
    try:
        await asyncio.wait({stopping, loading}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            return  # the daemon thread dies with the process
        try:
            executor = await loading
        except BaseException as error:
            log.error("loading failed: %s", error)
            progress.fail(error)
            await asyncio.wait({stopping}, timeout=2.0)
            raise
        servicer.attach(executor)
        await server.set_serving(True)
        log.info("worker is ready")
        await stopping
    finally:
        stopping.cancel()
        servicer.drain()
        await server.drain(grace_s)


async def _load_in_thread(load: Callable[[Progress], Executor], progress: Progress) -> Executor:
    """A daemon thread of its own: the default pool would make the process wait for it on SIGTERM."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Executor] = loop.create_future()

    def settle(executor: Executor | None, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(executor)  # type: ignore[arg-type]

    def run() -> None:
        executor, failure = None, None
        try:
            executor = load(progress)
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, executor, failure)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await future
