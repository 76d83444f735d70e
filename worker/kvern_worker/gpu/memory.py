"""How much KV cache a GPU has room for: measured, once the weights are there, by a step as large as any."""

from __future__ import annotations

from typing import Any

import torch

from kvern.errors import invalid
from kvern_worker.gpu.device import Gpu
from kvern_worker.layers.attention import StepInputs
from kvern_worker.models.registry import Embedder, Model

DEFAULT_UTILIZATION = 0.9


def largest_step(num_tokens: int, max_model_len: int, block_size: int) -> StepInputs:
    """``num_tokens`` of as few sequences as can have them, stored nowhere, which all read block 0."""
    lengths = [max_model_len] * (num_tokens // max_model_len)
    if rest := num_tokens - sum(lengths):
        lengths.append(rest)
    longest = max(lengths)
    each = torch.tensor(lengths, dtype=torch.int32)
    return StepInputs(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64),
        block_tables=torch.zeros(len(lengths), -(-longest // block_size), dtype=torch.int32),
        query_start=torch.nn.functional.pad(each.cumsum(0, dtype=torch.int32), (1, 0)),
        seq_lens=each,
        state_rows=torch.full((len(lengths),), -1, dtype=torch.int64),
        fresh=torch.ones(len(lengths), dtype=torch.bool),
    )


@torch.inference_mode()
def measure_peak(device: Gpu, model: Model, step: StepInputs, max_num_seqs: int, pooling: bool) -> int:
    """Bytes that ``step`` and the sampling (or ``pooling``) of ``max_num_seqs`` rows need at most beside weights and cache;
    0 off a GPU."""
    measured = device.place.type == "cuda"
    if measured:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device.place)
    before = torch.cuda.memory_allocated(device.place) if measured else 0
    states: Any = device.forward(model, step)
    rows = slice(0, min(max_num_seqs, step.token_ids.shape[0]))
    if pooling and isinstance(model, Embedder):
        found = model.hidden(states, slice(None))
    else:
        found = model.logits(states, rows).clone()  # sampling changes a copy of them
    del states, found
    if not measured:
        return 0
    torch.cuda.synchronize(device.place)
    peak = torch.cuda.max_memory_allocated(device.place) - before
    torch.cuda.empty_cache()
    return peak


def pool_bytes(total: int, free: int, peak: int, utilization: float | None) -> int:
    """Bytes for the KV cache: ``utilization`` of the GPU's ``total``, less what is taken (``total`` − ``free``: the
    weights, and what other processes have) and ``peak`` for a step. Raises KvernError where nothing is left."""
    utilization = DEFAULT_UTILIZATION if utilization is None else utilization
    pool = int(total * utilization) - (total - free) - peak
    if pool <= 0:
        gib = 2**30
        raise invalid(
            "gpu_memory_utilization",
            f"no room for a KV cache: {utilization:g} of the GPU's {total / gib:.2f} GiB, less {(total - free) / gib:.2f} GiB "
            f"in use and {peak / gib:.2f} GiB for a step; raise --gpu-memory-utilization, lower --max-num-batched-tokens "
            "or --max-num-seqs, or take a smaller model",
            value=utilization,
        )
    return pool
