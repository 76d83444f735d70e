"""How the ranks of a group find each other, and say what is wrong when they do not.

Rank 0 listens on the master port; all write there who they are, and compare. What goes wrong here is an error that names
the rank, port or value at fault within the time limit, instead of a collective's time-out later. Once formed, a group
lives and dies as one: :class:`Watch` ends this process when another rank has gone, is silent, or has been started anew.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from kvern.errors import KvernError, invalid
from kvern.v1 import error_pb2

BEAT_S = 0.5
# Counted, not timed: a pause of our own process says nothing about the others.
SILENT_BEATS = 12

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Meeting:
    """Where ``world`` ranks meet, and who this one is. ``timeout_s``: how long the first waits for the last.
    ``listener``: at rank 0, the socket of the port, already listening."""

    rank: int
    world: int
    host: str
    port: int
    timeout_s: float
    listener: socket.socket | None = None

    @property
    def place(self) -> str:
        return f"{self.host}:{self.port}"


def listen(host: str, port: int) -> socket.socket:
    """The socket that rank 0 is met at; port 0 is a free one. Raises KvernError naming the port and who holds it."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        held = f", held by {holder}" if (holder := _holder(port)) else ""
        raise invalid(
            "master_port",
            f"--master-port {port} cannot be used on {host}{held} ({error.strerror or error}); stop that or choose another",
            value=port,
        ) from error


def meet(meeting: Meeting, says: Mapping[str, str]) -> tuple[dist.Store, list[dict[str, str]]]:
    """The group's store, and what each rank said, in order. ``says`` must be equal on all ranks but for "address".

    Raises KvernError naming the rank that is missing, the rank and value that differ, or the group that is already
    complete.
    """
    deadline = time.monotonic() + meeting.timeout_s
    store = _join(meeting, deadline)
    with _talking(meeting):
        if store.add(f"joined/{meeting.rank}", 1) > 1:
            raise _unavailable(
                f"rank {meeting.rank} of the group at {meeting.place} is taken: an earlier group is still there, or two "
                "processes have the same --node-rank"
            )
        store.set(f"says/{meeting.rank}", json.dumps(dict(says)))
        keys = [f"says/{rank}" for rank in range(meeting.world)]
        while not store.check(keys):
            if time.monotonic() > deadline:
                missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
                raise _unavailable(
                    f"{'ranks' if len(missing) > 1 else 'rank'} {', '.join(missing)} of {meeting.world} did not come to "
                    f"{meeting.place} within {meeting.timeout_s:g} s; see their logs"
                )
            time.sleep(0.02)
        said = [json.loads(answer) for answer in store.multi_get(keys)]
    for rank, other in enumerate(said):
        _compare(rank, other, said[0])
    return store, said


def _compare(rank: int, one: Mapping[str, str], first: Mapping[str, str]) -> None:
    for key in sorted({*one, *first} - {"address"}):
        if one.get(key) != first.get(key):
            raise invalid(
                key,
                f"the ranks of a group must be alike: {key} is {one.get(key)} on rank {rank}, and {first.get(key)} on rank 0",
                value=one.get(key),
                limit=first.get(key),
            )


def _join(meeting: Meeting, deadline: float) -> dist.Store:
    if meeting.listener is None:
        # Asked plainly first: torch's own client reports its failures with a stack trace for each attempt.
        while True:
            try:
                socket.create_connection((meeting.host, meeting.port), timeout=1.0).close()
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise _unavailable(
                        f"rank {meeting.rank} found no rank 0 at {meeting.place} within {meeting.timeout_s:g} s "
                        f"({error.strerror or error}); see --master-addr and --master-port"
                    ) from error
                time.sleep(0.05)
    with _talking(meeting):
        return dist.TCPStore(
            *(meeting.host, meeting.port, None, meeting.listener is not None),
            timeout=timedelta(seconds=max(1.0, deadline - time.monotonic())),
            wait_for_workers=False,
            master_listen_fd=None if meeting.listener is None else meeting.listener.detach(),
        )


@contextlib.contextmanager
def _talking(meeting: Meeting) -> Iterator[None]:
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        raise _unavailable(
            f"rank {meeting.rank} cannot talk to rank 0 at {meeting.place}: it ended, or something else listens there "
            f"({str(error).splitlines()[0]})"
        ) from error


class Watch:
    """Beats for this rank and listens to the others'; calls ``lost`` with the reason, once, from its own thread."""

    def __init__(self, store: dist.Store, meeting: Meeting, lost: Callable[[str], None]) -> None:
        self._store, self._meeting, self._lost = store, meeting, lost
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def _run(self) -> None:
        world, mine = self._meeting.world, self._meeting.rank
        others = [rank for rank in range(world) if rank != mine]
        last, silent, beat = [b""] * world, [0] * world, 0
        for rank in others:
            # So that there is a beat to read before the other's first.
            self._store.add(f"beat/{rank}", 0)
        keys = [f"beat/{rank}" for rank in range(world)] + [f"joined/{rank}" for rank in range(world)]
        while True:
            try:
                self._store.add(f"beat/{mine}", 1)
                values = self._store.multi_get(keys)
            except RuntimeError as error:
                return self._lost(f"rank 0 has ended ({str(error).splitlines()[0]})")
            for rank in others:
                silent[rank] = silent[rank] + 1 if values[rank] == last[rank] else 0
                if silent[rank] >= SILENT_BEATS:
                    return self._lost(f"rank {rank} is silent")
                if int(values[world + rank]) > 1:
                    return self._lost(f"rank {rank} was started anew")
            last, beat = values[:world], beat + 1
            time.sleep(BEAT_S)


def interface_to(host: str) -> tuple[str, str]:
    """The network interface by which this machine reaches ``host``, and its address there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        address: str = probe.getsockname()[0]
    return next((name for name, own in _addresses() if own == address), ""), address


def _addresses() -> list[tuple[str, str]]:
    import fcntl
    import struct

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                # SIOCGIFADDR
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
                found.append((name, socket.inet_ntoa(answer[20:24])))
    return found


def _holder(port: int) -> str | None:
    """ "name (pid N)" of who listens on a TCP port, where /proc tells."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            inodes |= {
                f"socket:[{r[9]}]" for r in rows if r[3] == "0A" and int(r[1].rsplit(":")[-1], 16) == port
            }
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(link) in inodes for link in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
    return None


def _unavailable(message: str) -> KvernError:
    return KvernError(error_pb2.ERROR_CODE_UNAVAILABLE, message)
