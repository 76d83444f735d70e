"""What the sampling ops mean, in torch. R rows of logits over V tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvern_kernels import philox


def philox_uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """philox.uniform of int64 [R] `seeds` (their 64 bits) and `positions`: float64 [R] in [0, 1)."""
    numbers = philox.uniform(seeds.cpu().numpy().view(np.uint64), positions.cpu().numpy())
    return torch.from_numpy(numbers).to(seeds.device)


def penalize_logits(
    logits: Tensor,
    rows: Tensor,
    counts: Tensor,
    in_prompt: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Penalties in place on float32 logits [R, V].

    Row r takes row rows[r] (int64 [R]; -1: none) of `counts`, int32 [P, V], how often its output holds each
    token, and of `in_prompt`, bool [P, V]. The three penalties are float32 [R]: repetition divides positive
    logits of tokens seen in prompt or output and multiplies others; frequency (times the count) and presence
    are subtracted for tokens of the output.
    """
    held = rows >= 0
    some, count, given = logits[held], counts[rows[held]], in_prompt[rows[held]]
    seen, factor = count > 0, repetition[held].unsqueeze(1)
    some = torch.where(seen | given, torch.where(some > 0, some / factor, some * factor), some)
    logits[held] = some - (frequency[held].unsqueeze(1) * count + presence[held].unsqueeze(1) * seen)


def mask_logits(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """-inf in place on logits [R, V] where bit t % 32 of word t // 32 of row rows[r] (int64 [R]; -1: none) of
    `bitmask`, int32 [P, ⌈V / 32⌉], is 0: the tokens that a grammar forbids.
    """
    held = rows >= 0
    words = bitmask[rows[held]].unsqueeze(-1) >> torch.arange(32, device=logits.device)
    allowed = (words & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits[held] = logits[held].masked_fill(~allowed, float("-inf"))


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, numbers: Tensor
) -> tuple[Tensor, Tensor]:
    """(token ids int64 [R], whether the row had a finite largest logit, bool [R]) of float32 logits [R, V].

    temperature float32 [R] (0: the first largest logit), top_k int64 [R] (0: off), top_p and min_p float32
    [R] (1 and 0: off), numbers float64 [R] in [0, 1). Min-p, then top-k, then top-p keep the logits not
    below a value, so equal ones fare alike; the token is the first at which the running probability of what
    is kept exceeds the number.
    """
    largest, best = logits.max(dim=-1)
    divisor = torch.where(temperature > 0, temperature, torch.ones_like(temperature)).unsqueeze(1)
    scaled = (logits - largest.unsqueeze(1)) / divisor
    cut = min_p.double().log()
    weights = scaled.exp().double()
    ordered = scaled.sort(dim=-1, descending=True).values
    kth = ordered.gather(1, (top_k - 1).clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
    cut = torch.where(top_k > 0, torch.maximum(cut, kth.double()), cut)
    mass = torch.where(ordered.double() >= cut.unsqueeze(1), ordered.exp().double(), 0).cumsum(-1)
    reached = mass >= (mass[:, -1] * top_p.double()).unsqueeze(1)
    edge = ordered.gather(1, reached.int().argmax(-1, keepdim=True)).squeeze(1)
    cut = torch.where(top_p < 1, torch.maximum(cut, edge.double()), cut)
    running = torch.where(scaled.double() >= cut.unsqueeze(1), weights, 0).cumsum(-1)
    beyond = running > (numbers * running[:, -1]).unsqueeze(1)
    last = (running < running[:, -1:]).sum(-1).clamp(max=logits.shape[1] - 1)
    drawn = torch.where(beyond.any(-1), beyond.int().argmax(-1), last)
    return torch.where(temperature > 0, drawn, best), largest.isfinite()


def gather_logprobs(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of float32 logits [R, V] and token_ids int64 [R]: each token's log-probability, float32 [R]; its rank, 1
    the most likely, int64 [R]; and the row's log-sum-exp, float32 [R], to make other logits probabilities.
    """
    normalizer = logits.double().logsumexp(-1)
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    ranks = (logits > chosen).sum(-1) + 1
    return (chosen.squeeze(1).double() - normalizer).float(), ranks, normalizer.float()
