"""A gateway's session: what is to be sent, merged into one message per flush, and a bound on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc.aio
import numpy as np
import numpy.typing as npt

from kvern.errors import KvernError
from kvern.v1 import error_pb2, session_pb2
from kvern_scheduler.core.requests import Sequence

HEARTBEAT_S = 0.25
SILENT_BEATS = 5
"""Counted, not timed: a pause of our own process says nothing about the gateway."""
MAX_BUFFERED = 256 * 1024
"""Tokens, log-probabilities and other events, 12 to some tens of bytes each."""

U32 = npt.NDArray[np.uint32]


class Session:
    """The events of one gateway's handles. Appending never waits: a gateway that does not read fills the buffer, and
    is then dropped; its requests go on, and can be attached to again."""

    def __init__(
        self,
        number: int,
        context: grpc.aio.ServicerContext[Any, Any],
        catch_up: Callable[[Session], bool] = lambda _: False,
        room: Callable[[], int] | None = None,
    ) -> None:
        """``catch_up`` is asked before each message: it may add to it, and says whether there is more to add.
        ``room`` is what the queue takes, told with each message."""
        self.number = number
        self._catch_up = catch_up
        self.gateway_id = ""
        self.sequences: dict[int, Sequence] = {}
        self.overflowed = False
        self._replaced = False
        self.heard = True
        self._context = context
        self._room = room
        self._wake = asyncio.Event()
        self._message = session_pb2.SessionResponse()
        self._dirty = False
        self._handles: list[U32] = []
        self._indexes: list[U32] = []
        self._token_ids: list[npt.NDArray[np.int32]] = []
        self._num_buffered = 0
        self._last_sent = 0.0

    def welcome(self, welcome: session_pb2.Welcome) -> None:
        self._message.welcome.CopyFrom(welcome)
        self._touch()

    def adapters(self, adapters: session_pb2.AdapterList) -> None:
        self._message.adapters.CopyFrom(adapters)
        self._touch()

    def admitted(self, admitted: session_pb2.Admitted) -> None:
        self._message.admitted.append(admitted)
        self._touch()

    def refused(self, refused: session_pb2.Refused) -> None:
        self._message.refused.append(refused)
        self._touch()

    def logprobs(self, logprobs: session_pb2.ChoiceLogprobs) -> int:
        """Returns how many entries there are."""
        self._message.logprobs.append(logprobs)
        size = sum(1 + len(token.top_token_ids) for token in logprobs.tokens)
        self._touch(size)
        return size

    def wake(self) -> None:
        """There is something to catch up with."""
        self._wake.set()

    def finished(self, finished: session_pb2.Finished) -> None:
        """The handle's last word."""
        self._message.finished.append(finished)
        self.sequences.pop(finished.handle, None)
        self._touch(1 + len(finished.embedding) // 64)

    def tokens(self, handles: U32, indexes: U32, token_ids: npt.NDArray[np.int32]) -> None:
        """Parallel arrays; consecutive for each handle."""
        self._handles.append(handles)
        self._indexes.append(indexes)
        self._token_ids.append(token_ids)
        self._touch(token_ids.size)

    def _touch(self, size: int = 1) -> None:
        self._num_buffered += size
        if self._num_buffered > MAX_BUFFERED:
            self.overflowed = True
            self._message = session_pb2.SessionResponse()
            self._handles, self._indexes, self._token_ids = [], [], []
        if not self._dirty:
            self._dirty = True
            self._wake.set()

    def _take(self) -> session_pb2.SessionResponse:
        message, self._message = self._message, session_pb2.SessionResponse()
        self._dirty = False
        self._num_buffered = 0
        if self._room is not None:
            message.room = self._room()
        if self._handles:
            message.token_handles = _join(self._handles)
            message.token_indexes = _join(self._indexes)
            message.token_ids = _join(self._token_ids)
            self._handles, self._indexes, self._token_ids = [], [], []
        return message

    async def send(self) -> None:
        """Writes what there is, whenever there is something. Raises KvernError when too much was not read."""
        write = self._context.write
        more = False
        while True:
            if not more:
                await self._wake.wait()
            self._wake.clear()
            self.check()
            more = self._catch_up(self)
            self._last_sent = time.monotonic()
            await write(self._take())

    async def watch(self) -> None:
        """Heartbeats. Raises KvernError when the gateway has been silent, or has not read, for too long."""
        silent = 0
        while silent < SILENT_BEATS:
            self.check()
            if time.monotonic() - self._last_sent > HEARTBEAT_S * 0.9:
                self._wake.set()
            await asyncio.sleep(HEARTBEAT_S)
            silent = 0 if self.heard else silent + 1
            self.heard = False
        raise KvernError(
            error_pb2.ERROR_CODE_UNAVAILABLE,
            f"the gateway was silent for {SILENT_BEATS * HEARTBEAT_S} s; an empty message is a heartbeat",
        )

    def replace(self) -> None:
        """The gateway has opened another session: what still arrives on this one is of the past."""
        self._replaced = True
        self._wake.set()

    def check(self) -> None:
        """Raises KvernError when it was replaced, or when something was thrown away: nothing more may be sent then."""
        if self._replaced:
            raise KvernError(error_pb2.ERROR_CODE_UNAVAILABLE, "the gateway has a newer session")
        if self.overflowed:
            raise KvernError(
                error_pb2.ERROR_CODE_UNAVAILABLE,
                "the session was not read: its buffer is full",
                limit=MAX_BUFFERED,
            )


def _join(arrays: list[Any]) -> bytes:
    array: npt.NDArray[Any] = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return array.tobytes()
