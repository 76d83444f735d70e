"""Fills one step of a group: decodes first, then prefill chunks in order of rank, within one token budget.

Blocks for all known tokens of a sequence are taken when it enters, so a prefill never waits halfway for memory; only
decodes grow, one block at a time. When the pool is short the worst-ranked sequence is preempted. A sequence that was
preempted ``max_preemptions`` times enters again only with its whole length reserved, and is *protected* from then on:
so every sequence finishes, since none is admitted that could not run alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvern_scheduler.core.group import Group
from kvern_scheduler.core.plan import Entry, Plan
from kvern_scheduler.core.requests import Sequence, State

Slots = npt.NDArray[np.intp]


def plan_step(group: Group, now: float) -> Plan | None:
    """The next step, or None when there is nothing to compute or too much in flight. ``now``: Unix seconds."""
    if len(group.in_flight) >= group.limits.max_plans_in_flight:
        return None
    plan = Plan(group.step + 1)
    decodes = _grow_decodes(group, plan)
    budget = group.limits.max_num_batched_tokens - decodes.size
    chunks = _plan_prefills(group, plan, budget, now) if group.prefilling or group.queue.num_waiting else {}
    if not decodes.size and not chunks:
        return None
    plan.released, group.released = group.released, []
    _schedule(group, plan, chunks, decodes)
    group.step += 1
    group.in_flight.append(plan)
    return plan


def _grow_decodes(group: Group, plan: Plan) -> Slots:
    """The slots that decode in this step, each with a block for the position it writes."""
    batch, pool = group.batch, group.pool
    while True:
        slots = np.flatnonzero(batch.decoding & (batch.num_expected < batch.max_len))
        slots = slots[: group.limits.max_num_batched_tokens]
        growing = slots[batch.num_scheduled[slots] >= batch.capacity[slots]]
        if not growing.size:
            return slots
        promised = batch.reserved[growing] > 0
        if growing.size - np.count_nonzero(promised) <= group.num_unreserved:
            break
        victims = np.flatnonzero(batch.active & ~batch.protected)
        group.preempt(batch.worst(victims))
    blocks = pool.allocate(growing.size)
    batch.append_blocks(growing, blocks)
    if group.num_reserved:
        batch.reserved[growing[promised]] -= 1
        group.num_reserved -= int(np.count_nonzero(promised))
    plan.append_slots = growing.astype(np.uint32)
    plan.append_blocks = blocks
    plan.append_generations = pool.generations[blocks]
    return slots


def _plan_prefills(group: Group, plan: Plan, budget: int, now: float) -> dict[int, int]:
    """Slot → tokens of its chunk. Long prompts get a threshold's worth at first, and what the others leave."""
    batch, threshold = group.batch, group.limits.long_threshold
    chunks: dict[int, int] = {}
    long: list[int] = []

    def give(slot: int) -> None:
        nonlocal budget
        left = int(batch.num_tokens[slot] - batch.num_scheduled[slot])
        if left > threshold:
            long.append(slot)
        chunk = min(left, threshold, budget)
        if chunk > 0:
            chunks[slot] = chunk
            budget -= chunk

    for slot in sorted(group.prefilling, key=lambda slot: batch.sequences[slot].rank):  # type: ignore[union-attr]
        give(slot)
    while budget > 0 and batch.free_slots:
        sequence = group.queue.peek(allow_long=len(long) < group.limits.max_long_prefills)
        if sequence is None:
            break
        entry = _admit(group, sequence, now)
        if entry is None:
            break
        plan.entries.append(entry)
        give(entry.slot)
    for slot in long:
        extra = min(int(batch.num_tokens[slot] - batch.num_scheduled[slot]) - chunks.get(slot, 0), budget)
        if extra > 0:
            chunks[slot] = chunks.get(slot, 0) + extra
            budget -= extra
    return chunks


def _admit(group: Group, sequence: Sequence, now: float) -> Entry | None:
    """Gives ``sequence`` a slot and blocks for all its tokens; None when the pool has no room for it yet."""
    batch, pool, size = group.batch, group.pool, group.block_size
    num_tokens = sequence.num_tokens
    hits = _prefix_hit(group, sequence)
    wanted = -(-num_tokens // size) - len(hits)
    protect = sequence.num_preemptions >= group.limits.max_preemptions
    # The last token is never computed: its position needs no block.
    reserve = max(0, -(-(sequence.max_len - 1) // size) - len(hits) - wanted) if protect else 0
    # Each running sequence takes another block soon: leave one, or the newcomer is preempted at once.
    headroom = batch.num_running
    if wanted + reserve + headroom > group.num_unreserved - pool.count_idle(hits):
        return None
    group.queue.pop(sequence)
    pool.share(hits)
    blocks = np.concatenate([np.array(hits, np.uint32), pool.allocate(wanted)])
    tokens = sequence.tokens()
    slot = batch.enter(sequence, tokens, blocks, len(hits) * size)
    batch.reserved[slot] = reserve
    batch.protected[slot] = protect
    group.num_reserved += reserve
    group.num_prefix_queries += num_tokens
    group.num_prefix_hits += len(hits) * size
    group.prefilling[slot] = None
    sequence.state = State.RUNNING
    if not sequence.first_scheduled:
        sequence.first_scheduled = now
        sequence.num_cached_tokens = min(len(hits) * size, sequence.num_prompt)
    return Entry(slot, sequence, tokens, len(hits) * size, blocks, pool.generations[blocks])


def _prefix_hit(group: Group, sequence: Sequence) -> list[int]:
    """Indexed blocks that hold the sequence's first tokens; at least one token is left to compute."""
    if not group.limits.enable_prefix_caching:
        return []
    if sequence.request.submission.params.HasField("prompt_logprobs") and not sequence.output:
        return []
    limit = (sequence.num_tokens - 1) // group.block_size
    if sequence.output:
        sequence.extend_hashes(limit, group.block_size)
    return group.pool.match(sequence.hashes, limit)


def _schedule(group: Group, plan: Plan, chunks: dict[int, int], decodes: Slots) -> None:
    """Writes the chunks and decodes into the batch and the plan."""
    batch = group.batch
    ending: list[int] = []
    for slot, length in chunks.items():
        batch.num_scheduled[slot] += length
        if batch.num_scheduled[slot] == batch.num_tokens[slot]:
            ending.append(slot)
            batch.num_expected[slot] += 1
            batch.decoding[slot] = True
            del group.prefilling[slot]
    unsampled = [slot for slot in chunks if slot in group.prefilling]
    plan.prefill_slots = unsampled + ending
    plan.prefill_lengths = [chunks[slot] for slot in plan.prefill_slots]
    plan.num_unsampled = len(unsampled)
    plan.num_prefilled = len(ending)
    batch.num_scheduled[decodes] += 1
    batch.num_expected[decodes] += 1
    plan.decode_slots = decodes.astype(np.uint32)
    plan.slots = np.concatenate([np.array(plan.prefill_slots, np.intp), decodes]) if chunks else decodes
    plan.attempts = batch.attempt[plan.slots]
    plan.computed_to = batch.num_scheduled[plan.slots]
