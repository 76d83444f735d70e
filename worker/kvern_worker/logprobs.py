"""Log-probabilities from the model's raw logits, for the rows that asked."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvern.v1.sampling_pb2 import TokenLogprobs

Ints = npt.NDArray[np.int64]

# Rows at a time: bounds the float64 temporaries.
_ROWS = 32


def token_logprobs(logits: Tensor, token_ids: Ints, num_top: Ints) -> list[TokenLogprobs]:
    """For each row of ``logits`` [rows, vocab] float32: the log-probability and rank of ``token_ids`` [rows], and
    the ``num_top`` [rows] most likely tokens."""
    results: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), _ROWS):
        part = slice(start, start + _ROWS)
        results += _token_logprobs(logits[part], token_ids[part], num_top[part])
    return results


def _token_logprobs(logits: Tensor, token_ids: Ints, num_top: Ints) -> list[TokenLogprobs]:
    largest = logits.amax(dim=-1, keepdim=True)
    # A cumulative sum, because its order does not depend on how many rows there are.
    mass = (logits - largest).exp().cumsum(dim=-1, dtype=torch.float64)[:, -1:]
    normalizer = largest.double() + mass.log()
    chosen = logits.gather(1, torch.from_numpy(token_ids).unsqueeze(1))
    ranks = ((logits > chosen).sum(dim=-1) + 1).tolist()
    of_chosen = (chosen - normalizer).squeeze(1).tolist()
    top = logits.topk(int(num_top.max()), dim=-1)
    top_ids, top_values = top.indices.tolist(), (top.values - normalizer).tolist()
    return [
        TokenLogprobs(
            token_id=token,
            logprob=of_chosen[row],
            rank=ranks[row],
            top_token_ids=top_ids[row][:count],
            top_logprobs=top_values[row][:count],
        )
        for row, (token, count) in enumerate(zip(token_ids.tolist(), num_top.tolist(), strict=True))
    ]
