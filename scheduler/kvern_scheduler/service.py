"""SchedulerService: converts messages, and keeps one session per stream."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio

from kvern.errors import KvernError
from kvern.v1 import error_pb2, session_pb2, session_pb2_grpc
from kvern_scheduler.adapters import Adapters
from kvern_scheduler.asking import Asking
from kvern_scheduler.engine import Engine
from kvern_scheduler.recovery import Archive
from kvern_scheduler.sessions import Session as GatewaySession
from kvern_scheduler.workers import Worker

SERVICE_NAME = "kvern.v1.SchedulerService"
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it

log = logging.getLogger(__name__)


class SchedulerServicer(session_pb2_grpc.SchedulerServiceServicer):
    """``lead`` makes it answer sessions; before that they are refused with UNAVAILABLE."""

    def __init__(self, cell_name: str, store_name: str, owner: str) -> None:
        self._cell_name = cell_name
        self._store_name = store_name
        self._owner = owner
        self._engine: Engine | None = None
        self._archive: Archive | None = None
        self._adapters: Adapters | None = None
        self._workers: Sequence[Worker] = ()
        self._epoch = 0
        self._numbers = itertools.count()
        self._draining = False

    def lead(
        self, engine: Engine, workers: Sequence[Worker], epoch: int, archive: Archive, adapters: Adapters
    ) -> None:
        self._engine, self._workers, self._epoch, self._archive = engine, workers, epoch, archive
        self._adapters = adapters

    def drain(self) -> None:
        """No new sessions."""
        self._draining = True

    async def Session(
        self,
        request_iterator: AsyncIterator[session_pb2.SessionRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[session_pb2.SessionResponse]:
        engine, archive = self._engine, self._archive
        if engine is None or archive is None or self._draining:
            raise _does_not_lead()
        session = GatewaySession(
            next(self._numbers), context, engine.subscriptions.catch_up, lambda: engine.cell.room
        )
        engine.subscriptions.sessions[session.number] = session
        asking = Asking(engine, session, archive)
        tasks = [
            asyncio.create_task(self._receive(engine, session, asking, context)),
            asyncio.create_task(session.send()),
            asyncio.create_task(session.watch()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            engine.detach(session)
            tasks += asking.tasks
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            error = task.exception()
            if error is None or isinstance(error, grpc.aio.BaseError | asyncio.InvalidStateError):
                continue
            log.warning("the session of gateway %s ends: %s", session.gateway_id[:40], error)
            raise error
        if False:
            yield  # the error interceptor wants an async generator

    async def _receive(
        self,
        engine: Engine,
        session: GatewaySession,
        asking: Asking,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        request = await context.read()
        if request is EOF:
            return
        session.gateway_id = request.hello.gateway_id
        log.info("gateway %s is here", session.gateway_id[:40])
        engine.replace_sessions(session)
        welcome = asyncio.create_task(self._welcome(engine, session))
        try:
            while request is not EOF:
                session.check()
                session.heard = True
                if request.submits or request.cancels or request.attaches:
                    asking.take(request)
                request = await context.read()
        finally:
            welcome.cancel()

    async def _welcome(self, engine: Engine, session: GatewaySession) -> None:
        """Once the model is known, that is when the first worker is ready; and its adapters."""
        cell = engine.cell
        assert self._adapters is not None
        await self._adapters.settled.wait()
        while cell.model is None or not cell.groups:
            await asyncio.sleep(0.01)
        session.welcome(
            session_pb2.Welcome(
                cell=self._cell_name,
                epoch=self._epoch,
                model=cell.model,
                block_size=cell.block_size,
                kv_capacity_tokens=cell.kv_capacity_tokens,
                prefix_caching=cell.limits.enable_prefix_caching,
            )
        )
        session.adapters(engine.adapters)

    async def ServeAdapter(
        self, request: session_pb2.ServeAdapterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> session_pb2.ServeAdapterResponse:
        adapter = await self._leading().load(request.name, request.path, replace=request.replace)
        return session_pb2.ServeAdapterResponse(adapter=adapter)

    async def WithdrawAdapter(
        self, request: session_pb2.WithdrawAdapterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> session_pb2.WithdrawAdapterResponse:
        adapter, users = await self._leading().unload(request.name)
        return session_pb2.WithdrawAdapterResponse(adapter=adapter, num_running=users)

    def _leading(self) -> Adapters:
        if self._adapters is None or self._draining:
            raise _does_not_lead()
        return self._adapters

    async def GetStatus(
        self, request: session_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> session_pb2.GetStatusResponse:
        return self.status()

    def status(self) -> session_pb2.GetStatusResponse:
        engine = self._engine
        response = session_pb2.GetStatusResponse(
            cell=self._cell_name,
            epoch=self._epoch,
            leader=engine is not None and engine.committer.leads,
            store=self._store_name,
            owner=self._owner,
        )
        if engine is None:
            return response
        response.step = engine.committer.step
        response.num_gateways = len(engine.subscriptions.sessions)
        timings = engine.timings
        step_us = timings.step.median()
        response.timings.CopyFrom(
            session_pb2.StepTimings(
                steps=timings.fold.count,
                plan_us_p50=timings.plan.median(),
                fold_us_p50=timings.fold.median(),
                commit_us_p50=timings.commit.median(),
                step_us_p50=step_us,
                steps_per_s=1e6 / step_us if step_us else 0.0,
            )
        )
        response.groups.extend(map(_group_status, self._workers))
        return response


def _does_not_lead() -> KvernError:
    return KvernError(error_pb2.ERROR_CODE_UNAVAILABLE, "this scheduler does not lead", retry_after_ms=200)


def _group_status(worker: Worker) -> session_pb2.GroupStatus:
    status = session_pb2.GroupStatus(addresses=[worker.address], ready=worker.ready)
    group = worker.group
    if group is not None:
        status.group_id = str(group.index)
        status.model.CopyFrom(group.model)
        status.num_running = group.batch.num_running
        status.num_waiting = group.queue.num_waiting
        status.pending_prompt_tokens = group.queue.num_tokens
        status.num_blocks = group.pool.num_blocks
        status.num_free_blocks = group.pool.num_free
        status.num_cached_blocks = group.pool.num_cached
        status.block_size = group.block_size
    return status
