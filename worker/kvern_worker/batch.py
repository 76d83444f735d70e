"""The persistent batch: every sequence has a slot, and all its state lives in arrays indexed by slot.

A plan only names what changes. Blocks, tokens and counters of sequences that just decode are already here, and
the token sampled in one step is read from here by the next. Nothing loops over sequences in Python except over
those that enter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvern.errors import KvernError, invalid
from kvern.rpc.packing import unpack_i32, unpack_u32
from kvern.v1 import error_pb2, worker_pb2
from kvern_worker.layers.attention import StepInputs

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Rows:
    """The sequences that one step runs: prefill chunks first, then decodes. Arrays are [S] int64."""

    slots: Ints
    # Position of each sequence's first token in this step, and how many it runs.
    starts: Ints
    lengths: Ints
    # Whether the row reaches the end of what is known of its sequence, and so samples.
    samples: npt.NDArray[np.bool_]


class PersistentBatch:
    """``max_num_seqs`` slots of up to ``max_model_len`` tokens; block ids are 0 … ``num_blocks`` − 1."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, num_blocks: int, vocab_size: int
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.max_blocks = -(-max_model_len // block_size)
        self.generations = np.zeros(num_blocks, np.uint32)
        # One more than the model's length: the last token is sampled, never run.
        self.tokens = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.block_table = np.zeros((max_num_seqs, self.max_blocks), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.table_len = np.zeros(max_num_seqs, np.int64)
        self.active = np.zeros(max_num_seqs, np.bool_)
        # The slot of the sequence's adapter, or -1.
        self.adapter = np.full(max_num_seqs, -1, np.int32)
        # Broken by an earlier step: skipped until released.
        self.failed = np.zeros(max_num_seqs, np.bool_)

    def reset(self) -> None:
        """Empties all slots; the generations stay, for the blocks still hold what they held."""
        self.active[:] = False
        self.failed[:] = False

    def release(self, slots: npt.NDArray[np.uint32]) -> None:
        self.active[slots] = False
        self.failed[slots] = False

    def add(self, new: worker_pb2.NewSequence) -> None:
        """Puts a sequence into its slot. Raises KvernError when the sequence is at fault; the slot is then
        occupied and failed."""
        slot = new.slot
        if self.active[slot]:
            raise plan_error("new_sequences", f"slot {slot} is occupied")
        self.active[slot], self.failed[slot] = True, True
        blocks, generations = unpack_u32(new.block_ids), unpack_u32(new.block_generations)
        self._check_blocks(blocks)
        self.generations[blocks] = generations
        tokens = unpack_i32(new.token_ids)
        count = len(tokens)
        if not 0 < count <= self.max_model_len:
            raise KvernError(
                error_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
                f"the sequence has {count} tokens, the model takes 1 to {self.max_model_len}",
                field="token_ids",
                value=count,
                limit=self.max_model_len,
            )
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            bad = int(tokens[(tokens < 0) | (tokens >= self.vocab_size)][0])
            raise invalid(
                "token_ids",
                f"token id {bad} is not in the vocabulary of {self.vocab_size} tokens",
                value=bad,
                limit=self.vocab_size - 1,
            )
        if not 0 < new.num_prompt_tokens <= count or new.num_computed_tokens >= count:
            raise invalid(
                "num_computed_tokens",
                f"{new.num_prompt_tokens} prompt and {new.num_computed_tokens} computed tokens do not fit a "
                f"sequence of {count}",
                value=new.num_computed_tokens,
            )
        if len(blocks) > self.max_blocks or new.num_computed_tokens > len(blocks) * self.block_size:
            raise invalid(
                "block_ids",
                f"{len(blocks)} blocks do not hold {new.num_computed_tokens} tokens (at most {self.max_blocks})",
                value=len(blocks),
                limit=self.max_blocks,
            )
        self.tokens[slot, :count] = tokens
        self.block_table[slot, : len(blocks)] = blocks
        self.num_tokens[slot] = count
        self.num_prompt[slot] = new.num_prompt_tokens
        self.num_computed[slot] = new.num_computed_tokens
        self.table_len[slot] = len(blocks)
        self.adapter[slot] = int(new.adapter_slot) - 1
        self.failed[slot] = False

    def append_blocks(self, plan: worker_pb2.StepPlan) -> None:
        """Extends block tables. Raises KvernError (the plan is malformed) before anything is written."""
        slots, blocks = unpack_u32(plan.append_slots), unpack_u32(plan.append_blocks)
        if not len(slots) == len(blocks) == len(plan.append_generations) // 4:
            raise plan_error("append_blocks", "the arrays of appended blocks differ in length")
        if not len(slots):
            return
        self._check_slots("append_slots", slots)
        self._check_blocks(blocks)
        counts = np.bincount(slots, minlength=self.max_num_seqs)
        at = self.table_len[slots] + _rank_among_equal(slots)
        if at.max() >= self.max_blocks:
            worst = int(slots[at.argmax()])
            raise plan_error("append_blocks", f"slot {worst} would hold more than {self.max_blocks} blocks")
        self.block_table[slots, at] = blocks
        self.table_len += counts
        self.generations[blocks] = unpack_u32(plan.append_generations)

    def rows(self, plan: worker_pb2.StepPlan) -> tuple[Rows, list[tuple[int, KvernError]]]:
        """The rows to run, and the sequences that cannot be (now failed). Raises KvernError when the plan names
        slots that are free or named twice."""
        prefill, lengths = unpack_u32(plan.prefill_slots), unpack_u32(plan.prefill_lengths)
        decode = unpack_u32(plan.decode_slots)
        if len(prefill) != len(lengths):
            raise plan_error("prefill_lengths", "prefill_slots and prefill_lengths differ in length")
        slots = np.concatenate((prefill, decode)).astype(np.int64)
        self._check_slots("decode_slots", slots)
        if len(slots) > 1 and np.bincount(slots).max() > 1:
            raise plan_error("decode_slots", "a slot is named twice")
        counts = np.concatenate((lengths, np.ones(len(decode), np.uint32))).astype(np.int64)
        starts = self.num_computed[slots]
        ends = starts + counts
        known = self.num_tokens[slots]
        ok = (
            (counts > 0)
            & (ends <= known)
            & (ends <= self.table_len[slots] * self.block_size)
            & (ends <= self.max_model_len)
        )
        ok[len(prefill) :] &= ends[len(prefill) :] == known[len(prefill) :]
        failed = self.failed[slots]
        errors: list[tuple[int, KvernError]] = []
        if not ok.all() or failed.any():
            for row in np.flatnonzero(~ok & ~failed):
                errors.append((int(slots[row]), self._row_error(int(slots[row]), int(counts[row]))))
                self.failed[slots[row]] = True
            keep = ok & ~failed
            slots, starts, counts, ends, known = (a[keep] for a in (slots, starts, counts, ends, known))
        return Rows(slots, starts, counts, ends == known), errors

    def prepare(self, rows: Rows) -> StepInputs:
        """The flat inputs of a step with at least one row."""
        slots, lengths = rows.slots, rows.lengths
        query_start = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(lengths, out=query_start[1:])
        ends = rows.starts + lengths
        total = int(query_start[-1])
        if total == len(slots):
            token_slots, positions = slots, rows.starts
        else:
            token_slots = np.repeat(slots, lengths)
            positions = np.arange(total) + np.repeat(rows.starts - query_start[:-1], lengths)
        block, offset = np.divmod(positions, self.block_size)
        slot_mapping = self.block_table[token_slots, block].astype(np.int64) * self.block_size + offset
        width = -(-int(ends.max()) // self.block_size)
        return StepInputs(
            token_ids=torch.from_numpy(self.tokens[token_slots, positions].astype(np.int64)),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slot_mapping),
            block_tables=torch.from_numpy(self.block_table[slots, :width]),
            query_start=torch.from_numpy(query_start),
            seq_lens=torch.from_numpy(ends.astype(np.int32)),
            state_rows=torch.from_numpy(slots),
            fresh=torch.from_numpy(rows.starts == 0),
        )

    def advance(self, rows: Rows) -> None:
        """Counts the rows' tokens as computed."""
        self.num_computed[rows.slots] += rows.lengths

    def append_tokens(self, slots: Ints, token_ids: Ints) -> None:
        """One sampled token for each of ``slots`` (distinct)."""
        self.tokens[slots, self.num_tokens[slots]] = token_ids
        self.num_tokens[slots] += 1

    def _row_error(self, slot: int, count: int) -> KvernError:
        start, known = int(self.num_computed[slot]), int(self.num_tokens[slot])
        room = int(self.table_len[slot]) * self.block_size
        if start + count > self.max_model_len:
            return KvernError(
                error_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
                f"the sequence would have {start + count} tokens, the model takes {self.max_model_len}",
                field="max_tokens",
                value=start + count,
                limit=self.max_model_len,
            )
        return KvernError(
            error_pb2.ERROR_CODE_INTERNAL,
            f"the plan runs {count} tokens from {start} of a sequence with {known} tokens and room for {room}",
        )

    def _check_slots(self, field: str, slots: npt.NDArray[np.integer]) -> None:
        if not len(slots):
            return
        if slots.max() >= self.max_num_seqs:
            raise plan_error(field, f"slot {int(slots.max())} is not below {self.max_num_seqs}")
        if not self.active[slots].all():
            raise plan_error(field, f"slot {int(slots[~self.active[slots]][0])} holds no sequence")

    def _check_blocks(self, blocks: npt.NDArray[np.uint32]) -> None:
        if len(blocks) and blocks.max() >= self.num_blocks:
            raise plan_error("block_ids", f"block {int(blocks.max())} is not below {self.num_blocks}")


class PlanError(KvernError):
    """The plan itself is wrong: the leader and this worker disagree on the batch, so the stream must end."""


def plan_error(field: str, message: str) -> PlanError:
    return PlanError(error_pb2.ERROR_CODE_INVALID_ARGUMENT, f"malformed plan: {message}", field=field)


def _rank_among_equal(values: npt.NDArray[np.uint32]) -> Ints:
    """For each element, how many equal ones come before it."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = np.searchsorted(ordered, ordered, side="left")
    ranks = np.empty(len(values), np.int64)
    ranks[order] = np.arange(len(values)) - first
    return ranks
