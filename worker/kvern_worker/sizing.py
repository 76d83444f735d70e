"""How large the KV pool and the longest sequence are. Pure arithmetic, with errors that show it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from kvern.errors import KvernError, invalid
from kvern.v1 import error_pb2

GIB = 2**30
# Without a flag, a worker on a CPU takes half of what is free, and no more than this.
DEFAULT_CPU_KV_BYTES = 4 * GIB
DEFAULT_CPU_UTILIZATION = 0.5

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KvSize:
    """``num_blocks`` of ``block_size`` tokens, ``bytes_per_block`` over all layers. Of a hybrid: ``state_slots`` sequences,
    and ``num_checkpoints`` of a state after a multiple of ``state_block_size`` tokens, each of ``bytes_per_state``."""

    num_blocks: int
    block_size: int
    bytes_per_block: int
    max_model_len: int
    state_slots: int = 0
    num_checkpoints: int = 0
    state_block_size: int = 0
    bytes_per_state: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        states = (self.state_slots + self.num_checkpoints) * self.bytes_per_state
        return self.num_blocks * self.bytes_per_block + states

    @property
    def max_concurrency(self) -> float:
        """Requests of the full length that fit at once."""
        return self.num_blocks / -(-self.max_model_len // self.block_size)


def size_hybrid(
    pool_bytes: int,
    bytes_per_block: int,
    bytes_per_state: int,
    max_num_seqs: int,
    state_block_size: int | None,
    block_size: int,
    max_model_len: int | None,
    max_positions: int,
) -> KvSize:
    """Half of the pool for states, the other for blocks. Of the states at least half are checkpoints, and no more than
    can belong to the blocks. ``state_block_size`` None: about 256 tokens. Raises KvernError where it is no multiple of
    ``block_size``, or where not even two states fit."""
    if state_block_size is None:
        state_block_size = max(1, 256 // block_size) * block_size
    if state_block_size <= 0 or state_block_size % block_size:
        raise invalid(
            "mamba_block_size",
            f"mamba-block-size must be a multiple of the block size {block_size}, is {state_block_size}",
            value=state_block_size,
        )
    states = pool_bytes // 2 // bytes_per_state
    if states < 2:
        raise invalid(
            "kv_cache_memory_bytes",
            f"half of {pool_bytes} bytes of KV cache hold {states} states of {bytes_per_state} bytes, and a sequence and a "
            "checkpoint of one are needed; raise --kv-cache-memory-bytes, or free memory",
            value=pool_bytes,
            limit=4 * bytes_per_state,
        )
    slots = min(max_num_seqs, states // 2)
    if slots < max_num_seqs:
        log.warning(
            "phase=states max_num_seqs=%d reason=%r",
            slots,
            f"--max-num-seqs {max_num_seqs} states do not fit",
        )
    most = max(1, pool_bytes // 2 // bytes_per_block * block_size // state_block_size)
    checkpoints = min(states - slots, most)
    left = pool_bytes - (slots + checkpoints) * bytes_per_state
    size = size_kv(left, bytes_per_block, block_size, max_model_len, max_positions)
    return replace(
        size,
        state_slots=slots,
        num_checkpoints=checkpoints,
        state_block_size=state_block_size,
        bytes_per_state=bytes_per_state,
    )


def parse_length(text: str) -> int | None:
    """ "auto" or "-1" → None; "8192", "8k" (thousands) or "8K" (1,024s) → tokens. Raises KvernError."""
    units = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20}
    if text in ("auto", "-1"):
        return None
    try:
        length = int(float(text[:-1]) * units[text[-1]]) if text[-1:] in units else int(text)
    except ValueError:
        length = 0
    if length <= 0:
        raise invalid(
            "max_model_len", f"max-model-len {text!r} is neither auto nor a positive number", value=text
        )
    return length


def kv_bytes(requested: int | None, utilization: float | None, available: int, weight_bytes: int) -> int:
    """Bytes for the pool: as requested, or a fraction of what the weights leave free."""
    if requested is not None:
        return requested
    free = max(available - weight_bytes, 0)
    if utilization is None:
        return min(DEFAULT_CPU_KV_BYTES, int(free * DEFAULT_CPU_UTILIZATION))
    if not 0 < utilization <= 1:
        raise invalid(
            "gpu_memory_utilization",
            f"gpu-memory-utilization must be in (0, 1], is {utilization}",
            value=utilization,
        )
    return max(int(available * utilization) - weight_bytes, 0)


def size_kv(
    pool_bytes: int, bytes_per_block: int, block_size: int, max_model_len: int | None, max_positions: int
) -> KvSize:
    """Fits the pool, and (``max_model_len`` None) the longest sequence into it. Raises KvernError with the
    figures when one request of the full length does not fit."""
    num_blocks = pool_bytes // bytes_per_block
    fits = min(num_blocks * block_size, max_positions)
    if max_model_len is None:
        max_model_len = fits
    if max_model_len > max_positions:
        raise invalid(
            "max_model_len",
            f"max-model-len {max_model_len} exceeds the {max_positions} positions of the model",
            value=max_model_len,
            limit=max_positions,
        )
    if num_blocks == 0:
        raise invalid(
            "kv_cache_memory_bytes",
            f"{pool_bytes} bytes of KV cache hold no block: one of {block_size} tokens takes {bytes_per_block} bytes; "
            f"raise --kv-cache-memory-bytes, or free memory",
            value=pool_bytes,
            limit=bytes_per_block,
        )
    needed = -(-max_model_len // block_size)
    if needed > num_blocks:
        raise KvernError(
            error_pb2.ERROR_CODE_INVALID_ARGUMENT,
            f"one request of {max_model_len} tokens needs {needed * bytes_per_block / GIB:.3f} GiB of KV cache and "
            f"{pool_bytes / GIB:.3f} GiB are available, enough for {fits} tokens; raise --kv-cache-memory-bytes or "
            f"lower --max-model-len",
            field="max_model_len",
            value=max_model_len,
            limit=fits,
        )
    return KvSize(num_blocks, block_size, bytes_per_block, max_model_len)
