"""Choosing tokens, vectorised over the rows of a step.

Order (vLLM's): mask and bias single logits → penalties → temperature → min-p → top-k → top-p → draw. A row's
token depends on its logits, its parameters and ``philox.uniform(seed, position)`` only: every sum over the
vocabulary runs in one fixed order (a cumulative sum in float64), and cuts are by value, so that equal logits at
the edge are kept or dropped together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvern_worker.philox import uniform
from kvern_worker.sampling_state import SamplingState

Ints = npt.NDArray[np.int64]

NEGATIVE_INFINITY = float("-inf")
# Candidates that a cut looks at first, and by how much it widens when they do not reach the mass wanted.
_FIRST_CANDIDATES, _WIDEN = 256, 16
# Rows drawn at a time: bounds the float64 temporaries to 32 vocabularies.
_ROWS = 32


@dataclass(slots=True)
class Sampled:
    """``token_ids`` [rows]; the masks say which rows have none: ``broken`` ones had NaN or infinite logits,
    ``empty`` ones had every token masked by their own parameters."""

    token_ids: Ints
    broken: npt.NDArray[np.bool_]
    empty: npt.NDArray[np.bool_]


def sample(logits: Tensor, slots: Ints, num_tokens: Ints, state: SamplingState) -> Sampled:
    """``logits`` [rows, vocab] float32, not modified; ``slots`` and ``num_tokens`` (of each row's sequence, so
    also the position of the token to come) are [rows]."""
    largest, ids = logits.max(dim=-1)
    broken = ~torch.isfinite(largest).numpy()  # max propagates NaN
    token_ids = ids.numpy()
    empty = np.zeros(len(slots), np.bool_)
    special = np.flatnonzero(~state.plain[slots] & ~broken)
    if not len(special):
        return Sampled(token_ids, broken, empty)
    if (adjusted := _adjusting(slots[special], state)).any():
        rows = special[adjusted]
        changed = adjust(logits[rows], slots[rows], num_tokens[rows], state)
        largest_changed, ids_changed = changed.max(dim=-1)
        token_ids[rows] = ids_changed.numpy()
        empty[rows] = ~torch.isfinite(largest_changed).numpy()
        _draw(changed, rows, token_ids, slots, num_tokens, state)
        special = special[~adjusted]
    if len(special):
        _draw(logits[special], special, token_ids, slots, num_tokens, state)
    return Sampled(token_ids, broken, empty)


def _draw(
    logits: Tensor, rows: Ints, token_ids: Ints, slots: Ints, num_tokens: Ints, state: SamplingState
) -> None:
    """Overwrites ``token_ids`` at those of ``rows`` (whose logits are given) that have a temperature."""
    random = state.temperature[slots[rows]] > 0
    chosen = rows[random]
    if not len(chosen):
        return
    logits = logits[torch.from_numpy(random)]
    numbers = uniform(state.seed[slots[chosen]], num_tokens[chosen])
    for start in range(0, len(chosen), _ROWS):
        part = slice(start, start + _ROWS)
        at = slots[chosen[part]]
        token_ids[chosen[part]] = draw(
            logits[part],
            state.temperature[at],
            state.top_k[at],
            state.top_p[at],
            state.min_p[at],
            numbers[part],
        )


def draw(
    logits: Tensor,
    temperature: npt.NDArray[np.float32],
    top_k: Ints,
    top_p: npt.NDArray[np.float64],
    min_p: npt.NDArray[np.float64],
    numbers: npt.NDArray[np.float64],
) -> Ints:
    """The token of each row at which the cumulative probability first exceeds ``numbers`` (in [0, 1)).

    ``logits`` [rows, vocab] float32; the others [rows]. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.
    """
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / torch.from_numpy(temperature).unsqueeze(1)
    weights = scaled.exp()
    cut = torch.from_numpy(np.log(np.maximum(min_p, 1e-300)).astype(np.float32))
    cut[torch.from_numpy(min_p == 0)] = NEGATIVE_INFINITY
    filtered = np.flatnonzero((top_k > 0) | (top_p < 1))
    if len(filtered):
        cut[filtered] = cut_off(
            scaled[filtered], weights[filtered], top_k[filtered], top_p[filtered], cut[filtered]
        )
    if len(filtered) or (min_p > 0).any():
        weights = torch.where(scaled >= cut.unsqueeze(1), weights, 0.0)
    mass = weights.cumsum(dim=-1, dtype=torch.float64)
    total = mass[:, -1:].contiguous()
    target = torch.from_numpy(numbers).unsqueeze(1) * total
    ids = torch.searchsorted(mass, target, right=True)
    # Rounding may bring the target up to the total; the last token with any mass is meant then.
    last = torch.searchsorted(mass, total, right=False)
    return torch.minimum(ids, last).squeeze(1).numpy()


def cut_off(
    scaled: Tensor, weights: Tensor, top_k: Ints, top_p: npt.NDArray[np.float64], floor: Tensor
) -> Tensor:
    """The smallest scaled logit that each row keeps, [rows] float32.

    ``floor`` [rows] is what min-p has cut already. Top-k keeps the k largest; top-p, of what is left, the smallest
    set of the largest whose mass reaches p.
    """
    vocab = scaled.shape[1]
    width = min(vocab, max(_FIRST_CANDIDATES, int(top_k.max())))
    candidates = scaled.topk(width, dim=-1).values
    kth = torch.from_numpy(np.where(top_k > 0, top_k, vocab))
    bounded = kth < vocab
    cut = floor.clone()
    if bounded.any():
        at = candidates.gather(1, (kth - 1).clamp(max=width - 1).unsqueeze(1)).squeeze(1)
        cut = torch.where(bounded, torch.maximum(cut, at), cut)
    pending = np.flatnonzero(top_p < 1)
    if not len(pending):
        return cut
    kept = torch.where(scaled[pending] >= cut[pending].unsqueeze(1), weights[pending], 0.0)
    wanted = kept.cumsum(dim=-1, dtype=torch.float64)[:, -1] * torch.from_numpy(top_p[pending])
    candidates = candidates[pending]
    while True:
        lowest = cut[pending].unsqueeze(1)
        mass = torch.where(candidates >= lowest, candidates.exp(), 0.0).to(torch.float64)
        before = mass.cumsum(dim=-1) - mass
        needed = (before < wanted.unsqueeze(1)).sum(dim=-1).clamp(min=1)
        edge = candidates.gather(1, (needed - 1).unsqueeze(1)).squeeze(1)
        enough = (
            (needed < width) | (edge < lowest.squeeze(1))
            if width < vocab
            else torch.ones_like(needed, dtype=torch.bool)
        )
        done = pending[enough.numpy()]
        cut[done] = torch.maximum(cut[done], edge[enough])
        if enough.all():
            return cut
        pending, wanted = pending[~enough.numpy()], wanted[~enough]
        width = min(vocab, width * _WIDEN)
        candidates = scaled[pending].topk(width, dim=-1).values


def _adjusting(slots: Ints, state: SamplingState) -> npt.NDArray[np.bool_]:
    """Which of ``slots`` change logits before temperature."""
    adjusting = state.penalty_row[slots] >= 0
    if state.any_edits:
        adjusting |= np.fromiter((state.edits(slot) for slot in slots.tolist()), np.bool_, len(slots))
    return adjusting


def adjust(logits: Tensor, slots: Ints, num_tokens: Ints, state: SamplingState) -> Tensor:
    """Masks, biases and penalties, in place on ``logits`` [rows, vocab] (the caller's own copy)."""
    if state.any_edits:
        edit(logits, slots, num_tokens, state)
    rows = np.flatnonzero(state.penalty_row[slots] >= 0)
    if len(rows):
        at = slots[rows]
        held = state.penalty_row[at]
        logits[rows] = penalize(
            logits[rows],
            torch.from_numpy(state.counts[held]),
            torch.from_numpy(state.in_prompt[held]),
            torch.from_numpy(state.repetition[at]).unsqueeze(1),
            torch.from_numpy(state.presence[at]).unsqueeze(1),
            torch.from_numpy(state.frequency[at]).unsqueeze(1),
        )
    return logits


def penalize(
    logits: Tensor, counts: Tensor, in_prompt: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """``counts`` int32 of output tokens, ``in_prompt`` bool, both [rows, vocab]; the penalties are [rows, 1].

    Repetition divides positive logits of tokens seen in prompt or output and multiplies negative ones; frequency
    and presence subtract for output tokens only.
    """
    in_output = counts > 0
    seen = in_output | in_prompt
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    return logits - frequency * counts - presence * in_output


def edit(logits: Tensor, slots: Ints, num_tokens: Ints, state: SamplingState) -> None:
    """Allowed, biased, banned ids, and stop ids where ``min_tokens`` is not reached, in place."""
    rows, ids, _ = _pairs(slots, state.allowed)
    if len(rows):
        kept = logits[rows, ids]
        logits[np.unique(rows)] = NEGATIVE_INFINITY
        logits[rows, ids] = kept
    rows, ids, owners = _pairs(slots, {slot: pair[0] for slot, pair in state.bias.items()})
    if len(rows):
        values = np.concatenate([state.bias[slot][1] for slot in owners])
        logits[rows, ids] += torch.from_numpy(values)
    rows, ids, _ = _pairs(slots, state.banned)
    if len(rows):
        logits[rows, ids] = NEGATIVE_INFINITY
    rows, ids, _ = _pairs(slots, state.stops)
    if len(rows):
        early = num_tokens[rows] < state.stop_from[slots[rows]]
        logits[rows[early], ids[early]] = NEGATIVE_INFINITY


def _pairs(slots: Ints, table: dict[int, Ints]) -> tuple[Ints, Ints, list[int]]:
    """(row, token id) of every entry that ``table`` has for ``slots``, and the slots they come from."""
    if not table:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), []
    held = [(row, slot) for row, slot in enumerate(slots.tolist()) if slot in table]
    if not held:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), []
    ids = [table[slot] for _, slot in held]
    rows = np.repeat([row for row, _ in held], [len(part) for part in ids])
    return rows, np.concatenate(ids), [slot for _, slot in held]
