"""Free and taken TCP ports, and who holds a taken one."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path


class PortInUse(Exception):
    """Says which port, who holds it where that can be known, and what to do."""


def claim_port(host: str, port: int, flag: str) -> int:
    """``port`` if it can be bound on ``host``, or a free one where it is 0. Raises :class:`PortInUse`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            # Two servers with SO_REUSEADDR may both bind; only one may listen.
            probe.listen(1)
        except OSError as error:
            if error.errno != errno.EADDRINUSE and error.errno != errno.EACCES:
                raise PortInUse(
                    f"{host} is no address to serve on ({error.strerror}); use one of this machine's with --host"
                ) from error
            holder = find_listener(port)
            held = f", held by {holder}" if holder else ""
            raise PortInUse(
                f"{host}:{port} cannot be used{held} ({error.strerror}); stop that or choose another with {flag}"
            ) from error
        bound: int = probe.getsockname()[1]
        return bound


def find_listener(port: int) -> str | None:
    """ "name (pid N)" of a process that listens on the TCP port, where /proc tells."""
    inodes = {
        fields[9]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for fields in _rows(table)
        if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port
    }
    links = {f"socket:[{inode}]" for inode in inodes}
    if not links:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor) in links:
                        return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
    return None


def _rows(table: str) -> list[list[str]]:
    try:
        return [line.split() for line in Path(table).read_text().splitlines()[1:]]
    except OSError:
        return []
