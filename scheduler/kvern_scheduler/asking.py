"""What one session asks of the engine, in order; requests that ended under an earlier leader are read from the store
first."""

from __future__ import annotations

import asyncio
import logging

from kvern.errors import KvernError
from kvern.v1 import error_pb2, session_pb2
from kvern_scheduler.engine import Engine, store_is_away
from kvern_scheduler.recovery import Archive
from kvern_scheduler.sessions import Session
from kvern_scheduler.store.base import StoreUnavailable

RETRY_S = 0.1
Ask = session_pb2.Submit | session_pb2.Attach

log = logging.getLogger(__name__)


class Asking:
    """Only what names such a request waits for the store; the rest of its message does not. ``tasks``: what waits."""

    def __init__(self, engine: Engine, session: Session, archive: Archive) -> None:
        self._engine = engine
        self._session = session
        self._archive = archive
        self._late_cancels: list[session_pb2.CancelHandle] = []
        self.tasks: set[asyncio.Task[None]] = set()

    def take(self, message: session_pb2.SessionRequest) -> None:
        for cancel in message.cancels:
            self._engine.cancel(self._session, cancel)
        if self.tasks:  # it may mean one that waits
            self._late_cancels += message.cancels
        asks: list[Ask] = [*message.submits, *message.attaches]
        waiting: list[Ask] = []
        ready: list[Ask] = []
        for ask in asks:
            (waiting if self._must_wait(ask) else ready).append(ask)
        self._ask(ready)
        self._engine.settle()
        if waiting:
            task = asyncio.create_task(self._recall(waiting))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def _must_wait(self, ask: Ask) -> bool:
        if isinstance(ask, session_pb2.Submit) and self._engine.committer.stalled:
            return False  # it is refused
        return self._archive.may_know((ask.tenant, ask.request_id))

    def _ask(self, asks: list[Ask]) -> None:
        for ask in asks:
            if isinstance(ask, session_pb2.Attach):
                self._engine.attach(self._session, ask)
            else:
                self._submit(ask)

    def _submit(self, submit: session_pb2.Submit) -> None:
        """A submit that breaks our own code costs itself, not the session and everything that is on it."""
        try:
            self._engine.submit(self._session, submit)
        except Exception:
            log.exception("a submit failed")
            self._refuse(
                submit,
                KvernError(
                    error_pb2.ERROR_CODE_INTERNAL,
                    "internal error on submit; the scheduler's log has the stack",
                ),
            )

    def _refuse(self, ask: Ask, error: KvernError) -> None:
        self._session.refused(session_pb2.Refused(handle=ask.handle, error=error.to_pb()))

    async def _recall(self, asks: list[Ask]) -> None:
        """While the store is away, new requests are refused, and those that are attached to wait."""
        while asks:
            try:
                await self._archive.recall([(ask.tenant, ask.request_id) for ask in asks])
                break
            except StoreUnavailable:
                for ask in asks:
                    if isinstance(ask, session_pb2.Submit):
                        self._refuse(ask, store_is_away())
                asks = [ask for ask in asks if isinstance(ask, session_pb2.Attach)]
                await asyncio.sleep(RETRY_S)
            except Exception:
                log.exception("what the store has of a request cannot be read")
                break
        self._ask(asks)
        for cancel in self._late_cancels:
            self._engine.cancel(self._session, cancel)
        if len(self.tasks) == 1:
            self._late_cancels.clear()
        self._engine.settle()
