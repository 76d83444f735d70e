"""Which experts a token takes: one program per token, all experts in registers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvern_kernels import reference_moe
from kvern_kernels.triton.launch import dense, launch, next_power_of_2


@triton.jit
def _route_kernel(
    logit_ptr,  # [T, E]
    bias_ptr,  # [E] or None
    weight_ptr,  # float32 [T, k]
    id_ptr,  # int32 [T, k]
    stride_lt,
    E,
    top_k,
    num_groups,
    top_groups,
    scale,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPED: tl.constexpr,
    EXPERTS: tl.constexpr,  # E padded to a power of 2
    GROUPS: tl.constexpr,
    CHOICES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    real = expert < E
    never = float("-inf")
    logits = tl.load(logit_ptr + token * stride_lt + expert, mask=real, other=never).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    choice = scores
    if bias_ptr is not None:
        choice = scores + tl.load(bias_ptr + expert, mask=real, other=0.0).to(tl.float32)
    # What is not a number is never better than another: ids stay in range.
    choice = tl.where(real & (choice == choice), choice, never)
    if GROUPED:
        group = expert // (E // num_groups)
        place = tl.arange(0, GROUPS)
        ranks = tl.full((GROUPS,), never, tl.float32)
        for g in range(num_groups):
            inside = tl.where(group == g, choice, never)
            rank = tl.max(inside, 0)
            if bias_ptr is not None:
                rank += tl.max(tl.where(expert == tl.argmax(inside, 0), never, inside), 0)
            ranks = tl.where(place == g, rank, ranks)
        kept = tl.zeros((EXPERTS,), tl.int32)
        for _ in range(top_groups):
            best = tl.argmax(ranks, 0)
            ranks = tl.where(place == best, never, ranks)
            kept = tl.where(group == best, 1, kept)
        choice = tl.where(kept == 1, choice, never)
    slot = tl.arange(0, CHOICES)
    ids = tl.zeros((CHOICES,), tl.int32)
    weights = tl.zeros((CHOICES,), tl.float32)
    for i in range(top_k):
        best = tl.argmax(choice, 0)
        chosen = expert == best
        ids = tl.where(slot == i, best, ids)
        weights = tl.where(slot == i, tl.sum(tl.where(chosen, scores, 0.0), 0), weights)
        choice = tl.where(chosen, never, choice)
    if RENORMALIZE:
        weights = weights / tl.maximum(tl.sum(weights, 0), 1e-20)
    at = token * top_k + slot
    tl.store(weight_ptr + at, weights * scale, mask=slot < top_k)
    tl.store(id_ptr + at, ids, mask=slot < top_k)


def moe_route(
    logits: Tensor,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """See reference_moe.moe_route. A row with a NaN gets ids in range and weights that are NaN."""
    reference_moe.check_route(logits.shape[1], top_k, scoring, num_groups, top_groups)
    logits = dense(logits)
    tokens, experts = logits.shape
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    launch(
        *(_route_kernel, (tokens,), logits, bias, weights, ids, logits.stride(0)),
        *(experts, top_k, num_groups, top_groups, float(scale)),
        SIGMOID=scoring == "sigmoid",
        RENORMALIZE=renormalize,
        GROUPED=num_groups > 1,
        EXPERTS=next_power_of_2(experts),
        GROUPS=next_power_of_2(num_groups),
        CHOICES=next_power_of_2(top_k),
        num_warps=1,
    )
    return weights, ids


def production() -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls whose compilations `aot` checks."""
    logits = torch.empty((16, 256), dtype=torch.float32, device="meta")
    yield "grouped", lambda: moe_route(logits, 8, "sigmoid", True, logits[0], 8, 4, 2.5)
