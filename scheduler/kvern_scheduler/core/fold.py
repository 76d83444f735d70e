"""Folds a step's result into the batch: tokens, ends, full blocks.

A sequence may have left its slot since the step was planned (finished by the step before, cancelled, preempted). Its
slot's attempt counter has then moved on, and that part of the result is ignored.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvern.block_hash import hash_blocks
from kvern.errors import KvernError
from kvern.v1 import error_pb2, sampling_pb2, worker_pb2
from kvern_scheduler.core.batch import Batch, Cohort
from kvern_scheduler.core.blocks import BlockPool
from kvern_scheduler.core.changes import Logprobs, Tokens
from kvern_scheduler.core.errors import ProtocolError
from kvern_scheduler.core.group import Group
from kvern_scheduler.core.journal import Kind
from kvern_scheduler.core.plan import Plan, Result, Saves
from kvern_scheduler.core.requests import Sequence

Slots = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]


def fold_step(group: Group, result: Result, now: float) -> Plan:
    """Applies the result of the oldest plan in flight, and returns that plan. Raises ProtocolError where the result
    does not answer it: the group's batch is then unknown, and must be given up."""
    if not group.in_flight or group.in_flight[0].step != result.step:
        expected = group.in_flight[0].step if group.in_flight else "none"
        raise ProtocolError(f"result of step {result.step}, expected {expected}")
    plan, batch = group.in_flight[0], group.batch
    alive = None  # all of them
    errors: list[tuple[Sequence, KvernError]] = []
    if result.errors or batch.num_departures != plan.num_departures:
        alive = _alive(batch, plan)
        errors = _match(batch, plan, result, alive)
    sampled, tokens = _sampled(group.batch, plan, result, alive)
    group.in_flight.popleft()
    group.folded = plan.step
    if result.logprobs:
        _take_logprobs(group, plan, result, alive)
    if plan.prefill_slots:
        _note_first_tokens(group, plan, alive, now)
    pooled = group.model.HasField("pooling")
    if pooled:
        embeddings = _embeddings(group, result)
    else:
        ended, stopped = _append(group, sampled, tokens)
    if plan.prefill_slots:
        _complete_prefilled(group, plan, alive)
    if pooled:
        for slot in sampled.slots.tolist():
            sequence = batch.sequences[slot]
            assert sequence is not None
            reason = sampling_pb2.FINISH_REASON_STOP
            group.finish(sequence, reason, now, embedding=embeddings[slot])
        ended = []
    if plan.filled_slots.size:
        _complete_decoded(group, plan, alive)
    if group.states is not None and plan.saves.slots:
        _complete_saves(group, group.states, plan.saves, alive)
    if group.model.sliding_window and not pooled:
        _free_unseen(group, plan, sampled, alive)
    for index in ended:
        _finish(group, int(sampled.slots[index]), int(tokens[index]), bool(stopped[index]), now)
    for sequence, error in errors:
        group.finish(sequence, sampling_pb2.FINISH_REASON_ERROR, now, error=error)
    return plan


def _alive(batch: Batch, plan: Plan) -> Mask:
    """By slot: whether it was planned and still holds the sequence of then."""
    alive = np.zeros(batch.max_num_seqs, bool)
    alive[plan.prefill_slots] = batch.attempt[plan.prefill_slots] == plan.prefill_attempts
    alive[plan.sampled.slots] = batch.attempt[plan.sampled.slots] == plan.sampled.attempts
    return alive


def _match(batch: Batch, plan: Plan, result: Result, alive: Mask) -> list[tuple[Sequence, KvernError]]:
    """The sequences that the step broke. They no longer count as alive: their blocks may hold anything."""
    errors = []
    planned = {*plan.prefill_slots, *plan.sampled.slots.tolist()}
    for slot_error in result.errors:
        slot = slot_error.slot
        if slot not in planned:
            raise ProtocolError(f"step {plan.step}: an error for slot {slot}, which it did not compute")
        sequence = batch.sequences[slot]
        if alive[slot] and sequence is not None:
            alive[slot] = False
            error = KvernError.from_pb(slot_error.error)
            error.code = error.code or error_pb2.ERROR_CODE_INTERNAL
            errors.append((sequence, error))
    return errors


