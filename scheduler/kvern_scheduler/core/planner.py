"""Fills one step of a group: decodes first, then prefill chunks in order of rank, within one token budget.

Blocks for all known tokens of a sequence are taken when it enters, so a prefill never waits halfway for memory; only
decodes grow, one block at a time. When the pool is short the worst-ranked sequence is preempted. A sequence that was
preempted ``max_preemptions`` times enters again only with its whole length reserved, and is *protected* from then on:
so every sequence finishes, since none is admitted that could not run alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvern_scheduler.core.batch import Cohort
from kvern_scheduler.core.blocks import BlockPool
from kvern_scheduler.core.group import Group
from kvern_scheduler.core.journal import Blocked, Kind
from kvern_scheduler.core.plan import Entry, Plan, Saves
from kvern_scheduler.core.requests import Sequence, State
from kvern_scheduler.core.tiers import Tiers

Slots = npt.NDArray[np.intp]

MAX_LOADS = 3
"""What was loaded may be evicted before its sequence gets a slot: after so many loads it is computed instead."""


def plan_step(group: Group, now: float) -> Plan | None:
    """The next step, or None when there is nothing to compute or too much in flight. ``now``: Unix seconds."""
    if len(group.in_flight) >= group.limits.max_plans_in_flight:
        return None
    decoders, grown = _grow_decoders(group)
    plan = Plan(group.step + 1, decoders, decoders, planned=now)
    if grown.size:
        plan.append_slots = grown.astype(np.uint32)
        plan.append_blocks = group.batch.table[grown, group.batch.num_blocks[grown] - 1]
        plan.append_generations = group.pool.generations[plan.append_blocks]
    chunks: dict[int, int] = {}
    if group.prefilling or group.queue.num_waiting:
        budget = group.limits.max_num_batched_tokens - decoders.size
        chunks = _plan_prefills(group, plan, budget, now)
        if group.queue.has_parked:
            group.assign_adapters()
    if group.tiers is not None:
        group.tiers.store(group.num_unreserved - group.batch.num_running)
        plan.transfers = group.tiers.take_planned()
    if not decoders.size and not chunks and not plan.transfers:
        return None
    plan.released, group.released = group.released, []
    plan.filled_slots = group.batch.schedule(decoders)
    plan.filled_blocks = group.batch.num_blocks[plan.filled_slots]
    if chunks:
        _schedule_chunks(group, plan, chunks)
    if group.states is not None and group.limits.enable_prefix_caching:
        plan.saves = _plan_saves(group, group.states, plan)
    plan.num_departures = group.batch.num_departures
    group.step += 1
    group.in_flight.append(plan)
    return plan


def _grow_decoders(group: Group) -> tuple[Cohort, Slots]:
    """The sequences that decode in this step, each with a block for the position it writes, and the slots of those that
    got a new one for it. There are never more than the token budget allows, since slots are not."""
    batch, pool = group.batch, group.pool
    while True:
        decoders = batch.decoders()
        growing = decoders.slots[batch.room[decoders.slots] == 0]
        if not growing.size:
            return decoders, growing
        promised = batch.reserved[growing] > 0
        if growing.size - np.count_nonzero(promised) <= group.num_unreserved:
            break
        victims = np.flatnonzero(batch.active & ~batch.protected)
        group.preempt(batch.worst(victims))
    batch.append_blocks(growing, pool.allocate(growing.size))
    if group.num_reserved:
        batch.reserved[growing[promised]] -= 1
        group.num_reserved -= int(np.count_nonzero(promised))
    return decoders, growing


def _plan_prefills(group: Group, plan: Plan, budget: int, now: float) -> dict[int, int]:
    """Slot → tokens of its chunk. Long prompts get a threshold's worth at first, and what the others leave."""
    batch, threshold = group.batch, group.limits.long_threshold
    chunks: dict[int, int] = {}
    long: list[int] = []

    def give(slot: int) -> None:
        nonlocal budget
        left = int(batch.num_tokens[slot]) - batch.num_scheduled(slot)
        if left > threshold:
            long.append(slot)
        chunk = min(left, threshold, budget)
        if chunk > 0:
            chunk = group.clip(batch.num_scheduled(slot), chunk)
            chunks[slot] = chunk
            budget -= chunk

    for slot in sorted(group.prefilling, key=lambda slot: batch.sequences[slot].rank):  # type: ignore[union-attr]
        give(slot)
    while budget > 0 and batch.free_slots:
        sequence = group.queue.peek(allow_long=len(long) < group.limits.max_long_prefills)
        if sequence is None:
            blocked = _why_none(group)
            break
        if group.whole_prompts and sequence.num_tokens > budget:
            blocked = Blocked.TOKENS
            break
        if not plan.takes_media(sequence):
            break
        if (adapter := sequence.request.submission.adapter) and group.adapters.find(adapter) is None:
            group.queue.park(sequence, adapter)
            continue
        if group.tiers is not None and _load(group, group.tiers, sequence):
            continue
        entry = _admit(group, sequence, now)
        if entry is None:
            blocked = Blocked.BLOCKS
            break
        plan.entries.append(entry)
        give(entry.slot)
    else:
        blocked = Blocked.TOKENS if batch.free_slots else Blocked.SLOTS
    if group.queue.num_waiting:
        plan.blocked = blocked
    for slot in long:
        left = int(batch.num_tokens[slot]) - batch.num_scheduled(slot)
        given = chunks.get(slot, 0)
        extra = min(left - given, budget)
        if extra > 0:
            chunks[slot] = group.clip(batch.num_scheduled(slot), given + extra)
            budget -= chunks[slot] - given
    return chunks


