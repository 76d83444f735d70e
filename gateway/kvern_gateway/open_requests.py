"""The requests that are open on the session, by handle: what the scheduler says of them goes to their sinks.

A message's tokens are sorted to their choices in one pass, then each choice that got something is flushed to its sink,
synchronously: a sink never blocks (a slow client makes tokens wait in ``Choice.tokens``, which
``Limits.max_unread_bytes`` bounds).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from kvern.errors import KvernError
from kvern.rpc.packing import unpack_i32, unpack_u32
from kvern.v1 import error_pb2, sampling_pb2, session_pb2
from kvern_gateway.generation import Choice, Generation, unavailable
from kvern_gateway.outgoing import Outgoing
from kvern_gateway.room import Room

log = logging.getLogger(__name__)

MAX_CHOICES = 128
_MAX_HANDLE = 2**32 - 1


class SessionLost(Exception):
    """The session has to be opened anew."""


class OpenRequests:
    """Knows no stream: what is to be said is in ``outgoing``, what was said comes by :meth:`take`."""

    def __init__(self) -> None:
        self.outgoing = Outgoing()
        self.room = Room()
        self._generations: dict[int, Generation] = {}
        self._choices: dict[int, Choice] = {}
        # Choices that were cancelled, until the scheduler has ended them: a cancel may be lost with its session.
        self._cancelled: dict[int, Choice] = {}
        self._next_handle = 1
        self._leaving = False

    def __len__(self) -> int:
        return len(self._generations)

    def submit(self, submit: session_pb2.Submit) -> Generation:
        """Queues the request (its ``handle`` is set here); await ``generation.admitted`` for the answer."""
        submit.handle = self._allocate(submit.n)
        submit.asked_unix_ms = _now_ms()
        generation = Generation(submit, self)
        self._generations[submit.handle] = generation
        self._choices.update((choice.handle, choice) for choice in generation.choices)
        self.outgoing.submit(submit)
        self.room.sent(submit.handle, submit.n)
        return generation

    def attach(self, request_id: str, tenant: str = "") -> Generation:
        """Asks for the events of a request that was submitted before, here or elsewhere, from its first token on.

        Its choices are known once it is admitted; what the first gateway left is then in
        ``generation.submit.gateway_context``.
        """
        first = self._allocate(MAX_CHOICES)
        submit = session_pb2.Submit(
            handle=first, request_id=request_id, tenant=tenant, resumable=True, asked_unix_ms=_now_ms()
        )
        generation = Generation(submit, self, attached=True)
        self._generations[first] = generation
        self.outgoing.attach(
            session_pb2.Attach(
                handle=first, request_id=request_id, tenant=tenant, asked_unix_ms=submit.asked_unix_ms
            )
        )
        return generation

    def forget(self, generation: Generation) -> None:
        """Nobody waits for this answer any more."""
        self._generations.pop(generation.submit.handle, None)

    def _allocate(self, n: int) -> int:
        first = self._next_handle
        if first + n > _MAX_HANDLE:
            first = 1
        while any(handle in self._choices or handle in self._cancelled for handle in range(first, first + n)):
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
            self._say_cancel(choice)
            self._forget_if_done(choice.generation)

    def _say_cancel(self, choice: Choice) -> None:
        if not self._leaving:
            self._cancelled[choice.handle] = choice
            self.outgoing.cancel([choice.handle], stopped=choice.stopped)

    def cancel_request(self, request_id: str, tenant: str = "") -> bool:
        """False when the tenant has no request of that id open here."""
        name = tenant, request_id
        found = [g for g in self._generations.values() if (g.submit.tenant, g.submit.request_id) == name]
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

    def fail_all(self, error: KvernError) -> None:
        self._cancelled.clear()
        for generation in list(self._generations.values()):
            self._fail(generation, error)

    def leave(self, error: KvernError) -> None:
        """Ends every open request here, and cancels none: a named one can be gone on with at another gateway."""
        self._leaving = True
        self.fail_all(error)

    def resume(self) -> None:
        """Says everything that is open anew on a new session, and cancels again what was cancelled: whether the
        scheduler has read it is not known."""
        self.outgoing.clear()
        for generation in {choice.generation for choice in self._cancelled.values()}:
            if generation.submit.handle not in self._generations:
                self._attach(generation)
        for generation in list(self._generations.values()):
            if generation.orphaned:
                # Its client may be at another gateway by now; if not, the scheduler's own grace ends it.
                self._fail(generation, unavailable("nobody listened when the session broke"))
                continue
            if not generation.admitted.done() and not generation.attached:
                self.outgoing.submit(generation.submit)
                continue
            self._attach(generation)
        for handle, choice in self._cancelled.items():
            self.outgoing.cancel([handle], stopped=choice.stopped)

    def _attach(self, generation: Generation) -> None:
        self.outgoing.attach(
            session_pb2.Attach(
                handle=generation.submit.handle,
                request_id=generation.submit.request_id,
                tenant=generation.submit.tenant,
                next_index=[choice.next_index for choice in generation.choices],
                claim=generation.claim,
                asked_unix_ms=generation.submit.asked_unix_ms,
            )
        )

    # The hot path.

    def take(self, response: session_pb2.SessionResponse) -> None:
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
            if choice is None:
                self._cancelled.pop(finished.handle, None)
            else:
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

        def same_id(generation: Generation) -> bool:
            named = generation.submit.tenant, generation.submit.request_id
            return generation is not newest and named == (newest.submit.tenant, newest.submit.request_id)

        self._drop_cancelled(same_id)
        for generation in list(self._generations.values()):
            if same_id(generation) and generation.admitted.done():
                message = "another call with the same request id has taken this one over"
                self._fail(
                    generation, KvernError(error_pb2.ERROR_CODE_CANCELLED, message, field="request_id")
                )

    def _break(self, generation: Generation) -> None:
        for choice in generation.choices:
            if not choice.done:
                self._say_cancel(choice)
        error = KvernError(error_pb2.ERROR_CODE_INTERNAL, "internal error; the gateway's log has the stack")
        sink, generation.sink = generation.sink, None
        self._fail(generation, error)
        if sink is not None:
            sink.fail(error)

    def _refused(self, refused: session_pb2.Refused) -> None:
        self._drop_cancelled(lambda generation: generation.submit.handle == refused.handle)
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
                self.outgoing.submit(generation.submit)
                return
            error = unavailable(
                f"the request was lost with its scheduler: {error.message}; send it again", 100
            )
        self._fail(generation, error)

    def _drop_cancelled(self, concerns: Callable[[Generation], bool]) -> None:
        """There is nothing left to cancel under those handles."""
        for handle, choice in list(self._cancelled.items()):
            if concerns(choice.generation):
                del self._cancelled[handle]


def _now_ms() -> int:
    return int(time.time() * 1000)
