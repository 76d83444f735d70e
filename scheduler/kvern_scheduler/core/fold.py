"""Folds a step's result into the batch: tokens, ends, full blocks.

A sequence may have left its slot since the step was planned (finished by the step before, cancelled, preempted). Its
slot's attempt counter has then moved on, and that part of the result is ignored.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvern.block_hash import hash_block
from kvern.v1 import error_pb2, sampling_pb2, worker_pb2
from kvern_scheduler.core.changes import Indexed, Logprobs, Tokens
from kvern_scheduler.core.errors import ProtocolError, RequestError
from kvern_scheduler.core.group import Group
from kvern_scheduler.core.plan import Plan, Result
from kvern_scheduler.core.requests import Sequence

Slots = npt.NDArray[np.intp]


def fold_step(group: Group, result: Result, now: float) -> Plan:
    """Applies the result of the oldest plan in flight, and returns that plan. Raises ProtocolError where the result
    does not answer it: the group's batch is then unknown, and must be given up."""
    if not group.in_flight or group.in_flight[0].step != result.step:
        expected = group.in_flight[0].step if group.in_flight else "none"
        raise ProtocolError(f"result of step {result.step}, expected {expected}")
    plan = group.in_flight[0]
    batch = group.batch
    live = batch.attempt[plan.slots] == plan.attempts
    errors = _match(group, plan, result, live) if result.errors else []
    slots, tokens = _sampled(plan, result)
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= batch.vocab_size):
        raise ProtocolError(
            f"step {result.step} sampled a token outside the vocabulary of {batch.vocab_size}"
        )
    group.in_flight.popleft()

    all_live = bool(live.all())
    computed = plan.slots if all_live else plan.slots[live]
    batch.num_done[computed] = plan.computed_to if all_live else plan.computed_to[live]
    if not all_live or errors:
        keep = _alive(group, plan, slots, live)
        slots, tokens = slots[keep], tokens[keep]
    if result.logprobs:
        _take_logprobs(group, plan, result, live)
    if plan.num_prefilled:
        _note_first_tokens(group, plan, now)
    ended, stopped = _append(group, slots, tokens)
    _complete_blocks(group, computed)
    for index in np.flatnonzero(ended).tolist():
        _finish(group, int(slots[index]), int(tokens[index]), bool(stopped[index]), now)
    for sequence, error in errors:
        group.finish(sequence, sampling_pb2.FINISH_REASON_ERROR, now, error=error)
    return plan


def _sampled(plan: Plan, result: Result) -> tuple[Slots, npt.NDArray[np.int32]]:
    """The slots that sampled and their tokens, checked against the plan."""
    expected = plan.slots[plan.num_unsampled :]
    if result.errors:
        failed = [error.slot for error in result.errors]
        expected = expected[~np.isin(expected, failed)]
    if result.slots.size != expected.size or result.tokens.size != expected.size:
        raise ProtocolError(
            f"step {plan.step}: {result.slots.size} slots and {result.tokens.size} tokens for {expected.size}"
        )
    if not (result.slots == expected).all():
        raise ProtocolError(f"step {plan.step}: sampled slots are not those of the plan")
    return expected, result.tokens


def _match(
    group: Group, plan: Plan, result: Result, live: npt.NDArray[np.bool_]
) -> list[tuple[Sequence, RequestError]]:
    """The sequences that the step broke. They no longer count as live: their blocks may hold anything."""
    errors = []
    for slot_error in result.errors:
        positions = np.flatnonzero(plan.slots == slot_error.slot)
        if not positions.size:
            raise ProtocolError(
                f"step {plan.step}: an error for slot {slot_error.slot}, which it did not compute"
            )
        position = int(positions[0])
        sequence = group.batch.sequences[slot_error.slot]
        if live[position] and sequence is not None:
            live[position] = False
            pb = slot_error.error
            code = pb.code or error_pb2.ERROR_CODE_INTERNAL
            error = RequestError(code, pb.message, field=pb.field, value=pb.value, limit=pb.limit)
            errors.append((sequence, error))
    return errors


