"""The running sequences of a group, as numpy arrays by slot: what a step touches of them costs no Python object.

Positions of one sequence, from left to right. In prefill::

      computed by plans,        known, not      room for
      folded or in flight       planned yet     decodes
    |-------------------------|---------------|------------|
    0                   num_scheduled     num_tokens    num_blocks * block_size

and in decode, where each plan computes the position of the token that the plan before it samples::

      tokens that are known     sampled by      room
                                plans in flight
    |-------------------------|---------------|------------|
    0                     num_tokens   num_scheduled    num_blocks * block_size
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvern.rpc.packing import pack_u32
from kvern.v1 import model_pb2
from kvern_scheduler.core.errors import IntegrityError
from kvern_scheduler.core.requests import Sequence

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]

MAX_STOP_IDS = 128
# Width of the ring of newest tokens, in blocks: how seldom they move on to the sequences' logs.
RING_BLOCKS = 8


@dataclass(slots=True)
class Cohort:
    """Sequences that sample in a step, and what of them does not change while they run: parallel arrays, [n]."""

    slots: npt.NDArray[np.intp]
    attempts: U32
    rows: U32
    seq_nos: I64
    num_prompt: I64
    max_len: I64
    packed: bytes
    """The slots as a plan and its result carry them: uint32, little endian."""

    @property
    def size(self) -> int:
        return self.slots.size

    def only(self, keep: npt.NDArray[np.bool_]) -> Cohort:
        slots = self.slots[keep]
        return Cohort(
            slots,
            self.attempts[keep],
            self.rows[keep],
            self.seq_nos[keep],
            self.num_prompt[keep],
            self.max_len[keep],
            pack_u32(slots),
        )


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
        self.num_departures = 0
        self.num_prompt = zeros()
        self.num_tokens = zeros()
        self.max_len = zeros()
        # Length from which end and stop tokens count.
        self.min_len = zeros()
        # 1 + the slot of the sequence's adapter, or 0.
        self.adapter_slot = zeros()
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
        # Of those, given back from the front: out of reach of a sliding window.
        self.num_freed = zeros()
        # Positions of the table that no plan has computed: num_blocks * block_size − num_scheduled.
        self.room = zeros()
        # Tokens that are in the sequence's log (or prompt).
        self.num_logged = zeros()
        # Blocks promised to the sequence and not yet allocated.
        self.reserved = zeros()
        # The newest tokens by position modulo its width; older ones are in the sequences' logs.
        self.recent = np.zeros((max_num_seqs, RING_BLOCKS * block_size), np.int32)
        self._decoders: Cohort | None = None
        # Plans until one of them has all its tokens planned.
        self._plans_left = 0

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
        self.num_logged[slot] = num_tokens
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
        self.num_freed[slot] = 0
        self.room[slot] = blocks.size * self.block_size - num_computed
        self.reserved[slot] = 0
        self.protected[slot] = False
        return slot

    def leave(self, slot: int) -> U32:
        """Empties ``slot`` and returns the blocks that it holds. The sequence's log gets the newest tokens."""
        sequence = self.sequences[slot]
        assert sequence is not None
        self.flush(slot)
        self.num_with_stop_ids -= int(self.has_stop_ids[slot])
        self.has_stop_ids[slot] = False
        self.sequences[slot] = None
        sequence.slot = -1
        self.active[slot] = False
        self.decoding[slot] = False
        self._decoders = None
        self.attempt[slot] += np.uint32(1)
        self.num_departures += 1
        self.reserved[slot] = 0
        self.free_slots.append(slot)
        return self.held(slot).copy()

    def held(self, slot: int) -> U32:
        """The part of its block table that it has not given back."""
        return self.table[slot, self.num_freed[slot] : self.num_blocks[slot]]

    def free_before(self, slots: npt.NDArray[np.intp], blocks: npt.NDArray[np.int64]) -> list[U32]:
        """Takes from ``slots`` what they hold of their first ``blocks[i]`` blocks, and returns it."""
        more = blocks > self.num_freed[slots]
        if not more.any():
            return []
        freeing = slots[more]
        until = np.minimum(blocks[more], self.num_blocks[freeing])
        freed = [
            self.table[slot, first:last].copy()
            for slot, first, last in zip(
                freeing.tolist(), self.num_freed[freeing].tolist(), until.tolist(), strict=True
            )
        ]
        self.num_freed[freeing] = until
        return freed

    def flush(self, slot: int) -> None:
        """Appends the tokens that the sequence's log lacks."""
        sequence = self.sequences[slot]
        assert sequence is not None
        start, end = int(self.num_logged[slot]), int(self.num_tokens[slot])
        if start < end:
            positions = np.arange(start, end) % self.recent.shape[1]
            sequence.output.frombytes(self.recent[slot, positions].tobytes())
            self.num_logged[slot] = end

    def num_scheduled(self, slot: int) -> int:
        """Positions computed by plans, folded or in flight."""
        return int(self.num_blocks[slot]) * self.block_size - int(self.room[slot])

    def cohort(self, slots: npt.NDArray[np.intp]) -> Cohort:
        return Cohort(
            slots,
            self.attempt[slots],
            self.row[slots],
            self.seq_no[slots],
            self.num_prompt[slots],
            self.max_len[slots],
            pack_u32(slots),
        )

    def decoders(self) -> Cohort:
        """The sequences that decode in the next step: those of the last one, where no one came, left or ended."""
        if self._decoders is None or not self._plans_left:
            scheduled = self.num_blocks * self.block_size - self.room
            # The last token is sampled, never computed.
            left = self.max_len - 1 - scheduled
            slots = (self.decoding & (left > 0)).nonzero()[0]
            self._plans_left = int(left[slots].min()) if slots.size else 1
            self._decoders = self.cohort(slots)
        return self._decoders

    def start_decoding(self, slot: int) -> None:
        """The prompt is computed, the next token sampled, by a plan."""
        self.decoding[slot] = True
        self._decoders = None

    def append_blocks(self, slots: npt.NDArray[np.intp], blocks: U32) -> None:
        """One more block for each of ``slots``."""
        self.table[slots, self.num_blocks[slots]] = blocks
        self.num_blocks[slots] += 1
        self.room[slots] += self.block_size

    def schedule(self, decoders: Cohort) -> npt.NDArray[np.intp]:
        """A plan computes one more position of each of ``decoders``. Returns the slots whose last block that fills."""
        room = self.room[decoders.slots] - 1
        self.room[decoders.slots] = room
        self._plans_left -= 1
        filled: npt.NDArray[np.intp] = decoders.slots[room == 0]
        return filled

    def worst(self, candidates: npt.NDArray[np.intp]) -> int:
        """The one of ``candidates`` (slots) to preempt first: least important, then newest."""
        priority = self.priority[candidates]
        candidates = candidates[priority == priority.max()]
        return int(candidates[np.argmax(self.seq_no[candidates])])

    def tables(self) -> list[U32]:
        return [self.held(slot) for slot in np.flatnonzero(self.active).tolist()]

    def check_integrity(self) -> None:
        """Raises IntegrityError where the arrays contradict each other."""
        for slot, sequence in enumerate(self.sequences):
            if (sequence is not None) != bool(self.active[slot]):
                raise IntegrityError(f"slot {slot} is active without a sequence, or the other way round")
            if sequence is None:
                continue
            if sequence.slot != slot:
                raise IntegrityError(f"slot {slot} and its sequence disagree")
            scheduled, known, logged = (
                self.num_scheduled(slot),
                int(self.num_tokens[slot]),
                int(self.num_logged[slot]),
            )
            if self.room[slot] < 0:
                raise IntegrityError(f"slot {slot}: {scheduled} positions in {self.num_blocks[slot]} blocks")
            if self.decoding[slot] and not known <= scheduled + 1 <= self.max_len[slot]:
                raise IntegrityError(f"slot {slot} decodes: {scheduled} positions scheduled, {known} known")
            if not self.decoding[slot] and scheduled >= known:
                raise IntegrityError(f"slot {slot} has nothing left to prefill, and does not decode")
            if logged != sequence.num_prompt + len(sequence.output) or known - logged > self.recent.shape[1]:
                raise IntegrityError(f"slot {slot}: {logged} tokens of {known} counted as logged")
        free = [slot for slot, sequence in enumerate(self.sequences) if sequence is None]
        if sorted(self.free_slots) != free:
            raise IntegrityError("the free slots are not those without a sequence")
        if self.num_with_stop_ids != int(self.has_stop_ids.sum()):
            raise IntegrityError("the count of slots with stop ids is wrong")
