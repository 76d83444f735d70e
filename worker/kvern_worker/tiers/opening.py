"""From flags to tiers."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvern.errors import invalid
from kvern_worker.config import unsupported
from kvern_worker.layers.attention import KvCache
from kvern_worker.sizing import GIB
from kvern_worker.tiers.disk import DiskTier
from kvern_worker.tiers.memory import DeviceBlocks, MemoryTier
from kvern_worker.tiers.transfers import TierTransfers


def open_tiers(
    memory_gib: float, root: str | None, disk_gib: float | None, cache: KvCache, model_digest: bytes
) -> tuple[TierTransfers | None, tuple[int, int]]:
    """The tiers below the device, if there are any, and the blocks that memory and disk hold. ``disk_gib`` None: four
    times ``memory_gib``. Raises KvernError where the model or the directory has no use for them."""
    if not memory_gib:
        return None, (0, 0)
    if cache.states:
        raise unsupported(
            "--kv-offloading-size: a model that keeps states is not offloaded yet; leave the flag out",
            field="kv_offloading_size",
            value=memory_gib,
        )
    parts = [part for pair in cache.layers.values() for part in pair]
    if any(part.device.type != "cpu" for part in parts):
        raise unsupported(
            "--kv-offloading-size: blocks of a GPU are not offloaded yet; leave the flag out",
            field="kv_offloading_size",
            value=memory_gib,
        )
    device = DeviceBlocks(parts)
    disk_gib = 4 * memory_gib if disk_gib is None else disk_gib
    num_memory = int(memory_gib * GIB) // device.block_bytes
    num_disk = int(disk_gib * GIB) // device.block_bytes if root else 0
    if not num_memory or (root and not num_disk):
        raise invalid(
            "kv_offloading_size",
            f"--kv-offloading-size or --kv-offloading-disk-size holds no block: one takes {device.block_bytes} bytes",
            value=min(memory_gib, disk_gib),
            limit=device.block_bytes / GIB,
        )
    disk = None
    if root:
        # Another model's blocks mean nothing here, and neither do those of another size.
        layout = f"{cache.block_size} {device.block_bytes}".encode()
        try:
            disk = DiskTier(Path(root), hashlib.sha256(model_digest + layout).digest(), num_disk)
        except OSError as error:
            message = f"--kv-offloading-dir cannot be used: {error}"
            raise invalid("kv_offloading_dir", message, value=root) from error
    return TierTransfers(device, MemoryTier(num_memory, device.block_bytes), disk), (num_memory, num_disk)
