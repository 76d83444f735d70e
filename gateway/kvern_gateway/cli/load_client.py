"""A light HTTP/1.1 client that times server-sent events, for load on the machine that also serves.

Costs a few microseconds of CPU per event: bytes are scanned for event ends, JSON is parsed only where an event may hold
something besides one more piece of text (the first token, usage, errors, the end).
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, cast
from urllib.parse import urlsplit

# What a read that needs a closer look contains, a comment line included. JSON escapes quotes and line ends, so text can
# imitate none but the first, and that costs time only.
_CLOSER_LOOK = (b"[DONE]", b'"usage":{', b'"usage": {', b'"error"', b"\n:")


@dataclass
class StreamRecord:
    """One request as the client saw it. Times are seconds of ``perf_counter``."""

    prompt_len: int
    start: float = 0.0
    end: float = 0.0
    # Parallel: when a read brought token events, and how many.
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    # From the usage event; 0 where the server sent none.
    num_output_tokens: int = 0
    status: int = 0
    error: str = ""
    # Payloads of all events, where asked.
    payloads: list[bytes] | None = None

    @property
    def success(self) -> bool:
        return not self.error


@dataclass(frozen=True)
class Target:
    """Where requests go. Made of a URL such as ``http://127.0.0.1:8000``."""

    host: str
    port: int
    path_prefix: str = ""
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, base_url: str, headers: tuple[tuple[str, str], ...] = ()) -> Target:
        """Raises ValueError for anything but plain http."""
        parts = urlsplit(base_url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{base_url!r} is not a http://HOST[:PORT] URL")
        return cls(parts.hostname, parts.port or 80, parts.path.rstrip("/"), headers)

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        """The bytes of a request with a JSON body."""
        content = json.dumps(body, separators=(",", ":")).encode()
        return self._head("POST", path, f"Content-Length: {len(content)}\r\n") + content

    def get(self, path: str) -> bytes:
        return self._head("GET", path, "")

    def _head(self, method: str, path: str, more: str) -> bytes:
        extra = "".join(f"{name}: {value}\r\n" for name, value in self.headers)
        return (
            f"{method} {self.path_prefix}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nAccept: */*\r\n{more}{extra}\r\n"
        ).encode()


class Connection(asyncio.Protocol):
    """A keep-alive connection that carries one request at a time.

    A response passes through ``_head`` → ``_chunked`` | ``_sized`` | ``_until_close`` → done.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._record: StreamRecord | None = None
        self._rest = b""
        self._event_rest = b""
        self._body = bytearray()
        self._left = 0
        self._close_after = False
        self._separator = b"\n\n"
        self._is_stream = False
        self._step = self._head
        self.usable = True

    async def run(self, request: bytes, record: StreamRecord) -> bytes:
        """Sends ``request`` and fills ``record``; returns the body where it is not an event stream.

        A failure of any kind is told in ``record.error``.
        """
        assert self._transport is not None
        self._record = record
        self._done = asyncio.get_running_loop().create_future()
        self._rest = self._event_rest = b""
        self._body.clear()
        self._step = self._head
        record.start = record.start or perf_counter()
        self._transport.write(request)
        try:
            await self._done
        finally:
            record.end = record.end or perf_counter()
            self._record = self._done = None
        return bytes(self._body)

    def close(self) -> None:
        self.usable = False
        if self._transport:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        if self._record is None or self._done is None:
            return
        if self._step == self._until_close:
            self._finish()
            return
        self._record.error = self._record.error or f"connection lost{f': {error}' if error else ''}"
        self._finish()

    def data_received(self, data: bytes) -> None:
        if self._record is None:
            return
        try:
            self._step(self._rest + data if self._rest else data, perf_counter())
        except ValueError as error:
            self._record.error = f"malformed response: {error}"
            self.usable = False
            self._finish()

    def _head(self, data: bytes, now: float) -> None:
        assert self._record is not None
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._rest = data
            return
        self._rest = b""
        status, *lines = data[:end].decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._record.status = int(status[9:12])
        self._close_after = headers.get("connection", "").lower() == "close"
        content_type = headers.get("content-type", "")
        self._is_stream = self._record.status == 200 and content_type.startswith("text/event-stream")
        if "chunked" in headers.get("transfer-encoding", ""):
            self._step = self._chunked
        elif "content-length" in headers:
            self._left = int(headers["content-length"])
            self._step = self._sized
        else:
            self._close_after = True
            self._step = self._until_close
        self._step(data[end + 4 :], now)

    def _chunked(self, data: bytes, now: float) -> None:
        position = 0
        size = len(data)
        while (line_end := data.find(b"\r\n", position)) >= 0:
            line = data[position:line_end]
            length = int(line if b";" not in line else line.split(b";")[0], 16)
            start = line_end + 2
            end = start + length
            if end + 2 > size:
                break
            if not length:
                self._finish()
                return
            self._take(data[start:end], now)
            position = end + 2
        self._rest = data[position:]

    def _sized(self, data: bytes, now: float) -> None:
        self._rest = b""
        self._left -= len(data)
        self._take(data, now)
        if self._left <= 0:
            self._finish()

    def _until_close(self, data: bytes, now: float) -> None:
        self._rest = b""
        self._take(data, now)

    def _take(self, payload: bytes, now: float) -> None:
        """Body bytes. The first branch is the hot path: whole events with one more piece of text each."""
        record = self._record
        assert record is not None
        if not self._is_stream:
            self._body += payload
            return
        if record.payloads is not None:
            record.payloads.append(payload)
        if (
            record.times
            and not self._event_rest
            and payload.startswith(b"data:")
            and payload.endswith(self._separator)
        ):
            for mark in _CLOSER_LOOK:
                if mark in payload:
                    break
            else:
                record.times.append(now)
                record.counts.append(payload.count(self._separator))
                return
        payload = self._event_rest + payload
        if b"\r\n\r\n" in payload:
            self._separator = b"\r\n\r\n"
        *events, self._event_rest = payload.split(self._separator)
        tokens = sum(self._read_event(event, record) for event in events)
        if tokens:
            record.times.append(now)
            record.counts.append(tokens)

    def _read_event(self, event: bytes, record: StreamRecord) -> bool:
        """Whether the event carries a token's text."""
        content = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
        if not content or content == b"[DONE]":
            return False
        parsed = json.loads(content)
        if error := parsed.get("error"):
            record.error = error.get("message", str(error)) if isinstance(error, dict) else str(error)
            return False
        if usage := parsed.get("usage"):
            record.num_output_tokens = usage.get("completion_tokens", 0)
            record.prompt_len = usage.get("prompt_tokens", record.prompt_len)
        choices = parsed.get("choices")
        if not choices:
            return False
        # A chat stream opens with the role alone, before any token is there.
        delta = choices[0].get("delta")
        return delta is None or not (delta.get("role") and not delta.get("content"))

    def _finish(self) -> None:
        record = self._record
        assert record is not None
        record.end = perf_counter()
        if record.status and record.status != 200 and not record.error:
            record.error = f"HTTP {record.status}: {bytes(self._body[:500]).decode('utf-8', 'replace')}"
        if self._close_after:
            self.close()
        if self._done and not self._done.done():
            self._done.set_result(None)


class Pool:
    """Connections to one target, reused last in first out."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._idle: deque[Connection] = deque()

    async def run(self, request: bytes, record: StreamRecord) -> bytes:
        """As :meth:`Connection.run`, on an idle connection or a new one."""
        record.start = perf_counter()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                break
        else:
            loop = asyncio.get_running_loop()
            try:
                _, connection = await loop.create_connection(Connection, self.target.host, self.target.port)
            except OSError as error:
                record.end = perf_counter()
                record.error = f"cannot connect to {self.target.host}:{self.target.port}: {error}"
                return b""
        body = await connection.run(request, record)
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()
        return body

    async def get_json(self, path: str) -> Any:
        """Raises ConnectionError where there is no 200 with JSON."""
        record = StreamRecord(prompt_len=0)
        body = await self.run(self.target.get(path), record)
        if record.error:
            raise ConnectionError(record.error)
        return json.loads(body)

    async def is_healthy(self) -> bool:
        """Whether GET /health says 200."""
        record = StreamRecord(prompt_len=0)
        await self.run(self.target.get("/health"), record)
        return record.status == 200

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
