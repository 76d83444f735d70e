"""What this machine offers: cores, memory, fast number formats."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterator
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def physical_cores() -> int:
    """Cores that this process may run on, hyper-threads counted once (two threads of a core share its units)."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in allowed:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add(tuple((topology / name).read_text() for name in ("physical_package_id", "core_id")))
        except OSError:
            cores.add((str(cpu),))
    return len(cores)


def available_memory() -> int:
    """Bytes that can be allocated without swapping: the machine's, or what is left of the container's limit."""
    available = _meminfo("MemAvailable")
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        if limit != "max":
            available = min(available, max(int(limit) - used, 0))
    except (OSError, ValueError):
        pass  # no cgroup v2
    return available


def _meminfo(key: str) -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def has_fast_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    names = ("bf16",) if platform.machine() == "aarch64" else ("avx512_bf16", "amx_bf16", "avx_ne_convert")
    return any(f" {name} " in flags.replace("\n", " ") for name in names)


def cpu_name() -> str:
    """As the processor calls itself; its architecture where it does not."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


_M_MMAP_THRESHOLD = -3
_KEEP_FROM, _KEEP_UP_TO = 1 << 17, 1 << 25


@contextlib.contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Meanwhile, large pieces that are freed go back to the system at once.

    glibc would keep them: each one that is freed raises the size (up to 32 MiB) below which it keeps pieces for later.
    Steps want that, since they ask for the same sizes again and again; loading would hold what it has read twice.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _KEEP_FROM)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _KEEP_UP_TO)
