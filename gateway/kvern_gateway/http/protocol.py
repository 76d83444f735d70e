"""uvicorn's HTTP protocol with synchronous writes, callbacks on loss and writability, and limits on the head.

A token event then costs no task switch and no ASGI message: the session's dispatcher formats it and writes it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvern.errors import invalid
from kvern_gateway.http.wire import encode_json, error_object

SCOPE_KEY = "kvern.connection"

MAX_HEAD_BYTES = 64 * 1024
# From connecting, or from a later request's first byte, to the end of its headers.
HEAD_TIMEOUT_S = 30.0
# In the kernel, beside what is on its way.
MAX_UNSENT_BYTES = 64 * 1024
# A client that has taken nothing of what it was sent for so long is disconnected.
UNREAD_TIMEOUT_S = 120
_DRAIN_HEAD_S = 1.0
# Linux's; the socket module has no name for it.
_TCP_NOTSENT_LOWAT = 25


class Connection(HttpToolsProtocol):
    """A client's connection. ``on_lost`` and ``on_writable`` belong to the request being answered."""

    on_lost: Callable[[], object] | None = None
    on_writable: Callable[[], object] | None = None
    _in_head = True
    _refused = False
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    @property
    def writable(self) -> bool:
        """False while the client reads slower than we write (64 KiB wait in the transport)."""
        return not self.flow.write_paused

    def write_chunk(self, data: bytes) -> None:
        """Adds to the body of a chunked response that has been started."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # What waits for a slow client waits as tokens, here; as text in the kernel it takes up to 4 MiB.
        connected = transport.get_extra_info("socket")
        connected.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREAD_TIMEOUT_S)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if not self._in_head:
            super().data_received(data)
            return
        room = MAX_HEAD_BYTES - self._head_bytes
        self._head_bytes += len(data)
        super().data_received(data[:room])
        if len(data) <= room or self.transport.is_closing():
            return
        if self._in_head:
            self._refuse_head()
        else:
            super().data_received(data[room:])

    def _refuse_head(self) -> None:
        """Closing with unread bytes resets the connection, and the client may never see why: first it is read on."""
        self._refused = True
        self._stop_head_timer()
        limit = f"at most {MAX_HEAD_BYTES} bytes"
        message = f"the request's line and headers are too long; {limit} are allowed"
        body = encode_json(error_object(invalid("headers", message, limit=limit)))
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_DRAIN_HEAD_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """What the parser does not understand, such as a Content-Length that is no number. It does not say what."""
        message = f"{msg} Its request line, a header or the framing of its body is malformed."
        body = encode_json(error_object(invalid("headers", message, limit="HTTP/1.1")))
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_head_timer()
        self._in_head, self._head_bytes = True, 0
        cast(dict[str, Any], self.scope)[SCOPE_KEY] = self

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_head_timer()
        super().on_headers_complete()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.on_writable is not None:
            self.on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_head_timer()
        if self.on_lost is not None:
            self.on_lost()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_too_slow)

    def _head_too_slow(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
