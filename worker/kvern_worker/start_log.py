"""What a worker says of itself when it starts, one record a phase, beside those of loading."""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
from typing import TYPE_CHECKING

from kvern.rpc.logs import event
from kvern_worker.machine import cpu_name

if TYPE_CHECKING:
    from kvern_worker.device import Device

log = logging.getLogger("kvern_worker.start")

LOW_MEMORY_BYTES = 2**30
LOW_MEMORY_SHARE = 0.05


def started(args: argparse.Namespace) -> None:
    """The version, and the flags that say something."""
    given = {n: str(value) for n, value in vars(args).items() if value not in (None, False, [], "")}
    for name in ("tls", "tracing"):
        given.pop(name, None)
    event(log, "phase=start", version=importlib.metadata.version("kvern"), config=given)


def opened(device: Device, threads: int) -> None:
    """What computes: its name, and what it is capable of."""
    free, whole = device.memory()
    place = device.place
    if place.type == "cuda":
        import torch

        name = torch.cuda.get_device_name(place)
        capability = "sm_{}{}".format(*torch.cuda.get_device_capability(place))
    else:
        name, capability = cpu_name(), _instruction_set()
    event(
        log,
        "phase=device",
        device=place.type,
        name=name,
        capability=capability,
        threads=threads,
        free_bytes=free,
        total_bytes=whole,
    )


def warn_of_low_memory(device: Device) -> None:
    """After loading: what is left for everything else."""
    free, whole = device.memory()
    if free < max(LOW_MEMORY_BYTES, LOW_MEMORY_SHARE * whole):
        log.warning(
            "phase=memory free_bytes=%d total_bytes=%d reason=%r",
            *(free, whole),
            "little memory is left: lower --kv-cache-memory-bytes or --gpu-memory-utilization, or other programs may be "
            "killed",
        )


def _instruction_set() -> str:
    """The variant of the C++ kernels that serves; "reference" where they are not compiled."""
    try:
        from kvern_kernels import cpu_base

        return str(cpu_base.LIBRARY.kvern_variant().decode())
    except ImportError:
        return "reference"
