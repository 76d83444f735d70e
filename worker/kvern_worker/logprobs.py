"""Log-probabilities from the model's raw logits, for the rows that asked."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvern.v1.sampling_pb2 import TokenLogprobs

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

# Rows at a time, which bounds the temporaries.
_ROWS = 16


def token_logprobs(logits: Floats, token_ids: Ints, num_top: Ints) -> list[TokenLogprobs]:
    """For each row of ``logits`` [rows, vocab]: the log-probability and rank of ``token_ids`` [rows], and the
    ``num_top`` [rows] most likely tokens."""
    results: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), _ROWS):
        part = slice(start, start + _ROWS)
        results += _token_logprobs(logits[part], token_ids[part], num_top[part])
    return results


def _token_logprobs(logits: Floats, token_ids: Ints, num_top: Ints) -> list[TokenLogprobs]:
    largest = logits.max(axis=-1, keepdims=True)
    mass = np.exp(logits - largest).sum(axis=-1, dtype=np.float64, keepdims=True)
    normalizer = largest + np.log(mass)
    chosen = np.take_along_axis(logits, token_ids[:, None], axis=1)
    ranks = ((logits > chosen).sum(axis=-1) + 1).tolist()
    of_chosen = (chosen - normalizer)[:, 0].tolist()
    top_ids = _top(logits, int(num_top.max()))
    top_values = np.take_along_axis(logits, top_ids, axis=1) - normalizer
    return [
        TokenLogprobs(
            token_id=token,
            logprob=of_chosen[row],
            rank=ranks[row],
            top_token_ids=top_ids[row, :count].tolist(),
            top_logprobs=top_values[row, :count].tolist(),
        )
        for row, (token, count) in enumerate(zip(token_ids.tolist(), num_top.tolist(), strict=True))
    ]


def _top(logits: Floats, count: int) -> Ints:
    """Ids of the ``count`` largest logits of each row, most likely first, equal ones in the order of their ids."""
    vocab = logits.shape[1]
    if count == 0:
        return np.zeros((len(logits), 0), np.int64)
    # More than are wanted, so that equal logits at the edge are chosen by id and not by the partition's whim.
    if (wide := 2 * count + 16) < vocab:
        ids = np.sort(np.argpartition(logits, vocab - wide, axis=-1)[:, -wide:], axis=-1)
    else:
        ids = np.broadcast_to(np.arange(vocab), logits.shape)
    order = np.argsort(-np.take_along_axis(logits, ids, axis=1), axis=-1, kind="stable")[:, :count]
    return np.take_along_axis(ids, order, axis=1)
