"""How a scheduler becomes the leader, and what it takes over from the one before."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Sequence

import grpc.aio

from kvern.rpc.channel import Dial, create_channel
from kvern.v1 import session_pb2, session_pb2_grpc
from kvern_scheduler.address import is_known, is_wildcard
from kvern_scheduler.convert import finish_from_pb, num_prompt_logprobs, submission_from_pb
from kvern_scheduler.core.requests import Request, State
from kvern_scheduler.engine import Engine
from kvern_scheduler.store.base import (
    Held,
    Leadership,
    Name,
    Store,
    StoredRequest,
    StoreRefused,
    StoreUnavailable,
)
from kvern_scheduler.store.base import State as StoredState

PROBE_TIMEOUT_S = 0.3
POLL_S = 0.03
RETRY_S = 0.1

log = logging.getLogger(__name__)


async def acquire(store: Store, owner: str, address: str, dial: Dial = create_channel) -> Leadership:
    """Waits until the cell has no leader, or takes over from one whose address answers no more. Raises StoreRefused
    where that is the store's first answer: the configuration is wrong, not the moment."""
    patience = _Patience()
    probe = _Probe(address, dial)
    try:
        while True:
            try:
                answer = await store.acquire(owner, address)
                if isinstance(answer, Held) and not await probe.finds(answer):
                    log.info("the leader at %s does not answer; taking over", answer.address)
                    answer = await store.acquire(owner, address, steal=answer.epoch)
            except StoreUnavailable as error:
                await patience.wait(error)
                continue
            patience.was_answered()
            if isinstance(answer, Leadership):
                return answer
            await asyncio.sleep(min(answer.expires_in, POLL_S))
    finally:
        await probe.close()


class _Patience:
    """With a store that fails: each reason is logged once."""

    def __init__(self) -> None:
        self._answered = False
        self._last = ""

    def was_answered(self) -> None:
        self._answered, self._last = True, ""

    async def wait(self, error: StoreUnavailable) -> None:
        """Raises ``error`` where waiting is no use."""
        if isinstance(error, StoreRefused) and not self._answered:
            raise error
        if str(error) != self._last:
            self._last = str(error)
            log.warning("the store does not answer: %s; trying again", error)
        await asyncio.sleep(RETRY_S)


class _Probe:
    """Asks the lease's holder, on one connection as long as that is the same."""

    def __init__(self, own_address: str, dial: Dial) -> None:
        self._own_address = own_address
        self._dial = dial
        self._address = ""
        self._channel: grpc.aio.Channel | None = None

    async def finds(self, holder: Held) -> bool:
        """Whether the holder is there, be it that it still loads what it is to lead. Where it had our own address,
        which we listen on now, it is not."""
        address = holder.address
        if is_wildcard(address):
            return True  # says nothing about who it is
        if address == self._own_address:
            return False
        if self._channel is None or address != self._address:
            await self.close()
            self._address, self._channel = address, self._dial(address)
        stub = session_pb2_grpc.SchedulerServiceStub(self._channel)
        try:
            status = await stub.GetStatus(session_pb2.GetStatusRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            # A frozen leader does not answer either, but its lease says how long to wait for it. So it does for one
            # whose name only others know.
            if error.code() is not grpc.StatusCode.UNAVAILABLE or not await is_known(address):
                return True
            # Somebody is there whose certificate, or ours, the other does not take.
            return "handshake" in (error.details() or "").lower()
        return bool(status.owner == holder.owner)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close(None)
        self._channel = None


async def load(store: Store) -> StoredState:
    """The committed state, as soon as the store answers. Raises StoreRefused."""
    patience = _Patience()
    while True:
        try:
            return await store.load()
        except StoreUnavailable as error:
            await patience.wait(error)


def adopt(engine: Engine, state: StoredState, leadership: Leadership) -> None:
    """Requests that have not ended queue again, with the outputs that were committed."""
    engine.restore_adapters(state.adapters)
    engine.cell.skip_rids(max(leadership.next_rid, state.next_rid))
    for stored in sorted(state.requests.values(), key=lambda stored: stored.rid):
        _adopt(engine, stored)


def _adopt(engine: Engine, stored: StoredRequest) -> None:
    request = request_from_store(stored, engine.clock())
    engine.adopt(request, {choice: tokens.size for choice, tokens in stored.tokens.items()})


class Archive:
    """The requests that ended under earlier leaders. They cost a take-over nothing: one is read from the store when
    somebody asks for it by name, until the last one's retention is over."""

    def __init__(self, engine: Engine, store: Store, retained_s: float) -> None:
        self._engine = engine
        self._store = store
        self._until = engine.clock() + retained_s

    def may_know(self, name: Name) -> bool:
        """Whether ``recall`` must be asked before anything is said of this name."""
        return self._engine.clock() < self._until and self._engine.cell.find(*name) is None

    async def recall(self, names: Sequence[Name]) -> None:
        """Has the cell know those of the requests that there are. Raises StoreUnavailable."""
        for stored in await self._store.find(names):
            submit = session_pb2.Submit.FromString(stored.record)
            if self._engine.cell.find(submit.tenant, submit.request_id) is None:
                _adopt(self._engine, stored)


def request_from_store(stored: StoredRequest, now: float) -> Request:
    pb = session_pb2.Submit.FromString(stored.record)
    request = Request(stored.rid, submission_from_pb(pb), now)
    for sequence in request.sequences:
        tokens = stored.tokens.get(sequence.choice)
        if tokens is not None:
            sequence.output = array("i", tokens.tobytes())
        sequence.logprobs = bytearray(stored.logprobs.get(sequence.choice, b""))
        sequence.num_prompt_logprobs = num_prompt_logprobs(sequence.logprobs)
        finish = stored.finishes.get(sequence.choice)
        if finish is not None:
            sequence.finish = finish_from_pb(session_pb2.Finished.FromString(finish))
            sequence.state = State.FINISHED
            request.num_unfinished -= 1
            request.num_uncommitted -= 1
    return request
