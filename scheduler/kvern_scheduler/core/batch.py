"""The running sequences of a group, as numpy arrays by slot: what a step touches of them costs no Python object.

Positions of one sequence, from left to right::

      computed by        computed by plans     known, not     sampled by plans
      folded steps       in flight             planned yet    in flight
    |------------------|---------------------|--------------|------------------|
    0               num_done          num_scheduled     num_tokens       num_expected

In decode only the last expected token is not scheduled: num_scheduled == num_expected − 1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvern.v1 import model_pb2
from kvern_scheduler.core.errors import IntegrityError
from kvern_scheduler.core.requests import Sequence

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]

MAX_STOP_IDS = 128


class Batch:
    """Every array has one entry (or row) per slot, ``max_num_seqs`` of them."""

    def __init__(self, model: model_pb2.ModelInfo, max_num_seqs: int, block_size: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self.vocab_size = model.vocab_size
        self.sequences: list[Sequence | None] = [None] * max_num_seqs
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))

        def zeros(dtype: type = np.int64) -> npt.NDArray[np.int64]:
            return np.zeros(max_num_seqs, dtype)

        self.active = np.zeros(max_num_seqs, bool)
        self.decoding = np.zeros(max_num_seqs, bool)
        # Preempted too often: not again.
        self.protected = np.zeros(max_num_seqs, bool)
        # Goes up whenever a sequence leaves: a result for an older value is of no one any more.
        self.attempt: U32 = np.zeros(max_num_seqs, np.uint32)
        self.num_prompt = zeros()
        self.num_tokens = zeros()
        self.num_expected = zeros()
        self.num_scheduled = zeros()
        self.num_done = zeros()
        self.max_len = zeros()
        # Length from which end and stop tokens count.
        self.min_len = zeros()
        self.priority = zeros()
        self.seq_no = zeros()
        self.row: U32 = np.zeros(max_num_seqs, np.uint32)
        self.ignore_eos = np.zeros(max_num_seqs, bool)
        self.stop_ids = np.full((max_num_seqs, MAX_STOP_IDS), -1, np.int32)
        self.num_with_stop_ids = 0
        self.has_stop_ids = np.zeros(max_num_seqs, bool)
        self.is_eos = np.zeros(model.vocab_size, bool)
        self.is_eos[[eos for eos in model.eos_token_ids if eos < model.vocab_size]] = True

        max_blocks = -(-model.max_model_len // block_size)
        self.table: U32 = np.zeros((max_num_seqs, max_blocks), np.uint32)
        self.num_blocks = zeros()
        # Positions that the table has room for: num_blocks * block_size.
        self.capacity = zeros()
        # Blocks whose tokens went to the sequence's log, and whose hashes to the index.
        self.num_full = zeros()
        # Blocks promised to the sequence and not yet allocated.
        self.reserved = zeros()
        # The newest tokens by position modulo its width; older ones are in the sequences' logs.
        self.recent = np.zeros((max_num_seqs, 2 * block_size), np.int32)

    @property
    def num_running(self) -> int:
        return self.max_num_seqs - len(self.free_slots)

    def enter(self, sequence: Sequence, tokens: npt.NDArray[np.int32], blocks: U32, num_computed: int) -> int:
        """Puts ``sequence``, whose known tokens are ``tokens``, into a free slot. Its first ``num_computed`` positions
        are in ``blocks`` already."""
        slot = self.free_slots.pop()
        params = sequence.request.submission.params
        self.sequences[slot] = sequence
        sequence.slot = slot
        sequence.attempts += 1
        num_tokens = tokens.size
        width = self.recent.shape[1]
        first = max(0, num_tokens - width)
        self.recent[slot, np.arange(first, num_tokens) % width] = tokens[first:]
        self.active[slot] = True
        self.decoding[slot] = False
        self.num_prompt[slot] = sequence.num_prompt
        self.num_tokens[slot] = num_tokens
        self.num_expected[slot] = num_tokens
        self.num_scheduled[slot] = num_computed
        self.num_done[slot] = num_computed
        self.max_len[slot] = sequence.max_len
        self.min_len[slot] = sequence.num_prompt + params.min_tokens
        self.priority[slot] = sequence.rank[0]
        self.seq_no[slot] = sequence.seq_no
        self.row[slot] = sequence.row
        self.ignore_eos[slot] = params.ignore_eos
        self.stop_ids[slot] = -1
        self.has_stop_ids[slot] = bool(params.stop_token_ids)
        if params.stop_token_ids:
            self.stop_ids[slot, : len(params.stop_token_ids)] = params.stop_token_ids
            self.num_with_stop_ids += 1
        self.table[slot, : blocks.size] = blocks
        self.num_blocks[slot] = blocks.size
        self.capacity[slot] = blocks.size * self.block_size
        self.num_full[slot] = num_computed // self.block_size
        self.reserved[slot] = 0
        self.protected[slot] = False
        return slot

    def leave(self, slot: int) -> U32:
        """Empties ``slot`` and returns its block table. The sequence's log gets the newest tokens."""
        sequence = self.sequences[slot]
        assert sequence is not None
        self.flush(slot, int(self.num_tokens[slot]))
        self.num_with_stop_ids -= int(self.has_stop_ids[slot])
        self.has_stop_ids[slot] = False
        self.sequences[slot] = None
        sequence.slot = -1
        self.active[slot] = False
        self.decoding[slot] = False
        self.attempt[slot] += np.uint32(1)
        self.reserved[slot] = 0
        self.free_slots.append(slot)
        return self.table[slot, : self.num_blocks[slot]].copy()

    def flush(self, slot: int, end: int) -> None:
        """Appends the tokens of positions before ``end`` that the sequence's log lacks."""
        sequence = self.sequences[slot]
        assert sequence is not None
        start = sequence.num_prompt + len(sequence.output)
        if start < end:
            positions = np.arange(start, end) % self.recent.shape[1]
            sequence.output.frombytes(self.recent[slot, positions].tobytes())

    def append_blocks(self, slots: npt.NDArray[np.intp], blocks: U32) -> None:
        """One more block for each of ``slots``."""
        self.table[slots, self.num_blocks[slots]] = blocks
        self.num_blocks[slots] += 1
        self.capacity[slots] += self.block_size

    def worst(self, candidates: npt.NDArray[np.intp]) -> int:
        """The one of ``candidates`` (slots) to preempt first: least important, then newest."""
        priority = self.priority[candidates]
        candidates = candidates[priority == priority.max()]
        return int(candidates[np.argmax(self.seq_no[candidates])])

    def tables(self) -> list[U32]:
        return [self.table[slot, : self.num_blocks[slot]] for slot in np.flatnonzero(self.active)]

    def check_integrity(self) -> None:
        """Raises IntegrityError where the arrays contradict each other."""
        for slot, sequence in enumerate(self.sequences):
            if (sequence is not None) != bool(self.active[slot]):
                raise IntegrityError(f"slot {slot} is active without a sequence, or the other way round")
            if sequence is None:
                continue
            if sequence.slot != slot:
                raise IntegrityError(f"slot {slot} and its sequence disagree")
            done, scheduled = self.num_done[slot], self.num_scheduled[slot]
            known, expected = self.num_tokens[slot], self.num_expected[slot]
            if not done <= scheduled <= expected or not known <= expected <= self.max_len[slot]:
                raise IntegrityError(
                    f"slot {slot}: done {done}, scheduled {scheduled}, known {known}, expected {expected}"
                )
            if scheduled > self.capacity[slot]:
                raise IntegrityError(f"slot {slot}: {scheduled} positions in room for {self.capacity[slot]}")
            if self.decoding[slot] and scheduled != expected - 1:
                raise IntegrityError(f"slot {slot} decodes with {expected - scheduled} tokens to compute")
            if int(known) - sequence.num_prompt - len(sequence.output) > self.recent.shape[1]:
                raise IntegrityError(f"slot {slot}: more unflushed tokens than the ring holds")
        free = [slot for slot, sequence in enumerate(self.sequences) if sequence is None]
        if sorted(self.free_slots) != free:
            raise IntegrityError("the free slots are not those without a sequence")
        if self.num_with_stop_ids != int(self.has_stop_ids.sum()):
            raise IntegrityError("the count of slots with stop ids is wrong")
