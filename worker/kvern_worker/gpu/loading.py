"""What loading a model onto a GPU adds: refusals by name, a KV cache of the size that was measured, graphs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from kvern_worker.config import ModelConfig, unsupported
from kvern_worker.gpu.device import Gpu
from kvern_worker.gpu.graphs import DecodeGraphs, capture_sizes
from kvern_worker.gpu.memory import largest_step, measure_peak, pool_bytes
from kvern_worker.layers.attention import KvCache, warm_up_step
from kvern_worker.models.registry import Model
from kvern_worker.sizing import KvSize, size_kv

KV_DTYPES = ("fp32", "bf16", "fp16", "fp8")
_WIDEST_HEAD = 256  # what the attention kernels were compiled for, within a chip's shared memory

log = logging.getLogger(__name__)


def check(file: Any, config: ModelConfig, kv_dtype: str) -> None:
    """Raises KvernError for what runs on CPUs only. ``file``: the model's; one with ``DEVICES`` says where it runs."""
    what = config.architecture
    if "cuda" not in getattr(file, "DEVICES", ("cpu", "cuda")):
        raise unsupported(f"{what} runs on CPUs only; use --device cpu", field="device", value="cuda")
    if config.states is not None:
        raise unsupported(
            f"{what} keeps states beside its KV cache, and their kernels are for CPUs only; use --device cpu",
            field="device",
            value="cuda",
        )
    if config.head_dim > _WIDEST_HEAD:
        raise unsupported(
            f"{what} has attention heads of {config.head_dim} components; on a GPU they can have {_WIDEST_HEAD}; use "
            "--device cpu",
            field="device",
            value=config.head_dim,
        )
    if kv_dtype not in KV_DTYPES:
        raise unsupported(
            f"kv-cache-dtype {kv_dtype} is not supported on a GPU; choose one of {', '.join(KV_DTYPES)}",
            field="kv_cache_dtype",
            value=kv_dtype,
        )


def use_exact(exact: bool) -> None:
    """Whether a row's bits depend on nothing but its sequence (see kvern_kernels.triton.launch)."""
    from kvern_kernels.triton import launch

    launch.use_batch_invariant(exact)


def fit_cache(
    device: Gpu,
    model: Model,
    cache: KvCache,
    size: KvSize,
    *,
    asked_bytes: int | None,
    asked_len: int | None,
    utilization: float | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    pooling: bool,
) -> KvSize:
    """Gives ``cache``, loaded with one block, its size: ``size`` where bytes were asked for, or what is free beside a
    step of ``max_num_batched_tokens``. Raises KvernError where that holds no request of the length asked for."""
    step = largest_step(max_num_batched_tokens, size.max_model_len, size.block_size)
    peak = measure_peak(device, model, step, max_num_seqs, pooling)
    if asked_bytes is None:
        free, total = device.memory()
        pool = pool_bytes(total, free, peak, utilization)
        log.info("phase=memory total=%d free=%d peak=%d kv_cache=%d", total, free, peak, pool)
        size = size_kv(pool, size.bytes_per_block, size.block_size, asked_len, size.max_model_len)
    cache.resize(size.num_blocks)
    return size


@torch.inference_mode()
def capture_graphs(
    device: Gpu,
    model: Model,
    asked: Sequence[int] | None,
    max_num_seqs: int,
    num_blocks: int,
    backend: str | None,
) -> None:
    """``backend``: the attention that was asked for by name; those of libraries plan on the host, at each step."""
    if backend is not None and backend.upper() not in ("TRITON", "TRITON_ATTN", "FLASH_ATTN"):
        log.warning("phase=graphs reason=%r", f"{backend} plans on the host, so decode runs eagerly")
        return
    sizes = capture_sizes(asked, max_num_seqs)
    if sizes:
        graphs = DecodeGraphs(device.place, sizes, num_blocks)
        graphs.capture(model, warm_up_step())
        device.graphs = graphs