def _sampled(
    batch: Batch, plan: Plan, result: Result, alive: Mask | None
) -> tuple[Cohort, npt.NDArray[np.int32]]:
    """The sequences that have a new token, and those tokens. Raises ProtocolError where they are not the plan's."""
    sampled, tokens = plan.sampled, result.tokens
    if result.errors:
        sampled = sampled.only(~np.isin(sampled.slots, [error.slot for error in result.errors]))
    if result.slots != sampled.packed or tokens.size != sampled.size:
        raise ProtocolError(f"step {plan.step}: sampled slots are not those of the plan")
    # A negative one is a large one, too.
    if np.count_nonzero(tokens.view(np.uint32) >= batch.vocab_size):
        raise ProtocolError(f"step {plan.step} sampled a token outside the vocabulary of {batch.vocab_size}")
    if alive is not None:
        keep = alive[sampled.slots]
        return sampled.only(keep), tokens[keep]
    return sampled, tokens


def _embeddings(group: Group, result: Result) -> dict[int, bytes]:
    """By slot. Raises ProtocolError where they are not one vector for each."""
    slots, size = np.frombuffer(result.slots, np.uint32).tolist(), 4 * group.model.pooling.size
    if len(result.embeddings) != size * len(slots):
        raise ProtocolError(
            f"step {result.step}: {len(result.embeddings)} bytes of embeddings for {len(slots)} sequences"
        )
    return {slot: result.embeddings[size * at : size * (at + 1)] for at, slot in enumerate(slots)}