def _admit(group: Group, sequence: Sequence, now: float) -> Entry | None:
    """Gives ``sequence`` a slot and blocks for all its tokens; None when the pool has no room for it yet."""
    batch, pool, size = group.batch, group.pool, group.block_size
    num_tokens = sequence.num_tokens
    hits, state_block = _prefix_hit(group, sequence)
    wanted = -(-num_tokens // size) - len(hits)
    reserve = _reserve(group, sequence)
    if not _has_room(group, sequence, hits):
        return None
    group.queue.pop(sequence)
    pool.share(hits)
    if group.states is not None and state_block is not None:
        group.states.touch(state_block)
    blocks = np.concatenate([np.array(hits, np.uint32), pool.allocate(wanted)])
    tokens = sequence.tokens()
    slot = batch.enter(sequence, tokens, blocks, len(hits) * size)
    adapter_slot = _enter_adapter(group, slot, sequence)
    batch.reserved[slot] = reserve
    batch.protected[slot] = _is_protected(group, sequence)
    sequence.num_loads = 0
    group.num_reserved += reserve
    group.num_prefix_queries += num_tokens
    if group.tiers is not None:
        group.tiers.num_queries += num_tokens - len(hits) * size
    group.num_prefix_hits += len(hits) * size
    group.prefilling[slot] = None
    sequence.state = State.RUNNING
    group.journal.note(sequence, Kind.ADMITTED, group.index, group.step + 1, len(hits) * size, blocks.size)
    if not sequence.first_scheduled:
        sequence.first_scheduled = now
        sequence.num_cached_tokens = min(len(hits) * size, sequence.num_prompt)
    generations = pool.generations[blocks]
    return Entry(slot, sequence, tokens, len(hits) * size, blocks, generations, state_block, adapter_slot)


def _is_protected(group: Group, sequence: Sequence) -> bool:
    return sequence.num_preemptions >= group.limits.max_preemptions


def _reserve(group: Group, sequence: Sequence) -> int:
    """Blocks promised to the sequence when it enters, beside those for the tokens it has."""
    if not _is_protected(group, sequence):
        return 0
    size = group.block_size
    # The last token is never computed: its position needs no block.
    return max(0, -(-(sequence.max_len - 1) // size) - -(-sequence.num_tokens // size))


def _has_room(group: Group, sequence: Sequence, hits: list[int]) -> bool:
    """Whether there are blocks for all its tokens, ``hits`` among them."""
    wanted = -(-sequence.num_tokens // group.block_size) - len(hits)
    # Each running sequence takes another block soon: leave one, or the newcomer is preempted at once.
    headroom = group.batch.num_running
    available = group.num_unreserved - group.pool.count_idle(hits)
    return wanted + _reserve(group, sequence) + headroom <= available


def _why_none(group: Group) -> Blocked:
    """Why what waits holds nothing that may enter."""
    if not group.queue.has_parked:
        return Blocked.LONG_PROMPTS
    return Blocked.LOADING if group.tiers is not None and group.tiers.num_loading else Blocked.ADAPTER


def _load(group: Group, tiers: Tiers, sequence: Sequence) -> bool:
    """Has the sequence wait until the blocks that continue its prefix are loaded from a tier, if there are any. When they
    have come it queues again, and finds them in the prefix index."""
    if sequence.num_loads >= MAX_LOADS:
        return False
    hits, _ = _prefix_hit(group, sequence)
    limit = (sequence.num_tokens - 1) // group.block_size
    rest = sequence.hashes[len(hits) : limit] if _may_hit(group, sequence) else []
    if not rest:
        return False
    load = tiers.loading(rest[0])
    if load is None:
        found = tiers.find(rest, len(rest))
        # One that another load brings is waited for next time.
        found = found[: next((i for i, h in enumerate(found) if tiers.loading(h)), len(found))]
        many = tiers.num_loading >= len(group.batch.free_slots)
        if not found or many or not _has_room(group, sequence, hits):
            return False
        sequence.num_loads += 1
        tiers.num_hits += len(found) * group.block_size
        tiers.num_queries += len(found) * group.block_size
        load = tiers.load(hits, found)
    group.queue.park(sequence, load)
    return True


def _enter_adapter(group: Group, slot: int, sequence: Sequence) -> int:
    """1 + the slot of the sequence's adapter, which it holds from now on; 0 where it has none."""
    adapter = sequence.request.submission.adapter
    found = group.adapters.find(adapter) if adapter else None
    if found is None:
        return 0
    group.adapters.enter(found)
    group.batch.adapter_slot[slot] = found + 1
    return found + 1


def _prefix_hit(group: Group, sequence: Sequence) -> tuple[list[int], int | None]:
    """Indexed blocks that hold the sequence's first tokens, and of a hybrid the state after them; at least one token is
    left to compute."""
    if not _may_hit(group, sequence):
        return [], None
    limit = (sequence.num_tokens - 1) // group.block_size
    if sequence.output:
        sequence.extend_hashes(limit, group.block_size)
    return group.match(sequence.hashes, limit)


def _may_hit(group: Group, sequence: Sequence) -> bool:
    """Whether what is cached of it may be used: not where the log-probabilities of its prompt are asked for."""
    asks = sequence.request.submission.params.HasField("prompt_logprobs") and not sequence.output
    return group.limits.enable_prefix_caching and not asks


def _schedule_chunks(group: Group, plan: Plan, chunks: dict[int, int]) -> None:
    """Writes the chunks into the batch and the plan. Those that end their prompt sample, and decode from then on."""
    batch = group.batch
    ending: list[int] = []
    note, index, step = group.journal.note, group.index, plan.step
    for slot, length in chunks.items():
        batch.room[slot] -= length
        note(batch.sequences[slot], Kind.CHUNK, index, step, length, batch.num_scheduled(slot))  # type: ignore[arg-type]
        if batch.num_scheduled(slot) == batch.num_tokens[slot]:
            ending.append(slot)
            batch.start_decoding(slot)
            del group.prefilling[slot]
    unsampled = [slot for slot in chunks if slot in group.prefilling]
    plan.prefill_slots = unsampled + ending
    plan.prefill_lengths = [chunks[slot] for slot in plan.prefill_slots]
    plan.prefill_ends = [batch.num_scheduled(slot) for slot in plan.prefill_slots]
    plan.prefill_attempts = batch.attempt[plan.prefill_slots].tolist()
    plan.num_unsampled = len(unsampled)
    if ending:
        plan.sampled = batch.cohort(np.concatenate([np.array(ending, np.intp), plan.decoded.slots]))


def _plan_saves(group: Group, states: BlockPool, plan: Plan) -> Saves:
    """Checkpoints of the states that stand at a multiple of their block size after the step: of those that the index
    does not know, as many as there is room for."""
    each = states.block_size // group.block_size
    saves = Saves()
    ends = [*zip(plan.prefill_slots, plan.prefill_ends, strict=True)]
    filled = [*zip(plan.filled_slots.tolist(), plan.filled_blocks.tolist(), strict=True)]
    at = [(slot, end // group.block_size) for slot, end in ends if end % states.block_size == 0]
    at += [(slot, count) for slot, count in filled if count % each == 0]
    for slot, count in at:
        sequence = group.batch.sequences[slot]
        assert sequence is not None
        known = states.match(sequence.hashes[count - 1 : count], 1)
        if not known and len(saves.slots) < states.num_available:
            saves.slots.append(slot)
            saves.num_blocks.append(count)
    saves.blocks = states.allocate(len(saves.slots))
    saves.generations = states.generations[saves.blocks]
    return saves
