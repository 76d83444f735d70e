"""Runs child processes, restarts those that die, and stops them in order.

A child's life::

    starting ──▶ running ──exit──▶ backing off ──delay──▶ starting …
                    │                   │
                    └──── stop() ───────┴──────▶ stopped

Children run in process groups of their own, so a Ctrl-C in the terminal reaches the supervisor only and the order of
stopping is ours. The kernel signals them when the supervisor itself dies (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CONFIGURATION_EXIT_CODE = 2
MAX_FAILURES_BEFORE_READY = 5
LOG_ROTATE_BYTES = 16 * 2**20

_PR_SET_PDEATHSIG = 1
_SENT_BY_OTHERS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


class ChildFailed(Exception):
    """A child cannot run as configured; its own words are the message."""


@dataclass(frozen=True)
class ChildSpec:
    """What to run. Output of both streams is appended to ``log_path``."""

    name: str
    argv: Sequence[str]
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict)
    stop_grace_s: float = 10.0
    death_signal: signal.Signals = signal.SIGKILL


@dataclass(frozen=True)
class RestartPolicy:
    """Delays double from ``first_s`` to ``most_s``; a life of ``healthy_s`` starts over at ``first_s``."""

    first_s: float = 0.25
    most_s: float = 10.0
    healthy_s: float = 30.0


class Supervisor:
    """Owns the children in ``specs``, started together and stopped in the reverse order of the list.

    ``say`` gets one line for each death. ``failed`` completes with :class:`ChildFailed` when a child cannot work as
    configured: it exits with code 2 before :meth:`mark_ready`, or dies five times before it.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        say: Callable[[str], None],
        policy: RestartPolicy = RestartPolicy(),
    ) -> None:
        self.failed: asyncio.Future[ChildFailed] = asyncio.get_running_loop().create_future()
        self._say = say
        self._policy = policy
        self._ready = False
        self._children = [_Child(spec) for spec in specs]

    def start(self) -> None:
        """Starts all children at once; raises OSError when a program does not exist."""
        for child in self._children:
            child.spawn()
            child.watcher = asyncio.create_task(self._keep_running(child))

    def mark_ready(self) -> None:
        """From here on every death is met with a restart, whatever the exit code."""
        self._ready = True

    def pid(self, name: str) -> int | None:
        """Of the running process of that child; None while it is down."""
        child = next(child for child in self._children if child.spec.name == name)
        return child.process.pid if child.process and child.process.poll() is None else None

    async def stop(self, kill: asyncio.Event | None = None) -> None:
        """Ends the children one after the other: SIGTERM, the child's grace, SIGKILL. ``kill`` cuts all graces short."""
        for child in reversed(self._children):
            if child.watcher:
                child.watcher.cancel()
            await child.stop(kill)

    async def _keep_running(self, child: _Child) -> None:
        failures = 0
        while True:
            started = time.monotonic()
            code = await child.wait()
            child.kill_group()
            failures = 1 if time.monotonic() - started > self._policy.healthy_s else failures + 1
            ending = describe_exit(code)
            last_line = last_log_line(child.spec.log_path, child.log_start)
            hopeless = code == CONFIGURATION_EXIT_CODE or failures >= MAX_FAILURES_BEFORE_READY
            if hopeless and not self._ready:
                if not self.failed.done():
                    self.failed.set_result(ChildFailed(f"{child.spec.name} {ending}: {last_line}"))
                return
            delay = min(self._policy.first_s * 2 ** (failures - 1), self._policy.most_s)
            # What it said before somebody else ended it says nothing of why.
            told = "" if -code in _SENT_BY_OTHERS else f"; last log line: {last_line}"
            self._say(f"{child.spec.name} {ending}{told}; restarting in {delay:g} s")
            await asyncio.sleep(delay)
            child.spawn()


class _Child:
    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.process: subprocess.Popen[bytes] | None = None
        self.watcher: asyncio.Task[None] | None = None
        # Where this life's output begins.
        self.log_start = 0

    def spawn(self) -> None:
        rotate_log(self.spec.log_path)
        with open(self.spec.log_path, "ab") as log:
            self.log_start = log.tell()
            self.process = subprocess.Popen(
                self.spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.spec.env},
                process_group=0,
                preexec_fn=_die_with_parent(self.spec.death_signal),
            )

    async def wait(self) -> int:
        """The exit code; −N when signal N ended it."""
        process = self.process
        assert process is not None
        if (code := process.poll()) is not None:
            return code
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        pidfd = os.pidfd_open(process.pid)
        loop.add_reader(pidfd, lambda: None if ended.done() else ended.set_result(None))
        try:
            await ended
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        return process.wait()

    async def stop(self, kill: asyncio.Event | None) -> None:
        process = self.process
        if process is None:
            return
        if process.poll() is None:
            self._signal_group(signal.SIGTERM)
            ended = asyncio.ensure_future(self.wait())
            killed = asyncio.ensure_future((kill or asyncio.Event()).wait())
            await asyncio.wait(
                {ended, killed}, timeout=self.spec.stop_grace_s, return_when=asyncio.FIRST_COMPLETED
            )
            killed.cancel()
            if not ended.done():
                self._signal_group(signal.SIGKILL)
            await ended
        self.kill_group()

    def kill_group(self) -> None:
        """What the child started and did not end goes with it."""
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def _die_with_parent(number: signal.Signals) -> Callable[[], None]:
    """Code for the child between fork and exec. The C library is loaded before, since little is safe there."""
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def run() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return run


def describe_exit(code: int) -> str:
    """ "exited with code 3", "was killed by SIGKILL"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def last_log_line(path: Path, start: int = 0, most_chars: int = 400) -> str:
    """The last line with anything in it from byte ``start`` on, or "(no output)"."""
    try:
        with open(path, "rb") as log:
            log.seek(max(start, log.seek(0, os.SEEK_END) - 8192))
            lines = log.read().decode("utf-8", "replace").split("\n")
    except FileNotFoundError:
        return "(no output)"
    return next((line.strip()[:most_chars] for line in reversed(lines) if line.strip()), "(no output)")


def rotate_log(path: Path) -> None:
    """Keeps one old log beside the current one once that is large."""
    if path.exists() and path.stat().st_size > LOG_ROTATE_BYTES:
        path.replace(path.with_name(path.name + ".1"))
