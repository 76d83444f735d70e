"""Attention by name, as `--attention-backend` has it: our kernels, and libraries behind the same op.

By default the dispatcher's order holds (TRITON_ATTN on GPUs, CPU_ATTN on CPUs). A library serves only
where it is named: its bits depend on the batch. The adapters of FlashAttention and FlashInfer follow
their documentation and haven't met a GPU yet.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern_kernels import kv_cache, reference
from kvern_kernels.attention_options import AttentionOptions

Attention = Callable[..., Tensor]
_ALIASES = {"TRITON": "TRITON_ATTN", "CPU": "CPU_ATTN", "SDPA": "TORCH_SDPA"}
_WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation asks for


class Unavailable(RuntimeError):
    """This backend can't serve here; the message says why."""


def find(name: str, device: str) -> Attention:
    """The function with the signature of `paged_attention` behind `name` (in any case), on `device` ("cpu" or
    "cuda").

    Raises Unavailable, with the reason for every backend, when it is unknown or can't serve.
    """
    wanted = _ALIASES.get(name.upper(), name.upper())
    reasons: dict[str, str] = {}
    for known, load in BACKENDS.items():
        try:
            function = load(device)
        except (Unavailable, ImportError) as reason:
            reasons[known] = str(reason)
            continue
        if known == wanted:
            return function
        reasons[known] = "available"
    told = "; ".join(f"{known}: {reason}" for known, reason in reasons.items())
    problem = "cannot serve here" if wanted in BACKENDS else "is unknown"
    raise Unavailable(f"attention backend {name!r} {problem} ({told})")


def _triton(device: str) -> Attention:
    from kvern_kernels.triton import ops

    if device not in ops.DEVICES:
        raise Unavailable(f"does not serve {device} tensors")
    return ops.paged_attention


def _cpu(device: str) -> Attention:
    if device != "cpu":
        raise Unavailable(f"does not serve {device} tensors")
    from kvern_kernels import cpu

    return cpu.paged_attention


