"""What a process of kvern_gateway.processes does on its side: it keeps to its limits, and answers requests in turn."""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys


def confine(memory_bytes: int) -> None:
    """Leaves Ctrl-C to the gateway, bounds the address space, writes no core files and gives way to the gateway."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(1)


def receive() -> bytes:
    """The next request. Ends the process where there is none any more."""
    (length,) = struct.unpack("<I", _read(4))
    return _read(length)


def send(answer: bytes) -> None:
    sys.stdout.buffer.write(struct.pack("<I", len(answer)) + answer)
    sys.stdout.buffer.flush()


def _read(length: int) -> bytes:
    data = sys.stdin.buffer.read(length)
    if len(data) < length:
        sys.exit(0)
    return data
