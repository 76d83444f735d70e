"""A submitted request and its choices: what has arrived, and where it goes."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import Protocol

from kvern.errors import KvernError
from kvern.v1 import error_pb2, sampling_pb2, session_pb2

# One token's log-probabilities with a few alternatives, as they are held.
_LOGPROBS_BYTES = 500
# A request whose client named it goes on this long without anyone listening.
ORPHAN_GRACE_S = 30.0


def unavailable(message: str, retry_after_ms: int = 1_000) -> KvernError:
    return KvernError(error_pb2.ERROR_CODE_UNAVAILABLE, message, retry_after_ms=retry_after_ms)


class Canceller(Protocol):
    """The session, as far as a request needs it."""

    def cancel_choices(self, choices: Sequence[Choice], *, stopped: bool) -> None: ...

    def forget(self, generation: Generation) -> None: ...


class Sink(Protocol):
    """Where a choice's events go. Methods return at once and raise nothing on a slow or lost client."""

    def flush(self, choice: Choice) -> None:
        """New entries in ``choice.tokens``, or ``choice.finished`` was set."""
        ...

    def fail(self, error: KvernError) -> None:
        """The whole request ended; no flush follows."""
        ...


class Choice:
    """What has arrived for one choice and was not taken by the sink yet."""

    __slots__ = (
        "dirty",
        "done",
        "finished",
        "first_index",
        "generation",
        "handle",
        "index",
        "logprobs",
        "next_index",
        "prompt_logprobs",
        "stopped",
        "tokens",
    )

    def __init__(self, generation: Generation, index: int, handle: int) -> None:
        self.generation = generation
        self.index = index
        self.handle = handle
        # Index of tokens[0], and of the next token to come, in the choice's output.
        self.first_index = 0
        self.next_index = 0
        self.tokens = array("i")
        self.logprobs: dict[int, sampling_pb2.TokenLogprobs] = {}
        self.prompt_logprobs: dict[int, sampling_pb2.TokenLogprobs] = {}
        self.finished: session_pb2.Finished | None = None
        self.dirty = False
        self.stopped = False
        # No more events will come.
        self.done = False

    @property
    def waiting_bytes(self) -> int:
        """About what is held for a sink that does not take it."""
        return 4 * len(self.tokens) + _LOGPROBS_BYTES * len(self.logprobs)

    def take(self, limit: int = 2**31) -> tuple[int, array[int]]:
        """Index of the first token not taken so far, and up to ``limit`` tokens from there."""
        first, tokens = self.first_index, self.tokens
        if len(tokens) > limit:
            tokens, self.tokens = tokens[:limit], tokens[limit:]
        else:
            self.tokens = array("i")
        self.first_index = first + len(tokens)
        return first, tokens


class Generation:
    """A submitted request: n choices under consecutive handles.

    ``attached``: it was submitted before, and ``submit`` holds only its id until it is admitted.
    """

    def __init__(self, submit: session_pb2.Submit, client: Canceller, attached: bool = False) -> None:
        self.submit = submit
        self.attached = attached
        # What the scheduler numbered this call: one with a higher number takes the request over.
        self.claim = 0
        self.choices = self._create_choices()
        self.sink: Sink | None = None
        self.error: KvernError | None = None
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._client = client

    def _create_choices(self) -> list[Choice]:
        return [Choice(self, index, self.submit.handle + index) for index in range(self.submit.n)]

    def adopt(self, admitted: session_pb2.Admitted) -> None:
        """The request that was attached to becomes known."""
        self.submit.prompt_token_ids = admitted.prompt_token_ids
        self.submit.params.CopyFrom(admitted.params)
        self.submit.gateway_context = admitted.gateway_context
        self.submit.n = admitted.n
        self.choices = self._create_choices()

    @property
    def open(self) -> bool:
        if self.attached and not self.admitted.done():
            return self.error is None
        return self.error is None and not all(choice.done for choice in self.choices)

    def attach_sink(self, sink: Sink) -> None:
        """Starts the flow: what came before is flushed now."""
        self.sink = sink
        if self.error is not None:
            sink.fail(self.error)
            return
        for choice in self.choices:
            if choice.tokens or choice.finished is not None:
                sink.flush(choice)

    def stop(self, choice: Choice) -> None:
        """A stop string ended the choice; it counts as finished."""
        self._client.cancel_choices([choice], stopped=True)

    def abandon(self, grace_s: float) -> None:
        """Its client is gone, or does not read: one that is named goes on for a while, any other ends."""
        if not self.open:
            return
        if self.submit.resumable and self.admitted.done():
            self.orphan(grace_s)
        else:
            self.cancel()

    def drop(self) -> None:
        """Forgets what waits for the sink."""
        for choice in self.choices:
            choice.take()
            choice.logprobs.clear()

    def cancel(self) -> None:
        """Idempotent. Nothing is said to the sink any more."""
        self.sink = None
        if self.attached and not self.admitted.done():
            self._client.forget(self)
        self._client.cancel_choices([choice for choice in self.choices if not choice.done], stopped=False)

    def orphan(self, grace_s: float) -> None:
        """Nobody listens any more: events are dropped, and after a while the request is cancelled."""
        self.sink = _Nowhere()
        self.drop()
        asyncio.get_running_loop().call_later(grace_s, self.cancel)

    @property
    def orphaned(self) -> bool:
        return isinstance(self.sink, _Nowhere)

    def fail(self, error: KvernError) -> None:
        if self.error is not None or not self.open:
            return
        self.error = error
        if not self.admitted.done():
            self.admitted.set_exception(error)
            self.admitted.exception()  # Retrieved: a request that was cancelled meanwhile awaits it no more.
        if self.sink is not None:
            self.sink.fail(error)


class _Nowhere:
    def flush(self, choice: Choice) -> None:
        choice.take()
        choice.logprobs.clear()

    def fail(self, error: KvernError) -> None:
        pass