def _alive(group: Group, plan: Plan, slots: Slots, live: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which of ``slots`` still hold the sequence that was planned."""
    by_slot = np.zeros(group.batch.max_num_seqs, bool)
    by_slot[plan.slots] = live
    return by_slot[slots]


def _append(
    group: Group, slots: Slots, tokens: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """One more token for each of ``slots``. Returns which ended, and which of those by an end or stop token."""
    batch = group.batch
    positions = batch.num_tokens[slots]
    batch.recent[slots, positions % batch.recent.shape[1]] = tokens
    lengths = positions + 1
    batch.num_tokens[slots] = lengths
    stopped = batch.is_eos[tokens] & ~batch.ignore_eos[slots]
    if batch.num_with_stop_ids:
        asking = np.flatnonzero(batch.has_stop_ids[slots])
        stopped[asking] |= (batch.stop_ids[slots[asking]] == tokens[asking, None]).any(axis=1)
    stopped &= lengths >= batch.min_len[slots]
    if slots.size:
        group.changes.tokens.append(
            Tokens(
                batch.row[slots],
                batch.seq_no[slots],
                (positions - batch.num_prompt[slots]).astype(np.uint32),
                tokens,
            )
        )
    return stopped | (lengths >= batch.max_len[slots]), stopped


def _note_first_tokens(group: Group, plan: Plan, now: float) -> None:
    """For the sequences that end their prefill in this step: the time, and their siblings' turn."""
    for index in range(plan.num_unsampled, plan.num_unsampled + plan.num_prefilled):
        slot = int(plan.slots[index])
        sequence = group.batch.sequences[slot]
        if sequence is None or group.batch.attempt[slot] != plan.attempts[index]:
            continue
        sequence.first_token = sequence.first_token or now
        if sequence.request.waiting_siblings:
            group.release_siblings(sequence)


def _complete_blocks(group: Group, computed: Slots) -> None:
    """Logs and indexes the blocks that this step filled: about one in block_size of the decoding sequences."""
    batch, size = group.batch, group.block_size
    full = batch.num_done[computed] // size
    filling = full > batch.num_full[computed]
    if not filling.any():
        return
    slots, until = computed[filling], full[filling]
    # Decoding fills one block, whose tokens are all among the recent ones; a prefill may fill many.
    first = batch.num_full[slots]
    one = (until == first + 1) & (batch.num_tokens[slots] == until * size + 1)
    for slot, start, end in zip(
        slots[~one].tolist(), first[~one].tolist(), until[~one].tolist(), strict=True
    ):
        _index_blocks(group, slot, start, end)
    if one.any():
        _complete_decoded(group, slots[one], until[one])
    batch.num_full[slots] = until


def _index_blocks(group: Group, slot: int, first: int, until: int) -> None:
    """Indexes blocks whose tokens are in the sequence's log."""
    if not group.limits.enable_prefix_caching:
        return
    batch = group.batch
    sequence = batch.sequences[slot]
    assert sequence is not None
    sequence.extend_hashes(until, group.block_size)
    _enter(group, batch.table[slot, first:until].tolist(), sequence.hashes[first:until])


def _complete_decoded(group: Group, slots: Slots, until: npt.NDArray[np.int64]) -> None:
    """One full block for each of ``slots``, from the recent tokens: into the log and the index."""
    batch, size = group.batch, group.block_size
    ends = until * size
    tokens = batch.recent[slots[:, None], (ends[:, None] + np.arange(-size, 0)) % batch.recent.shape[1]]
    packed = tokens.tobytes()
    sequences = [batch.sequences[slot] for slot in slots.tolist()]
    outputs = (ends - batch.num_prompt[slots]).tolist()
    end_of_row = 0
    for sequence, num_output in zip(sequences, outputs, strict=True):
        end_of_row += 4 * size
        output = sequence.output
        output.frombytes(packed[end_of_row - 4 * (num_output - len(output)) : end_of_row])
    if not group.limits.enable_prefix_caching:
        return
    hashes = []
    for sequence, token_ids, end in zip(sequences, tokens.tolist(), until.tolist(), strict=True):
        assert sequence is not None
        known = len(sequence.hashes)
        if known == end - 1 and known:
            sequence.add_hash(hash_block(sequence.hashes[-1], token_ids))
        elif known < end:
            sequence.extend_hashes(end, size)
        hashes.append(sequence.hashes[end - 1])
    _enter(group, batch.table[slots, until - 1].tolist(), hashes)


def _enter(group: Group, blocks: list[int], hashes: list[bytes]) -> None:
    """Indexes full, computed blocks, and tells the store of those that were new."""
    entered = group.pool.enter(blocks, hashes)
    if entered:
        indexed = [blocks[i] for i in entered]
        generations = group.pool.generations[indexed]
        group.changes.indexed.append(
            Indexed(group.index, np.array(indexed, np.uint32), generations, [hashes[i] for i in entered])
        )


def _finish(group: Group, slot: int, token: int, stopped: bool, now: float) -> None:
    sequence = group.batch.sequences[slot]
    assert sequence is not None
    if not stopped:
        group.finish(sequence, sampling_pb2.FINISH_REASON_LENGTH, now)
        return
    is_end = bool(group.batch.is_eos[token]) and not group.batch.ignore_eos[slot]
    group.finish(sequence, sampling_pb2.FINISH_REASON_STOP, now, stop_token_id=None if is_end else token)


def _take_logprobs(group: Group, plan: Plan, result: Result, live: npt.NDArray[np.bool_]) -> None:
    """Before the tokens are appended: the sampled one gets the index that the sequence's length gives."""
    batch = group.batch
    current = set(plan.slots[live].tolist())
    for entry in result.logprobs:
        sequence = batch.sequences[entry.slot] if entry.slot in current else None
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