def _free_unseen(group: Group, plan: Plan, sampled: Cohort, alive: Mask | None) -> None:
    """Gives back the blocks before the windows of the positions that come next. A plan in flight reads none of them, and
    those planned from here on, which may write to them, run after it."""
    batch = group.batch
    count = plan.num_unsampled
    slots = np.array(plan.prefill_slots[:count], np.intp)
    computed = np.array(plan.prefill_ends[:count], np.int64)
    if alive is not None:
        computed, slots = computed[alive[slots]], slots[alive[slots]]
    # The newest token of the others is not computed yet.
    slots = np.concatenate([slots, sampled.slots])
    computed = np.concatenate([computed, batch.num_tokens[sampled.slots] - 1])
    seen = np.maximum(computed - group.model.sliding_window + 1, 0)
    for blocks in batch.free_before(slots, seen // group.block_size):
        group.pool.release(blocks)


def _append(group: Group, sampled: Cohort, tokens: npt.NDArray[np.int32]) -> tuple[list[int], Mask]:
    """One more token for each of ``sampled``. Returns the positions of those that ended, and which have an end or stop
    token."""
    batch, slots = group.batch, sampled.slots
    positions = batch.num_tokens[slots]
    lengths = positions + 1
    batch.recent[slots, positions % batch.recent.shape[1]] = tokens
    batch.num_tokens[slots] = lengths
    stopped = batch.is_eos[tokens]
    if np.count_nonzero(stopped):
        stopped &= ~batch.ignore_eos[slots]
    if batch.num_with_stop_ids:
        asking = batch.has_stop_ids[slots].nonzero()[0]
        stopped[asking] |= (batch.stop_ids[slots[asking]] == tokens[asking, None]).any(axis=1)
    ended = lengths >= sampled.max_len
    if np.count_nonzero(stopped):
        stopped &= lengths >= batch.min_len[slots]
        ended |= stopped
    if slots.size:
        indexes = (positions - sampled.num_prompt).astype(np.uint32)
        group.changes.tokens.append(Tokens(sampled.rows, sampled.seq_nos, indexes, tokens))
    return ended.nonzero()[0].tolist() if np.count_nonzero(ended) else [], stopped


def _note_first_tokens(group: Group, plan: Plan, alive: Mask | None, now: float) -> None:
    """For the sequences that end their prefill in this step: the time, and their siblings' turn."""
    for slot in plan.prefill_slots[plan.num_unsampled :]:
        sequence = group.batch.sequences[slot]
        if sequence is None or not (alive is None or alive[slot]):
            continue
        sequence.first_token = sequence.first_token or now
        group.journal.note(sequence, Kind.PREFILLED, group.index, plan.step)
        if sequence.request.waiting_siblings:
            group.release_siblings(sequence)


def _complete_prefilled(group: Group, plan: Plan, alive: Mask | None) -> None:
    """Indexes the blocks that chunks have filled."""
    size = group.block_size
    for slot, length, end in zip(plan.prefill_slots, plan.prefill_lengths, plan.prefill_ends, strict=True):
        first, until = (end - length) // size, end // size
        if first < until and (alive is None or alive[slot]):
            _index_blocks(group, slot, first, until)


def _index_blocks(group: Group, slot: int, first: int, until: int) -> None:
    """Indexes blocks whose tokens are in the sequence's log."""
    if not group.limits.enable_prefix_caching:
        return
    sequence = group.batch.sequences[slot]
    assert sequence is not None
    sequence.extend_hashes(until, group.block_size)
    group.index_blocks(group.batch.table[slot, first:until], sequence.hashes[first:until])


def _complete_decoded(group: Group, plan: Plan, alive: Mask | None) -> None:
    """The blocks that this step filled, one for about one in block_size of the decoding sequences: into the index, and
    what fills the ring into the logs."""
    batch, size = group.batch, group.block_size
    slots, num_blocks = plan.filled_slots, plan.filled_blocks
    if alive is not None:
        slots, num_blocks = slots[alive[slots]], num_blocks[alive[slots]]
    for slot in slots[
        batch.num_tokens[slots] - batch.num_logged[slots] >= batch.recent.shape[1] - size
    ].tolist():
        batch.flush(slot)
    if not group.limits.enable_prefix_caching:
        return
    chained, chains, extras = [], [], []
    for position, (slot, count) in enumerate(zip(slots.tolist(), num_blocks.tolist(), strict=True)):
        sequence = batch.sequences[slot]
        assert sequence is not None
        if 1 < count == len(sequence.hashes) + 1:
            chained.append(position)
            chains.append(sequence.hashes)
            extras.append(sequence.extra_keys(count - 1, size))
        else:  # a first block, or blocks before it were never hashed
            batch.flush(slot)
            _index_blocks(group, slot, count - 1, count)
    if not chained:
        return
    slots, last = slots[chained], num_blocks[chained] - 1
    positions = (last * size)[:, None] + np.arange(size)
    tokens = batch.recent[slots[:, None], positions % batch.recent.shape[1]]
    hashes = hash_blocks([chain[-1] for chain in chains], tokens, extras)
    for chain, block_hash in zip(chains, hashes, strict=True):
        chain.append(block_hash)
    group.index_blocks(batch.table[slots, last], hashes)


def _complete_saves(group: Group, states: BlockPool, saves: Saves, alive: Mask | None) -> None:
    """Indexes the checkpoints of states, under the hash of the last block before each."""
    kept, hashes = [], []
    for position, (slot, count) in enumerate(zip(saves.slots, saves.num_blocks, strict=True)):
        sequence = group.batch.sequences[slot]
        if sequence is not None and (alive is None or alive[slot]):
            kept.append(position)
            hashes.append(sequence.hashes[count - 1])
    group.index_blocks(saves.blocks[kept], hashes, states, first=group.pool.num_blocks)
    states.release(saves.blocks)


def _finish(group: Group, slot: int, token: int, stopped: bool, now: float) -> None:
    sequence = group.batch.sequences[slot]
    assert sequence is not None
    if not stopped:
        group.finish(sequence, sampling_pb2.FINISH_REASON_LENGTH, now)
        return
    is_end = bool(group.batch.is_eos[token]) and not group.batch.ignore_eos[slot]
    group.finish(sequence, sampling_pb2.FINISH_REASON_STOP, now, stop_token_id=None if is_end else token)


def _take_logprobs(group: Group, plan: Plan, result: Result, alive: Mask | None) -> None:
    """Before the tokens are appended: the sampled one gets the index that the sequence's length gives."""
    batch = group.batch
    alive = _alive(batch, plan) if alive is None else alive
    for entry in result.logprobs:
        sequence = batch.sequences[entry.slot] if alive[entry.slot] else None
        if sequence is None:
            continue
        _take_prompt_logprobs(group, sequence, entry)
        if entry.HasField("sampled"):
            index = int(batch.num_tokens[entry.slot] - batch.num_prompt[entry.slot])
            group.changes.logprobs.append(Logprobs(sequence, index, False, [entry.sampled]))


def _take_prompt_logprobs(group: Group, sequence: Sequence, entry: worker_pb2.SlotLogprobs) -> None:
    """A recomputed prompt gives the same ones again; only the new ones are passed on."""
    known = sequence.num_prompt_logprobs - entry.first_prompt_index
    fresh = list(entry.prompt[max(0, known) :])
    if fresh:
        first = entry.first_prompt_index + max(0, known)
        group.changes.logprobs.append(Logprobs(sequence, first, True, fresh))
        sequence.num_prompt_logprobs = first + len(fresh)
