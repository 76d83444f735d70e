"""uvicorn's HTTP protocol with two things more: synchronous writes, and callbacks on loss and writability.

A token event then costs no task switch and no ASGI message: the session's dispatcher formats it and writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

SCOPE_KEY = "kvern.connection"


class Connection(HttpToolsProtocol):
    """A client's connection. ``on_lost`` and ``on_writable`` belong to the request being answered."""

    on_lost: Callable[[], object] | None = None
    on_writable: Callable[[], object] | None = None

    @property
    def writable(self) -> bool:
        """False while the client reads slower than we write (64 KiB wait in the transport)."""
        return not self.flow.write_paused

    def write_chunk(self, data: bytes) -> None:
        """Adds to the body of a chunked response that has been started."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cast(dict[str, Any], cycle.scope)[SCOPE_KEY] = self
        super()._start_asgi_task(cycle, app)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.on_writable is not None:
            self.on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()
