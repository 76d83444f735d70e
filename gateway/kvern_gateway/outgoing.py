"""What a session has to tell the scheduler, merged into as few messages as may be."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kvern.v1 import session_pb2

_MAX_MESSAGE_BYTES = 8 * 2**20


class Outgoing:
    """Filled by requests, emptied by the session's writer, which waits for ``wake``."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self._submits: list[session_pb2.Submit] = []
        self._attaches: list[session_pb2.Attach] = []
        self._cancels: list[session_pb2.CancelHandle] = []

    @property
    def waiting(self) -> bool:
        return bool(self._submits or self._attaches or self._cancels)

    def submit(self, submit: session_pb2.Submit) -> None:
        self._submits.append(submit)
        self.wake.set()

    def attach(self, attach: session_pb2.Attach) -> None:
        self._attaches.append(attach)
        self.wake.set()

    def cancel(self, handles: Iterable[int], *, stopped: bool = False) -> None:
        self._cancels.extend(session_pb2.CancelHandle(handle=handle, stopped=stopped) for handle in handles)
        self.wake.set()

    def clear(self) -> None:
        """A new session begins: what was meant for the old one is void."""
        self._submits.clear()
        self._attaches.clear()
        self._cancels.clear()

    def take(self) -> session_pb2.SessionRequest:
        """The next message; empty, a heartbeat, when nothing waits. Cancels follow the submits that they are about,
        since the scheduler reads a message's cancels first."""
        request = session_pb2.SessionRequest()
        if not (self._submits or self._attaches):
            request.cancels.extend(self._cancels)
            self._cancels.clear()
            return request
        request.attaches.extend(self._attaches)
        self._attaches.clear()
        size = taken = 0
        for submit in self._submits:
            size += len(submit.prompt_token_ids) + len(submit.block_hashes)
            size += sum(len(item.pixels) for item in submit.media)
            if taken and size > _MAX_MESSAGE_BYTES:
                break
            request.submits.append(submit)
            taken += 1
        del self._submits[:taken]
        return request
