"""Work on what strangers sent, in processes of their own: one may loop, grow or crash without harm to the gateway.

Requests and answers are bytes, each behind its length (uint32, little endian), on the process's stdin and stdout. The
first request sets it up.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import sys

_START_TIMEOUT_S = 10.0


class ProcessFailed(Exception):
    """The process died over a request, or took too long. It is replaced."""


class ProcessPool:
    """At most ``size`` processes of ``python -m module``, started on demand. ``patience_s``: wall time for a request."""

    def __init__(self, module: str, setup: bytes, size: int, patience_s: float) -> None:
        self._module = module
        self._setup = setup
        self._patience_s = patience_s
        self._idle: asyncio.Queue[_Process] = asyncio.Queue()
        self._slots = asyncio.Semaphore(size)

    async def start(self) -> None:
        """Starts the first process ahead of the first request."""
        self._idle.put_nowait(await _Process.start(self._module, self._setup))

    async def close(self) -> None:
        while not self._idle.empty():
            await self._idle.get_nowait().close()

    async def ask(self, request: bytes) -> bytes:
        """Raises ProcessFailed."""
        async with self._slots:
            process = await self._process()
            try:
                async with asyncio.timeout(self._patience_s):
                    answer = await process.ask(request)
            except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
                await process.close()
                raise ProcessFailed(str(error)) from error
            except BaseException:  # Cancelled half-way: its answer must not reach the next request.
                await process.close()
                raise
            self._idle.put_nowait(process)
            return answer

    async def _process(self) -> _Process:
        while not self._idle.empty():
            process = self._idle.get_nowait()
            if process.alive:
                return process
        return await _Process.start(self._module, self._setup)


class _Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout

    @classmethod
    async def start(cls, module: str, setup: bytes) -> _Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**20,
        )
        started = cls(process)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await started.ask(setup)
        except BaseException:
            await started.close()
            raise
        return started

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, request: bytes) -> bytes:
        self._stdin.write(struct.pack("<I", len(request)) + request)
        await self._stdin.drain()
        (length,) = struct.unpack("<I", await self._stdout.readexactly(4))
        return await self._stdout.readexactly(length)

    async def close(self) -> None:
        self._stdin.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
