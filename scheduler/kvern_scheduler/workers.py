"""One worker's connection: dial, wait until it is ready, keep two plans in flight, notice its death.

::

    DIALLING ─▶ LOADING ─▶ CLAIMING ─▶ RUNNING ─▶ (lost) ─▶ DIALLING …
                            an empty plan makes the epoch known to the worker, so that nothing of an
                            earlier leader runs any more when the inventory is taken
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import numpy as np

from kvern.errors import KvernError
from kvern.rpc.channel import Dial, create_channel
from kvern.rpc.packing import unpack_u32
from kvern.v1 import worker_pb2, worker_pb2_grpc
from kvern_scheduler.adapters import AdapterHost, SlotFiller
from kvern_scheduler.convert import plan_to_pb
from kvern_scheduler.core.errors import ProtocolError
from kvern_scheduler.core.group import Group
from kvern_scheduler.engine import Engine
from kvern_scheduler.ranks import CALL_ERRORS, RankCalls, WorkerLost, rank_targets
from kvern_scheduler.store.base import IndexEntries, StoreUnavailable

HEARTBEAT_S = 0.25
SILENT_BEATS = 5
"""Counted, not timed: a pause of our own process says nothing about the worker."""
POLL_S = 0.25
STEP_TIMEOUT_S = 120.0
HASH = np.dtype("V32")

log = logging.getLogger(__name__)


class Worker:
    """Drives the worker at ``address`` until cancelled. ``indexed``: instances of which an earlier leader's commits
    have a prefix index, that no worker has been found to be; ``load_index`` reads it."""

    def __init__(
        self,
        engine: Engine,
        address: str,
        epoch: int,
        indexed: set[str],
        load_index: Callable[[str], Awaitable[IndexEntries]],
        dial: Dial = create_channel,
    ) -> None:
        self.address = address
        self._dial = dial
        self.ready = False
        self.description = worker_pb2.DescribeResponse()
        self.group: Group | None = None
        self._engine = engine
        self._epoch = epoch
        self._indexed = indexed
        self._load_index = load_index
        self.instance_id = ""
        # Where it takes adapters.
        self.host: AdapterHost | None = None
        self._filler: SlotFiller | None = None
        self._calls: RankCalls
        self._attempt = 0
        self._writing = False
        self._last_sent = 0.0
        self._last_result = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    async def profile(self, milliseconds: int) -> worker_pb2.ProfileResponse:
        """What its kernels take meanwhile. Raises grpc.aio.AioRpcError."""
        channel = self._dial(self.address)
        try:
            stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
            request = worker_pb2.ProfileRequest(milliseconds=milliseconds)
            answer: worker_pb2.ProfileResponse = await stub.Profile(request, timeout=milliseconds / 1000 + 5)
            return answer
        finally:
            await channel.close(None)

    async def run(self) -> None:
        """Redials for ever."""
        channel = self._dial(self.address)
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            while True:
                try:
                    await self._connect(stub)
                except WorkerLost as error:
                    log.warning("worker %s lost: %s", self.address, error)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE or self.ready:
                        log.warning("worker %s lost: %s %s", self.address, error.code().name, error.details())
                except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
                    log.warning("worker %s lost: %r", self.address, error)
                except KvernError as error:
                    log.error("worker %s refused: %s", self.address, error.message)
                    await asyncio.sleep(2.0)
                finally:
                    self._lose()
                await asyncio.sleep(0.05)
        finally:
            await channel.close(None)

    async def _connect(self, stub: worker_pb2_grpc.WorkerServiceAsyncStub) -> None:
        description = await self._wait_until_ready(stub)
        # Before the call, whose other end must not seem silent meanwhile. Nobody commits to this index any more.
        entries = await self._committed_index(description.instance_id)
        self._attempt += 1
        async with contextlib.AsyncExitStack() as stack:
            stubs = [stub]
            for target in rank_targets(self.address, description)[1:]:
                channel = await stack.enter_async_context(self._dial(target))
                stubs.append(worker_pb2_grpc.WorkerServiceStub(channel))
            self._calls = RankCalls(stubs, description.sampling_rank)
            watch = asyncio.create_task(self._watch())
            try:
                await self._claim(stub, description, entries)
                await self._receive()
            except asyncio.CancelledError:
                if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise
                raise WorkerLost("silent for too long, or a step took too long") from None
            finally:
                watch.cancel()
                self._calls.cancel()

    async def _wait_until_ready(self, stub: Any) -> worker_pb2.DescribeResponse:
        phase = None
        while True:
            description = await stub.Describe(worker_pb2.DescribeRequest(), timeout=2.0, wait_for_ready=False)
            self.description = description
            if description.phase == worker_pb2.WORKER_PHASE_READY:
                return description  # type: ignore[no-any-return]
            if description.phase != phase:
                phase = description.phase
                log.info("worker %s: %s", self.address, worker_pb2.WorkerPhase.Name(phase))
            if phase == worker_pb2.WORKER_PHASE_FAILED:
                log.error("worker %s failed to load: %s", self.address, description.error.message)
                await asyncio.sleep(1.0)
            await asyncio.sleep(POLL_S)

    async def _claim(
        self, stub: Any, description: worker_pb2.DescribeResponse, entries: IndexEntries | None
    ) -> None:
        """Fences earlier leaders off the worker, then takes it into the cell. ``entries``: its committed index."""
        known = self.group
        same = known is not None and self.instance_id == description.instance_id
        step = known.step if same and known is not None else 0
        await self._write([worker_pb2.StepPlan(epoch=self._epoch, step=step, attempt=self._attempt)])
        while not (await self._calls.read()).results:
            pass
        await self._calls.all_ran()
        inventory = await stub.GetInventory(worker_pb2.GetInventoryRequest(), timeout=5.0)
        if inventory.instance_id != description.instance_id:
            raise WorkerLost("it was replaced by another instance meanwhile")
        # Nothing is awaited from here on: group and instance change together, or a group would be believed of a
        # worker that never had its blocks.
        if same and known is not None:
            self._engine.cell.readmit_group(known)
        else:
            if known is not None:
                self._engine.committer.drop_instance(self.instance_id)
            self.group = self._engine.cell.add_group(
                description.model,
                description.num_blocks,
                description.block_size,
                description.max_num_seqs,
                description.max_num_batched_tokens,
                description.num_state_blocks,
                description.max_loras,
                num_memory_blocks=description.num_memory_blocks,
                num_disk_blocks=description.num_disk_blocks,
            )
            self.instance_id = description.instance_id
            self._restore_index(self.group, unpack_u32(inventory.generations), entries)
        assert self.group is not None
        self.host = AdapterHost(stub, self._epoch) if description.max_loras else None
        self._filler = SlotFiller(self._engine, self.group, self.host) if self.host is not None else None
        if self.group.tiers is not None:
            tiers = (inventory.memory_hashes, inventory.disk_hashes)
            self.group.tiers.restore(*(np.frombuffer(hashes, HASH).tolist() for hashes in tiers))
        self._engine.metrics.named(description.model.name)
        self.ready = True
        self._engine.instances[self.group.index] = self.instance_id
        self._engine.pumps[self.group.index] = self.pump
        log.info(
            "worker %s is ready: %s, %d blocks of %d tokens, %d blocks of its prefix index are valid",
            self.address,
            description.model.name,
            description.num_blocks,
            description.block_size,
            self.group.pool.num_indexed,
        )
        self._engine.settle()

    async def _committed_index(self, instance: str) -> IndexEntries | None:
        if instance not in self._indexed:
            return None
        try:
            return await self._load_index(instance)
        except StoreUnavailable as error:
            log.warning(
                "worker %s: its prefix cache is not known, since the store does not answer: %s",
                self.address,
                error,
            )
            return None

    def _restore_index(
        self,
        group: Group,
        generations: np.ndarray[Any, np.dtype[np.uint32]],
        entries: IndexEntries | None,
    ) -> None:
        """Believes the committed index where the worker still holds that generation of the block."""
        self._indexed.discard(self.instance_id)
        first = 0
        for pool in group.pools:
            end = first + pool.num_blocks
            pool.generations[:] = generations[first:end]
            if entries is not None:
                valid = generations[entries.blocks] == entries.generations
                valid &= (entries.blocks >= first) & (entries.blocks < end)
                hashes = np.frombuffer(entries.hashes, HASH)[valid].tolist()
                blocks = entries.blocks[valid] - np.uint32(first)
                pool.restore(blocks, hashes, entries.generations[valid])
            first = end

    async def _receive(self) -> None:
        """Folds results and sends the next plans, until the worker is lost."""
        engine, group, timings = self._engine, self.group, self._engine.timings
        assert group is not None
        while True:
            response = await self._calls.read()
            if not response.results and not response.transfers:
                continue
            try:
                for done in response.transfers:
                    engine.transferred(group, done)
                for result in response.results:
                    engine.fold(group, result)
                    if result.comm_us:
                        engine.metrics.communicated(group.index, result)
                    now = time.perf_counter()
                    if self._last_result:
                        timings.step.add(now - self._last_result)
                    # After a pause there is no step time: nothing was being computed.
                    self._last_result = now if group.in_flight else 0.0
            except ProtocolError as error:
                raise WorkerLost(str(error)) from error
            # The plans first: the worker waits for nothing else. They are written while the next result is read.
            self.pump()
            engine.settle()

    def pump(self) -> None:
        """Sends plans if there are any; returns at once."""
        group = self.group
        if not self.ready or self._writing or group is None or not group.has_room:
            return
        plans = self._take_plans()
        if plans:
            self._writing = True
            task = asyncio.create_task(self._pump(plans))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, plans: list[worker_pb2.StepPlan]) -> None:
        # The reader sees the same failure and reports it.
        with contextlib.suppress(*CALL_ERRORS, asyncio.CancelledError):
            await self._send_plans(plans)

    def _take_plans(self) -> list[worker_pb2.StepPlan]:
        """All plans that may be in flight now. They share a message: where steps take next to no time, two results
        come back together too, and a step costs half the messages."""
        plans = []
        while self.ready and self.group is not None:
            plan = self._engine.plan(self.group)
            if plan is None:
                break
            message = plan_to_pb(plan, self._epoch)
            message.attempt = self._attempt
            plans.append(message)
        if self._filler is not None:
            self._filler.start()
        return plans

    async def _send_plans(self, plans: list[worker_pb2.StepPlan]) -> None:
        self._writing = True
        try:
            while plans:
                await self._write(plans)
                plans = self._take_plans()
        finally:
            self._writing = False

    async def _write(self, plans: list[worker_pb2.StepPlan]) -> None:
        self._last_sent = time.monotonic()
        await self._calls.write(worker_pb2.ExecuteRequest(plans=plans))

    async def _watch(self) -> None:
        """Heartbeats, and cancels the call of a worker that is silent or stuck in a step."""
        stuck_since = time.monotonic()
        step = -1
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            now = time.monotonic()
            group = self.group
            oldest = group.in_flight[0].step if group is not None and group.in_flight else None
            # Until the claim is answered, it is what takes its time: its answer may be lost like a step's.
            if self.ready and (oldest is None or oldest != step):
                step, stuck_since = (-1 if oldest is None else oldest), now
            if self._calls.beat() >= SILENT_BEATS or now - stuck_since > STEP_TIMEOUT_S:
                self._calls.cancel()
                return
            if now - self._last_sent >= HEARTBEAT_S * 0.9 and not self._writing and self.ready:
                self._writing = True
                try:
                    self._last_sent = now
                    await self._calls.write(worker_pb2.ExecuteRequest())
                except CALL_ERRORS:
                    return
                finally:
                    self._writing = False
                self.pump()

    def _lose(self) -> None:
        """Gives the group's sequences back to the cell."""
        if not self.ready or self.group is None:
            return
        self.ready = False
        self._last_result = 0.0
        if self._filler is not None:
            self._filler.cancel()
        self.host = self._filler = None
        self._engine.pumps.pop(self.group.index, None)
        self._engine.cell.lose_group(self.group, keep_blocks=True, now=self._engine.clock())
        self._engine.settle()
