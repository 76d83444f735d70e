"""The gateway's one multiplexed session with the scheduler.

Requests of every surface share the stream. A message's tokens are sorted to their choices in one pass, then each
choice that got something is flushed to its sink, synchronously: a sink never blocks (a slow client makes tokens wait
in ``Choice.tokens``, which ``Limits.max_unread_bytes`` bounds).

::

    connecting ──welcome──▶ serving ──stream broke, silence, or a gap──▶ connecting (open requests re-attach)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
import uuid
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import grpc.aio

from kvern.errors import KvernError
from kvern.rpc.channel import create_channel
from kvern.rpc.errors import error_from_rpc
from kvern.rpc.packing import unpack_i32, unpack_u32
from kvern.v1 import error_pb2, sampling_pb2, session_pb2, session_pb2_grpc
from kvern_gateway.generation import Choice, Generation, unavailable
from kvern_gateway.outgoing import Outgoing
from kvern_gateway.room import Room

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
SILENCE_S = 1.25
_WATCH_S = 0.05
PROBE_TIMEOUT_S = 0.5
# Open requests wait this long for a scheduler to come back before they end with UNAVAILABLE.
PATIENCE_S = 10.0
# New requests are refused at once when it has been away for longer than this.
ADMIT_PATIENCE_S = 1.0
BACKOFF_S = (0.02, 0.3)
MAX_CHOICES = 128
_MAX_HANDLE = 2**32 - 1


class SessionLost(Exception):
    """The session has to be opened anew."""


class SchedulerClient:
    """Holds the session; ``run()`` keeps it up until cancelled.

    ``addresses`` are the leader's and its standbys'.
    """

    def __init__(self, addresses: Sequence[str], gateway_id: str = "") -> None:
        self.gateway_id = gateway_id or uuid.uuid4().hex
        self.welcome: session_pb2.Welcome | None = None
        self.connected = asyncio.Event()
        self._addresses = list(addresses)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._generations: dict[int, Generation] = {}
        self._choices: dict[int, Choice] = {}
        self._next_handle = 1
        self._outgoing = Outgoing()
        self.room = Room()
        self._lost_at: float | None = None
        self._leaving = False
        self._heard_at = 0.0

    @property
    def num_open(self) -> int:
        return len(self._generations)

    def submit(self, submit: session_pb2.Submit) -> Generation:
        """Queues the request (its ``handle`` is set here); await ``generation.admitted`` for the answer.

        Raises:
            KvernError: UNAVAILABLE, when no scheduler is there.
        """
        self._check_connected()
        submit.handle = self._allocate(submit.n)
        submit.asked_unix_ms = _now_ms()
        generation = Generation(submit, self)
        self._generations[submit.handle] = generation
        self._choices.update((choice.handle, choice) for choice in generation.choices)
        self._outgoing.submit(submit)
        self.room.sent(submit.handle, submit.n)
        return generation

    def attach(self, request_id: str, tenant: str = "") -> Generation:
        """Asks for the events of a request that was submitted before, here or elsewhere, from its first token on.

        Its choices are known once it is admitted; what the first gateway left is then in
        ``generation.submit.gateway_context``.

        Raises:
            KvernError: UNAVAILABLE, when no scheduler is there.
        """
        self._check_connected()
        first = self._allocate(MAX_CHOICES)
        submit = session_pb2.Submit(
            handle=first, request_id=request_id, tenant=tenant, resumable=True, asked_unix_ms=_now_ms()
        )
        generation = Generation(submit, self, attached=True)
        self._generations[first] = generation
        self._outgoing.attach(
            session_pb2.Attach(
                handle=first, request_id=request_id, tenant=tenant, asked_unix_ms=submit.asked_unix_ms
            )
        )
        return generation

    def forget(self, generation: Generation) -> None:
        """Nobody waits for this answer any more."""
        self._generations.pop(generation.submit.handle, None)

    def _check_connected(self) -> None:
        if not self.connected.is_set():
            away = None if self._lost_at is None else time.monotonic() - self._lost_at
            if away is None or away > ADMIT_PATIENCE_S:
                raise unavailable("no scheduler is connected; try again shortly")

    def _allocate(self, n: int) -> int:
        first = self._next_handle
        if first + n > _MAX_HANDLE:
            first = 1
        while any(handle in self._choices for handle in range(first, first + n)):
            first += n
        self._next_handle = first + n
        return first

    def cancel_choices(self, choices: Sequence[Choice], *, stopped: bool) -> None:
        for choice in choices:
            if choice.done:
                continue
            choice.done = True
            choice.stopped = stopped
            self._choices.pop(choice.handle, None)
            if not self._leaving:
                self._outgoing.cancel([choice.handle], stopped=stopped)
            self._forget_if_done(choice.generation)

    def cancel_request(self, request_id: str) -> bool:
        """False when no request of that id is open here."""
        found = [g for g in self._generations.values() if g.submit.request_id == request_id]
        for generation in found:
            for choice in generation.choices:
                self._end_here(choice)
        return bool(found)

    def _end_here(self, choice: Choice) -> None:
        """Aborts a choice and tells its sink, whoever else asked for the cancel."""
        if choice.done:
            return
        self.cancel_choices([choice], stopped=False)
        choice.finished = session_pb2.Finished(
            handle=choice.handle,
            reason=sampling_pb2.FINISH_REASON_ABORT,
            num_output_tokens=choice.next_index,
        )
        if choice.generation.sink is not None:
            choice.generation.sink.flush(choice)

    def _forget_if_done(self, generation: Generation) -> None:
        if not generation.open:
            self._generations.pop(generation.submit.handle, None)
            self.room.answered(generation.submit.handle)

    def _fail(self, generation: Generation, error: KvernError) -> None:
        generation.fail(error)
        for choice in generation.choices:
            choice.done = True
            self._choices.pop(choice.handle, None)
        self._generations.pop(generation.submit.handle, None)
        self.room.answered(generation.submit.handle)

    # The session.

    async def run(self) -> None:
        failures = 0
        try:
            while True:
                low, high = BACKOFF_S
                pause = min(high, low * 2 ** min(failures, 8))
                address = ""
                try:
                    address = await self._find_leader(pause)
                    await self._session(address)
                except Exception as error:
                    reason = str(error)
                    if isinstance(error, grpc.aio.AioRpcError):
                        reason = error_from_rpc(error).message
                    elif not isinstance(error, SessionLost):
                        log.exception("the session with %s broke on a message", address)
                    was_up = self._session_ended()
                    failures = 1 if was_up else failures + 1
                    if was_up or failures in (1, 10):
                        log.warning("scheduler %s: %s; %d open requests wait", address, reason, self.num_open)
                self._expire()
                await asyncio.sleep(random.uniform(0.5, 1.0) * pause)
        finally:
            self._session_ended()
            for channel in self._channels.values():
                await channel.close(None)

    def _session_ended(self) -> bool:
        was_up = self.connected.is_set()
        self.connected.clear()
        self.room.told(None)
        if was_up:
            self._lost_at = time.monotonic()
        return was_up

    def _expire(self) -> None:
        if self._lost_at is not None and time.monotonic() - self._lost_at > PATIENCE_S:
            self._fail_all(unavailable("the scheduler went away and did not come back in time"))

    def leave(self, error: KvernError) -> None:
        """Ends every open request here, and cancels none: a named one can be gone on with at another gateway."""
        self._leaving = True
        self._fail_all(error)

    def _fail_all(self, error: KvernError) -> None:
        for generation in list(self._generations.values()):
            self._fail(generation, error)

    async def _find_leader(self, pause_s: float) -> str:
        """The address whose scheduler says first that it leads. Each is asked again and again by itself, so that a
        frozen one holds up nobody. Raises SessionLost when none does for a while."""
        if len(self._addresses) == 1:
            return self._addresses[0]
        asking = [asyncio.create_task(self._until_leading(address, pause_s)) for address in self._addresses]
        try:
            done, _ = await asyncio.wait(asking, timeout=SILENCE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in asking:
                task.cancel()
        if not done:
            raise SessionLost("no scheduler leads")
        return done.pop().result()

    async def _until_leading(self, address: str, pause_s: float) -> str:
        request = session_pb2.GetStatusRequest()
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                if (await self._stub(address).GetStatus(request, timeout=PROBE_TIMEOUT_S)).leader:
                    return address
            await asyncio.sleep(random.uniform(0.5, 1.0) * pause_s)

    def _stub(self, address: str) -> Any:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = create_channel(address)
        return cast(Any, session_pb2_grpc.SchedulerServiceStub(channel))

    async def _session(self, address: str) -> None:
        call: Any = self._stub(address).Session()
        tasks: list[asyncio.Task[None]] = []
        self._heard_at = time.monotonic()
        try:
            tasks.append(asyncio.create_task(self._watch(call)))
            await call.write(session_pb2.SessionRequest(hello=session_pb2.Hello(gateway_id=self.gateway_id)))
            tasks.append(asyncio.create_task(self._write_loop(call)))
            while True:
                response = await call.read()
                if not isinstance(response, session_pb2.SessionResponse):  # EOF
                    await _raise_status(call)
                self._heard_at = time.monotonic()
                # It comes when the scheduler knows its model; until then there are heartbeats.
                if response.HasField("welcome"):
                    self._welcomed(address, response.welcome)
                self._dispatch(response)
        except asyncio.CancelledError:
            if not call.cancelled() or (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise SessionLost("silent for too long") from None
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()

    def _welcomed(self, address: str, welcome: session_pb2.Welcome) -> None:
        self.welcome = welcome
        self._lost_at = None
        self._resume()
        self.connected.set()
        self._outgoing.wake.set()
        log.info(
            "session with %s: cell %s, epoch %d, model %s",
            address,
            welcome.cell,
            welcome.epoch,
            welcome.model.name,
        )

    def _resume(self) -> None:
        """Says everything that is open anew on a new session. Choices that a stop string ended are cancelled again."""
        self._outgoing.clear()
        for handle, generation in list(self._generations.items()):
            if generation.orphaned:
                # Its client may be at another gateway by now; if not, the scheduler's own grace ends it.
                self._fail(generation, unavailable("nobody listened when the session broke"))
                continue
            if not generation.admitted.done() and not generation.attached:
                self._outgoing.submit(generation.submit)
                continue
            self._outgoing.attach(
                session_pb2.Attach(
                    handle=handle,
                    request_id=generation.submit.request_id,
                    tenant=generation.submit.tenant,
                    next_index=[choice.next_index for choice in generation.choices],
                    claim=generation.claim,
                    asked_unix_ms=generation.submit.asked_unix_ms,
                )
            )
            for choice in generation.choices:
                if choice.done and choice.finished is None:
                    self._outgoing.cancel([choice.handle], stopped=choice.stopped)

    async def _write_loop(self, call: Any) -> None:
        try:
            while True:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self._outgoing.wake.wait()
                except TimeoutError:
                    pass
                self._outgoing.wake.clear()
                # Before the welcome there are heartbeats only: what waits is said anew then.
                await call.write(
                    self._outgoing.take() if self.connected.is_set() else session_pb2.SessionRequest()
                )
                while self.connected.is_set() and self._outgoing.waiting:
                    await call.write(self._outgoing.take())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            call.cancel()  # The reader sees the status.

    async def _watch(self, call: Any) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_S)
            now = time.monotonic()
            # When this loop itself was late, the silence may be ours.
            if now - self._heard_at > SILENCE_S and now - last < HEARTBEAT_S:
                log.warning("the scheduler has been silent for %.2f s; reconnecting", now - self._heard_at)
                call.cancel()
                return
            last = now

    # The hot path.

    def _dispatch(self, response: session_pb2.SessionResponse) -> None:
        """Sorts a message's events to their choices, then flushes each choice that got something, once."""
        self.room.told(response.room if response.HasField("room") else None)
        for admitted in response.admitted:
            self._admitted(admitted)
        for refused in response.refused:
            self._refused(refused)
        dirty: list[Choice] = []
        if response.token_handles:
            self._sort_tokens(response, dirty)
        for entry in response.logprobs:
            choice = self._choices.get(entry.handle)
            if choice is not None:
                target = choice.prompt_logprobs if entry.prompt else choice.logprobs
                target.update(enumerate(entry.tokens, entry.first_index))
        for finished in response.finished:
            choice = self._choices.pop(finished.handle, None)
            if choice is not None:
                choice.finished = finished
                choice.done = True
                self._forget_if_done(choice.generation)
                if not choice.dirty:
                    dirty.append(choice)
        for choice in dirty:
            choice.dirty = False
            self._flush(choice)

    def _sort_tokens(self, response: session_pb2.SessionResponse, dirty: list[Choice]) -> None:
        choices = self._choices
        for handle, index, token in zip(
            unpack_u32(response.token_handles).tolist(),
            unpack_u32(response.token_indexes).tolist(),
            unpack_i32(response.token_ids).tolist(),
            strict=True,
        ):
            choice = choices.get(handle)
            if choice is None:
                continue
            if index != choice.next_index:
                if index < choice.next_index:
                    continue
                raise SessionLost(f"a gap: token {index} came where {choice.next_index} was due")
            choice.next_index = index + 1
            choice.tokens.append(token)
            if not choice.dirty:
                choice.dirty = True
                dirty.append(choice)

    def _flush(self, choice: Choice) -> None:
        sink = choice.generation.sink
        if sink is None:
            return
        try:
            sink.flush(choice)
        except Exception:
            log.exception("a request's output could not be processed")
            self._break(choice.generation)

    def _admitted(self, admitted: session_pb2.Admitted) -> None:
        generation = self._generations.get(admitted.handle)
        if generation is None:
            return
        self.room.answered(admitted.handle)
        generation.claim = admitted.claim
        if not generation.admitted.done():
            if generation.attached:
                generation.adopt(admitted)
                self._choices.update((choice.handle, choice) for choice in generation.choices)
            generation.admitted.set_result(None)
            if generation.submit.resumable:
                self._supersede(generation)

    def _supersede(self, newest: Generation) -> None:
        """The scheduler sends a request's events to whoever asked last; the call before gets no more of them."""
        for generation in list(self._generations.values()):
            same_id = generation.submit.request_id == newest.submit.request_id
            if same_id and generation is not newest and generation.admitted.done():
                message = "another call with the same request id has taken this one over"
                self._fail(
                    generation, KvernError(error_pb2.ERROR_CODE_CANCELLED, message, field="request_id")
                )

    def _break(self, generation: Generation) -> None:
        open_choices = [choice for choice in generation.choices if not choice.done]
        self._outgoing.cancel(choice.handle for choice in open_choices)
        error = KvernError(error_pb2.ERROR_CODE_INTERNAL, "internal error; the gateway's log has the stack")
        sink, generation.sink = generation.sink, None
        self._fail(generation, error)
        if sink is not None:
            sink.fail(error)

    def _refused(self, refused: session_pb2.Refused) -> None:
        generation = self._generations.get(refused.handle)
        if generation is None:
            return
        error = KvernError.from_pb(refused.error)
        # Another gateway has it now: what it sends its client must not be taken from it.
        taken_over = error.code == error_pb2.ERROR_CODE_CANCELLED
        if generation.admitted.done() and not taken_over:
            # An attach after a lost session. Nothing was said to the client yet: starting over is not noticed.
            fresh = all(choice.next_index == 0 and not choice.done for choice in generation.choices)
            if fresh and not generation.attached:
                self._outgoing.submit(generation.submit)
                return
            error = unavailable(
                f"the request was lost with its scheduler: {error.message}; send it again", 100
            )
        self._fail(generation, error)


def _now_ms() -> int:
    return int(time.time() * 1000)


async def _raise_status(call: Any) -> NoReturn:
    """The stream ended: its status as an exception."""
    code = await call.code()
    if code != grpc.StatusCode.OK:
        trailers = await call.trailing_metadata()
        raise grpc.aio.AioRpcError(code, await call.initial_metadata(), trailers, await call.details(), None)
    raise SessionLost("the scheduler closed the session")
