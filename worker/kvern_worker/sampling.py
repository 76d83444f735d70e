"""Choosing tokens, vectorised over the rows of a step.

Order (vLLM's): mask and bias single logits → penalties → temperature → min-p → top-k → top-p → draw. A row's
token depends on its logits, its parameters and ``philox.uniform(seed, position)`` only: sums over the vocabulary
run in one fixed order, and cuts are by value, so that equal logits at the edge are kept or dropped together.

numpy, because its sort, partition and arg max are several times faster than torch's on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvern_kernels.philox import uniform
from kvern_worker.logits_edits import adjust, adjusting
from kvern_worker.sampling_state import SamplingState

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# Candidates that a cut looks at first, and by how much it widens where they do not reach the mass wanted.
_CANDIDATES, _WIDEN = 256, 16
# Rows drawn at a time, which bounds the temporaries; and tokens of a block of the cumulative distribution.
_ROWS, _BLOCK = 16, 256


@dataclass(slots=True)
class Sampled:
    """``token_ids`` [rows]; the masks say which rows have none: ``broken`` ones had NaN or infinite logits,
    ``empty`` ones had every token masked by their own parameters."""

    token_ids: Ints
    broken: Bools
    empty: Bools


def sample(logits: Floats, slots: Ints, num_tokens: Ints, state: SamplingState) -> Sampled:
    """``logits`` [rows, vocab], not modified; ``slots`` and ``num_tokens`` (of each row's sequence, so also the
    position of the token to come) are [rows]."""
    token_ids, finite = _best(logits)
    empty = np.zeros(len(slots), np.bool_)
    special = np.flatnonzero(~state.plain[slots] & finite)
    if not len(special):
        return Sampled(token_ids, ~finite, empty)
    changing = adjusting(slots[special], state)
    if changing.any():
        rows = special[changing]
        changed = adjust(logits[rows], slots[rows], num_tokens[rows], state)
        token_ids[rows], possible = _best(changed)
        empty[rows] = ~possible
        _draw(changed[possible], rows[possible], token_ids, slots, num_tokens, state)
        special = special[~changing]
    random = special[state.temperature[slots[special]] > 0]
    for start in range(0, len(random), _ROWS):
        part = random[start : start + _ROWS]
        _draw(logits[part], part, token_ids, slots, num_tokens, state)
    return Sampled(token_ids, ~finite, empty)


def _best(logits: Floats) -> tuple[Ints, Bools]:
    """The arg max of each row, and whether it is finite (a NaN counts as the maximum)."""
    token_ids = logits.argmax(axis=-1)
    return token_ids, np.isfinite(logits[np.arange(len(logits)), token_ids])


def _draw(
    logits: Floats, rows: Ints, token_ids: Ints, slots: Ints, num_tokens: Ints, state: SamplingState
) -> None:
    """Overwrites ``token_ids`` at those of ``rows`` (whose logits are given) that have a temperature."""
    random = state.temperature[slots[rows]] > 0
    chosen = rows[random]
    if not len(chosen):
        return
    at = slots[chosen]
    numbers = uniform(state.seed[at], num_tokens[chosen])
    logits = logits if random.all() else logits[random]
    token_ids[chosen] = draw(
        logits, state.temperature[at], state.top_k[at], state.top_p[at], state.min_p[at], numbers
    )


def draw(
    logits: Floats, temperature: Floats, top_k: Ints, top_p: Doubles, min_p: Doubles, numbers: Doubles
) -> Ints:
    """The token of each row at which the cumulative probability first exceeds ``numbers`` (in [0, 1)).

    ``logits`` [rows, vocab]; the others [rows]. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.
    """
    rows, vocab = logits.shape
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature[:, None]
    # Padded with zeros to whole blocks.
    weights = np.zeros((rows, -(-vocab // _BLOCK) * _BLOCK), np.float32)
    np.exp(scaled, out=weights[:, :vocab])
    cut = np.full(rows, -np.inf, np.float32)
    bounded = min_p > 0
    cut[bounded] = np.log(min_p[bounded])
    filtered = (top_k > 0) | (top_p < 1)
    if filtered.any():
        # A slice where all are meant: an array of indices would copy them.
        part = slice(None) if filtered.all() else np.flatnonzero(filtered)
        cut[part] = cut_off(scaled[part], weights[part], top_k[part], top_p[part], cut[part])
    if filtered.any() or bounded.any():
        weights[:, :vocab] *= scaled >= cut[:, None]
    return _invert(weights, numbers)


def _invert(weights: Floats, numbers: Doubles) -> Ints:
    """The index of each row of ``weights`` [rows, whole blocks] where its running sum exceeds number × total."""
    row = np.arange(len(weights))
    blocks = weights.reshape(len(weights), -1, _BLOCK)
    running = blocks.sum(axis=-1, dtype=np.float64).cumsum(axis=-1)
    target = numbers * running[:, -1]
    # Rounding may bring the target up to the total; the last block, or token, with any mass is meant then.
    last = (running < running[:, -1:]).sum(axis=-1)
    block = np.minimum((running <= target[:, None]).sum(axis=-1), last)
    before = np.where(block > 0, running[row, block - 1], 0.0)
    inside = blocks[row, block].cumsum(axis=-1, dtype=np.float64)
    last = (inside < inside[:, -1:]).sum(axis=-1)
    offset = np.minimum((inside <= (target - before)[:, None]).sum(axis=-1), last)
    return block * _BLOCK + offset


def cut_off(scaled: Floats, weights: Floats, top_k: Ints, top_p: Doubles, floor: Floats) -> Floats:
    """The smallest scaled logit that each row keeps, [rows].

    ``floor`` [rows] is what min-p has cut already. Top-k keeps the k largest; top-p, of what is left, the smallest
    set of the largest whose mass reaches p. ``weights`` (exponentials of ``scaled``) may be padded with zeros.
    """
    vocab = scaled.shape[1]
    cut = floor.copy()
    width = min(vocab, max(_CANDIDATES, int(top_k.max())))
    candidates = largest(scaled, width)
    bounded = np.flatnonzero((top_k > 0) & (top_k < vocab))
    cut[bounded] = np.maximum(cut[bounded], candidates[bounded, top_k[bounded] - 1])
    pending = np.flatnonzero(top_p < 1)
    if not len(pending):
        return cut
    kept = weights[pending, :vocab] * (scaled[pending] >= cut[pending, None])
    wanted = kept.sum(axis=-1, dtype=np.float64) * top_p[pending]
    candidates = candidates[pending]
    while True:
        # The first candidate at which the mass of those before it, and its own, reaches what is wanted.
        mass = np.exp(candidates) * (candidates >= cut[pending, None])
        reached = mass.cumsum(axis=-1, dtype=np.float64) >= wanted[:, None]
        found = reached[:, -1] | (width == vocab) | (candidates[:, -1] < cut[pending])
        edge = candidates[np.arange(len(pending)), reached.argmax(axis=-1)]
        # Where rounding keeps the sum of all below p times it, all are kept.
        edge[~reached[:, -1]] = -np.inf
        cut[pending[found]] = np.maximum(cut[pending[found]], edge[found])
        if found.all():
            return cut
        pending, wanted, width = pending[~found], wanted[~found], min(vocab, width * _WIDEN)
        candidates = largest(scaled[pending], width)


def largest(values: Floats, count: int) -> Floats:
    """The ``count`` largest of each row, descending."""
    if count < values.shape[1]:
        values = np.partition(values, values.shape[1] - count, axis=-1)[:, -count:]
    return np.sort(values, axis=-1)[:, ::-1]
