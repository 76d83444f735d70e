"""Choosing tokens where the logits are. What reaches the host of a step is a token id and two flags a row.

The order of operations, and each row's random number, are those of kvern_worker.sampling.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import kvern_kernels as kernels
from kvern.v1.sampling_pb2 import SamplingParams, TokenLogprobs
from kvern_worker.gpu.staging import Staging
from kvern_worker.logits_edits import adjusting, pairs
from kvern_worker.sampling import Sampled
from kvern_worker.sampling_state import SamplingState

Ints = npt.NDArray[np.int64]


class GpuSamplingState(SamplingState):
    """Keeps a copy of what penalties count on ``place`` as well: ``counts_there`` and ``in_prompt_there``, [rows, vocab]."""

    def __init__(
        self, max_num_seqs: int, vocab_size: int, eos_token_ids: tuple[int, ...], place: torch.device
    ) -> None:
        super().__init__(max_num_seqs, vocab_size, eos_token_ids)
        self._place = place
        self.counts_there = torch.zeros(0, vocab_size, dtype=torch.int32, device=place)
        self.in_prompt_there = torch.zeros(0, vocab_size, dtype=torch.bool, device=place)

    def add(self, slot: int, params: SamplingParams, tokens: npt.NDArray[np.int32], num_prompt: int) -> None:
        super().add(slot, params, tokens, num_prompt)
        row = int(self.penalty_row[slot])
        if row < 0:
            return
        if (more := len(self.counts) - len(self.counts_there)) > 0:
            pad = (0, 0, 0, more)
            self.counts_there = torch.nn.functional.pad(self.counts_there, pad)
            self.in_prompt_there = torch.nn.functional.pad(self.in_prompt_there, pad)
        self.counts_there[row].copy_(torch.from_numpy(self.counts[row]))
        self.in_prompt_there[row].copy_(torch.from_numpy(self.in_prompt[row]))

    def record(self, slots: Ints, token_ids: Ints) -> None:
        super().record(slots, token_ids)
        rows = self.penalty_row[slots]
        if (held := rows >= 0).any():
            # A row has one token, so none is counted twice.
            at = torch.from_numpy(np.stack((rows[held], token_ids[held]))).to(self._place)
            self.counts_there[at[0], at[1]] += 1


class GpuSampler:
    """Samples rows of logits that lie on ``place``."""

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._staging = Staging(place)

    def sample(self, logits: Tensor, slots: Ints, num_tokens: Ints, state: GpuSamplingState) -> Sampled:
        """See sampling.sample; ``logits`` [rows, vocab] float32 are not modified."""
        changing = ~state.plain[slots]
        if changing.any():
            changing &= adjusting(slots, state)
        edited = logits
        if changing.any():
            edited = self._adjust(logits.clone(), slots, num_tokens, state)
        seeds, positions, top_k, temperature, top_p, min_p = self._staging.put(
            [
                torch.from_numpy(array)
                for array in (
                    *(state.seed[slots].view(np.int64), num_tokens, _when(state, slots, state.top_k, 0)),
                    _when(state, slots, state.temperature, 0),
                    _when(state, slots, state.top_p, 1).astype(np.float32),
                    _when(state, slots, state.min_p, 0).astype(np.float32),
                )
            ]
        )
        numbers = kernels.philox_uniform(seeds, positions)
        token_ids, finite = kernels.sample(edited, temperature, top_k, top_p, min_p, numbers)
        # The maximum of a row with a NaN is one.
        sound = finite if edited is logits else logits.amax(-1).isfinite()
        told = torch.stack((token_ids, finite.long(), sound.long())).cpu().numpy()
        broken = told[2] == 0
        return Sampled(told[0], broken, (told[1] == 0) & ~broken)

    def _adjust(self, logits: Tensor, slots: Ints, num_tokens: Ints, state: GpuSamplingState) -> Tensor:
        """See logits_edits.adjust; in place."""
        if state.any_edits:
            self._edit(logits, slots, num_tokens, state)
        rows = state.penalty_row[slots]
        if (rows >= 0).any():
            there, repetition, presence, frequency = self._staging.put(
                [
                    torch.from_numpy(array)
                    for array in (
                        rows,
                        *(of[slots] for of in (state.repetition, state.presence, state.frequency)),
                    )
                ]
            )
            kernels.penalize_logits(
                *(logits, there, state.counts_there, state.in_prompt_there),
                *(repetition, presence, frequency),
            )
        return logits

    def _edit(self, logits: Tensor, slots: Ints, num_tokens: Ints, state: SamplingState) -> None:
        """See logits_edits.edit."""
        never = float("-inf")
        rows, ids = pairs(slots, state.allowed)
        if len(rows):
            at = self._index(rows, ids)
            kept = logits[at]
            logits[self._index(np.unique(rows))] = never
            logits[at] = kept
        rows, ids = pairs(slots, {slot: ids for slot, (ids, _) in state.bias.items()})
        if len(rows):
            values = np.concatenate([state.bias[slot][1] for slot in slots.tolist() if slot in state.bias])
            logits[self._index(rows, ids)] += torch.from_numpy(values).to(self._place)
        rows, ids = pairs(slots, state.banned)
        stop_rows, stops = pairs(slots, state.stops)
        early = num_tokens[stop_rows] < state.stop_from[slots[stop_rows]]
        rows, ids = np.concatenate((rows, stop_rows[early])), np.concatenate((ids, stops[early]))
        if len(rows):
            logits[self._index(rows, ids)] = never

    def _index(self, *arrays: Ints) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(np.stack(arrays)).to(self._place))


def _when(
    state: SamplingState, slots: Ints, values: npt.NDArray[np.generic], default: float
) -> npt.NDArray[np.generic]:
    """The values of slots that sample, ``default`` for plain ones, whose values are left from who had the slot before."""
    return np.where(state.plain[slots], np.asarray(default, values.dtype), values[slots])


def token_logprobs(logits: Tensor, token_ids: Ints, num_top: Ints) -> list[TokenLogprobs]:
    """See logprobs.token_logprobs: of each row a few candidates come to the host."""
    ids = torch.from_numpy(token_ids).to(logits.device)
    chosen, ranks, normalizers = kernels.gather_logprobs(logits, ids)
    # More than are wanted, so that equal logits at the edge are chosen by id.
    width = min(2 * int(num_top.max()) + 16, logits.shape[1])
    values, top_ids = logits.topk(width, dim=-1)
    columns = [column.double().unsqueeze(1) for column in (chosen, ranks, normalizers)]
    told = torch.cat((*columns, values.double(), top_ids.double()), 1).cpu().numpy()
    values_here, ids_here = told[:, 3 : 3 + width], told[:, 3 + width :].astype(np.int64)
    results = []
    for row, (token, count) in enumerate(zip(token_ids.tolist(), num_top.tolist(), strict=True)):
        order = np.lexsort((ids_here[row], -values_here[row]))[:count]
        results.append(
            TokenLogprobs(
                token_id=token,
                logprob=told[row, 0],
                rank=int(told[row, 1]),
                top_token_ids=ids_here[row, order].tolist(),
                top_logprobs=(values_here[row, order] - told[row, 2]).tolist(),
            )
        )
    return results