def _installed(package: str, device: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise Unavailable(f"the package {package} is not installed")
    if device != "cuda" or torch.version.hip is not None:
        raise Unavailable("serves NVIDIA GPUs only")


def _flash_attention(device: str) -> Attention:
    _installed("flash_attn", device)
    varlen = importlib.import_module("flash_attn").flash_attn_varlen_func

    def paged_attention(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        options: AttentionOptions,
        lse: Tensor | None = None,
        key_ends: Tensor | None = None,
    ) -> Tensor:
        """See reference.paged_attention. Raises ValueError for what flash_attn 2 has not."""
        block_size = k_cache.shape[2]
        _refuse(
            "FLASH_ATTN",
            sinks=options.sinks is not None,
            lse=lse is not None,
            fp8=k_cache.dtype.itemsize == 1,
            key_ends=key_ends is not None,
        )
        if block_size % 256:
            raise ValueError(f"FLASH_ATTN needs a block size that is a multiple of 256, not {block_size}")
        before = options.window - 1 if options.window else -1
        key_start = F.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return varlen(
            *(q, k_cache.transpose(1, 2), v_cache.transpose(1, 2), query_start, key_start),
            *(q.shape[0], block_tables.shape[1] * block_size),  # bounds, so that nothing waits for the device
            softmax_scale=options.scale,
            causal=options.causal,
            window_size=(before, 0 if options.causal else before),
            softcap=options.softcap,
            alibi_slopes=options.alibi,
            block_table=block_tables,
        )

    return paged_attention


def _flash_infer(device: str) -> Attention:
    _installed("flashinfer", device)
    flashinfer: Any = importlib.import_module("flashinfer")
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")

    def paged_attention(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        options: AttentionOptions,
        lse: Tensor | None = None,
        key_ends: Tensor | None = None,
    ) -> Tensor:
        """See reference.paged_attention. Plans on the host at each call, so a CUDA graph can't hold it. Raises
        ValueError for what FlashInfer has not.
        """
        _refuse(
            "FLASHINFER",
            alibi=options.alibi is not None,
            sinks=options.sinks is not None,
            two_sided_window=options.window > 0 and not options.causal,
            key_ends=key_ends is not None,
        )
        block_size = k_cache.shape[2]
        blocks = (seq_lens + block_size - 1) // block_size
        used = torch.arange(block_tables.shape[1], device=q.device) < blocks.unsqueeze(1)
        wrapper.plan(
            query_start,
            F.pad(blocks.cumsum(0, dtype=torch.int32), (1, 0)),
            block_tables[used],
            (seq_lens - (blocks - 1) * block_size).int(),
            *(q.shape[1], k_cache.shape[1], q.shape[2], block_size),
            causal=options.causal,
            sm_scale=options.scale,
            window_left=options.window - 1 if options.window else -1,
            logits_soft_cap=options.softcap or None,
            q_data_type=q.dtype,
            kv_data_type=k_cache.dtype,
        )
        scales = {"k_scale": options.k_scale, "v_scale": options.v_scale}
        if lse is None:
            return wrapper.run(q, (k_cache, v_cache), **scales)
        out, base_2 = wrapper.run(q, (k_cache, v_cache), **scales, return_lse=True)
        lse.copy_(base_2 * 0.6931471805599453)
        return out

    return paged_attention


def _refuse(backend: str, **asked: bool) -> None:
    missing = [name for name, wanted in asked.items() if wanted]
    if missing:
        raise ValueError(f"{backend} has no {', '.join(missing)}: use --attention-backend TRITON_ATTN")


def _torch_sdpa(device: str) -> Attention:
    del device
    return sdpa_attention


def sdpa_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    options: AttentionOptions,
    lse: Tensor | None = None,
    key_ends: Tensor | None = None,
) -> Tensor:
    """See reference.paged_attention: torch's scaled_dot_product_attention for each sequence in turn.

    What that lacks (soft cap, log-sum-exp) is the reference's.
    """
    if options.softcap > 0 or lse is not None:
        return reference.paged_attention(
            *(q, k_cache, v_cache, block_tables, query_start, seq_lens, options, lse, key_ends)
        )
    out = q.new_empty((*q.shape[:2], v_cache.shape[3]))
    block_size = k_cache.shape[2]
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    for s, length in enumerate(lengths):
        rows = slice(starts[s], starts[s + 1])
        count = rows.stop - rows.start
        if count == 0:
            continue
        blocks = block_tables[s, : -(-length // block_size)].long()
        keys, values = (
            (
                kv_cache.read_blocks(cache, blocks).transpose(1, 2).flatten(0, 1)[:length].transpose(0, 1)
                * factor
            ).to(q.dtype)
            for cache, factor in ((k_cache, options.k_scale), (v_cache, options.v_scale))
        )
        distance = torch.arange(length, device=q.device) - torch.arange(
            length - count, length, device=q.device
        ).unsqueeze(1)
        seen = reference.seen_keys(distance, options)
        if key_ends is not None:
            ends = key_ends[rows].unsqueeze(1)
            seen |= (distance >= 0) & (torch.arange(length, device=q.device) < ends)
        bias = torch.zeros(seen.shape, device=q.device).masked_fill(~seen, float("-inf"))
        if options.alibi is not None:
            bias = bias + options.alibi.float().view(-1, 1, 1) * distance
        if options.sinks is not None:  # a key that gives the score 0 · scale + bias and the value 0
            scores = options.sinks.float().view(-1, 1, 1).expand(-1, count, 1)
            bias = torch.cat((bias.expand(q.shape[1], -1, -1), scores), -1)
            keys, values = F.pad(keys, (0, 0, 0, 1)), F.pad(values, (0, 0, 0, 1))
        mixed = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1).unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=bias.to(q.dtype),
            scale=options.scale,
            enable_gqa=q.shape[1] != keys.shape[0],
        )
        out[rows] = mixed[0].transpose(0, 1)
    return out


BACKENDS: dict[str, Callable[[str], Attention]] = {
    "TRITON_ATTN": _triton,
    "FLASH_ATTN": _flash_attention,
    "FLASHINFER": _flash_infer,
    "TORCH_SDPA": _torch_sdpa,
    "CPU_ATTN": _cpu,
}
