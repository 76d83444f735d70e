"""Changes to logits before the temperature: masks, biases and penalties, for the rows that asked."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvern_worker.sampling_state import SamplingState

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def adjusting(slots: Ints, state: SamplingState) -> npt.NDArray[np.bool_]:
    """Which of ``slots`` change their logits."""
    changing = state.penalty_row[slots] >= 0
    if state.any_edits:
        changing |= np.fromiter((state.edits(slot) for slot in slots.tolist()), np.bool_, len(slots))
    return changing


def adjust(logits: Floats, slots: Ints, num_tokens: Ints, state: SamplingState) -> Floats:
    """Masks, biases and penalties, in place on ``logits`` [rows, vocab] (the caller's own copy)."""
    if state.any_edits:
        edit(logits, slots, num_tokens, state)
    rows = np.flatnonzero(state.penalty_row[slots] >= 0)
    if len(rows):
        at = slots[rows]
        held = state.penalty_row[at]
        logits[rows] = penalize(
            logits[rows],
            state.counts[held],
            state.in_prompt[held],
            state.repetition[at, None],
            state.presence[at, None],
            state.frequency[at, None],
        )
    return logits


def penalize(
    logits: Floats,
    counts: npt.NDArray[np.int32],
    in_prompt: npt.NDArray[np.bool_],
    repetition: Floats,
    presence: Floats,
    frequency: Floats,
) -> Floats:
    """``counts`` of output tokens and ``in_prompt`` are [rows, vocab]; the penalties are [rows, 1].

    Repetition divides positive logits of tokens seen in prompt or output and multiplies negative ones; frequency
    and presence subtract for output tokens only.
    """
    in_output = counts > 0
    repeated = np.where(logits > 0, logits / repetition, logits * repetition)
    logits = np.where(in_output | in_prompt, repeated, logits)
    penalty: Floats = frequency * counts.astype(np.float32) + presence * in_output
    return logits - penalty


def edit(logits: Floats, slots: Ints, num_tokens: Ints, state: SamplingState) -> None:
    """Allowed, biased, banned ids, and stop ids where ``min_tokens`` is not reached, in place."""
    rows, ids = pairs(slots, state.allowed)
    if len(rows):
        kept = logits[rows, ids]
        logits[np.unique(rows)] = -np.inf
        logits[rows, ids] = kept
    rows, ids = pairs(slots, {slot: ids for slot, (ids, _) in state.bias.items()})
    if len(rows):
        logits[rows, ids] += np.concatenate(
            [state.bias[slot][1] for slot in slots.tolist() if slot in state.bias]
        )
    rows, ids = pairs(slots, state.banned)
    logits[rows, ids] = -np.inf
    rows, ids = pairs(slots, state.stops)
    early = num_tokens[rows] < state.stop_from[slots[rows]]
    logits[rows[early], ids[early]] = -np.inf


def pairs(slots: Ints, table: dict[int, Ints]) -> tuple[Ints, Ints]:
    """(row, token id) of every entry that ``table`` has for ``slots``."""
    held = [(row, table[slot]) for row, slot in enumerate(slots.tolist()) if slot in table] if table else []
    if not held:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    rows = np.repeat([row for row, _ in held], [len(ids) for _, ids in held])
    return rows, np.concatenate([ids for _, ids in held])
