"""A worker group as the scheduler sees it: its pool, its batch, its queue, its plans in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvern.errors import KvernError
from kvern.v1 import model_pb2, sampling_pb2, worker_pb2
from kvern_scheduler.core.adapters import SlotTable
from kvern_scheduler.core.batch import Batch
from kvern_scheduler.core.blocks import BlockPool
from kvern_scheduler.core.changes import Changes, Indexed
from kvern_scheduler.core.errors import IntegrityError, ProtocolError
from kvern_scheduler.core.journal import Journal, Kind
from kvern_scheduler.core.plan import Plan
from kvern_scheduler.core.queue import WaitQueue
from kvern_scheduler.core.requests import Finish, Sequence, State
from kvern_scheduler.core.tiers import LOAD, Tiers

U32 = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Limits:
    """How a group's steps are filled, and how much may wait."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    """Prompts with more tokens left to compute are *long*. 0: a quarter of the token budget."""
    max_long_prefills: int = 2
    """Long prompts prefilled at the same time; others wait and short ones overtake them."""
    enable_prefix_caching: bool = True
    kv_offloading_policy: str = "lru"
    """What leaves the memory tier: one of eviction.POLICIES."""
    max_preemptions: int = 3
    """A sequence preempted this often next enters only with its whole length reserved, and stays."""
    max_queued_requests: int = 2048
    max_queued_tokens: int = 2_000_000
    max_plans_in_flight: int = 2
    max_groupless_s: float = 15.0
    """While no worker is there, new requests wait for one; after this long they are refused."""

    @property
    def long_threshold(self) -> int:
        return self.long_prefill_token_threshold or max(1, self.max_num_batched_tokens // 4)


class Group:
    """One copy of the model."""

    def __init__(
        self,
        index: int,
        model: model_pb2.ModelInfo,
        num_blocks: int,
        block_size: int,
        limits: Limits,
        changes: Changes,
        journal: Journal,
        num_state_blocks: int = 0,
        max_loras: int = 0,
        num_memory_blocks: int = 0,
        num_disk_blocks: int = 0,
    ) -> None:
        self.index = index
        self.model = model
        # Tokens that see each other are computed together, and no others have the same keys and values.
        self.whole_prompts = model.pooling.bidirectional
        if self.whole_prompts:
            limits = replace(
                limits,
                long_prefill_token_threshold=limits.max_num_batched_tokens,
                enable_prefix_caching=False,
            )
        self.limits = limits
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, block_size)
        # Of a hybrid: checkpoints of the states that its sequences have in their slots.
        self.states = BlockPool(num_state_blocks, model.state_block_size) if model.state_block_size else None
        self.tiers: Tiers | None = None
        if num_memory_blocks and limits.enable_prefix_caching and self.states is None:
            policy = limits.kv_offloading_policy
            self.tiers = Tiers(self.pool, policy, num_memory_blocks, num_disk_blocks)
        self.batch = Batch(model, limits.max_num_seqs, block_size)
        self.queue = WaitQueue(limits.long_threshold)
        self.changes = changes
        self.journal = journal
        self.adapters = SlotTable(max_loras)
        self.prefilling: dict[int, None] = {}
        self.released: list[int] = []
        self.in_flight: deque[Plan] = deque()
        self.step = 0
        # The newest step whose result is in.
        self.folded = 0
        # Blocks promised to protected sequences and not yet allocated.
        self.num_reserved = 0
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        # As the worker counts them: images computed, and those whose features it had.
        self.num_images = 0
        self.num_images_cached = 0

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the pool can hold."""
        return self.pool.num_blocks * self.block_size

    def can_hold(self, sequence: Sequence) -> bool:
        """Whether it could run here alone."""
        fits = sequence.max_len <= self.capacity_tokens
        return fits and (not sequence.request.submission.adapter or len(self.adapters) > 0)

    @property
    def load(self) -> int:
        """Tokens of work ahead, roughly: what waits or is being prefilled, and a few for each running sequence."""
        return self.pending_tokens + 16 * self.batch.num_running

    @property
    def pending_tokens(self) -> int:
        """Tokens of sequences that wait or are being prefilled, not yet computed."""
        left = sum(int(self.batch.num_tokens[s]) - self.batch.num_scheduled(s) for s in self.prefilling)
        return self.queue.num_tokens + left

    @property
    def num_unreserved(self) -> int:
        """Blocks that anyone may take."""
        return self.pool.num_available - self.num_reserved

    @property
    def has_room(self) -> bool:
        """Another plan may be sent, and there may be something to plan."""
        return len(self.in_flight) < self.limits.max_plans_in_flight and (
            self.queue.num_waiting > 0
            or self.batch.num_running > 0
            or (self.tiers is not None and self.tiers.has_work)
        )

    @property
    def pools(self) -> list[BlockPool]:
        """Their blocks one after the other are numbered as in the store's index and the worker's inventory."""
        return [self.pool] if self.states is None else [self.pool, self.states]

    def match(self, hashes: list[bytes], limit: int) -> tuple[list[int], int | None]:
        """The longest prefix, of at most ``limit`` blocks, that is known to all pools: its blocks, and of a hybrid the
        checkpoint of the state after it."""
        blocks = self.pool.match(hashes, limit)
        if self.states is None:
            return blocks, None
        each = self.states.block_size // self.block_size
        for count in range(len(blocks) // each * each, 0, -each):
            found = self.states.match(hashes[count - 1 : count], 1)
            if found:
                return blocks[:count], found[0]
        return [], None

    def clip(self, start: int, length: int) -> int:
        """A chunk's length so that it ends where the state can be kept, if such a place lies within it."""
        if self.states is None or not self.limits.enable_prefix_caching:
            return length
        size = self.states.block_size
        last = (start + length) // size * size
        return last - start if last > start else length

    def index_blocks(
        self, blocks: U32, hashes: list[bytes], pool: BlockPool | None = None, first: int = 0
    ) -> None:
        """Indexes full, computed blocks of ``pool`` (by default the one of keys and values), and tells the store, where
        block 0 of it is block ``first``, of those that were new."""
        own = pool is None
        pool = self.pool if pool is None else pool
        entered = pool.enter(blocks, hashes)
        if not entered:
            return
        indexed, new_hashes = blocks[entered], [hashes[i] for i in entered]
        numbers = indexed + np.uint32(first)
        self.changes.indexed.append(
            Indexed(self.index, numbers, pool.generations[indexed], b"".join(new_hashes))
        )
        if self.tiers is not None and own:
            self.tiers.indexed(indexed.tolist(), new_hashes)

    def transferred(self, done: worker_pb2.TransferDone, failed: set[int]) -> None:
        """The worker has done a transfer: what waited for it queues again. Raises ProtocolError."""
        if self.tiers is None:
            raise ProtocolError(f"transfer {done.id}: this group has no tiers")
        transfer = self.tiers.done(done, failed)
        if transfer.kind == LOAD:
            kept = [position for position in range(len(transfer.hashes)) if position not in failed]
            self.index_blocks(transfer.blocks[kept], [transfer.hashes[position] for position in kept])
        self.tiers.release(transfer)
        self.queue.put_back(self.queue.unpark(transfer))

    def enqueue(self, sequence: Sequence, cached: int = -1) -> None:
        """``cached``: tokens of it that routing found here, where it had a choice."""
        sequence.group = self
        self.journal.note(sequence, Kind.QUEUED, self.index, self.folded, cached, self.queue.num_tokens)
        self.queue.push(sequence)

    def vacate(self, slot: int) -> Sequence:
        """Takes the sequence out of its slot and gives its blocks back; the next plan tells the worker."""
        sequence = self.batch.sequences[slot]
        assert sequence is not None
        self.num_reserved -= int(self.batch.reserved[slot])
        if adapter_slot := int(self.batch.adapter_slot[slot]):
            self.adapters.leave(adapter_slot - 1, self.step)
            self.batch.adapter_slot[slot] = 0
        self.pool.release(self.batch.leave(slot))
        self.prefilling.pop(slot, None)
        self.released.append(slot)
        return sequence

    def preempt(self, slot: int) -> None:
        """Back to the queue with its outputs; its KV is recomputed, as far as the index forgets it."""
        sequence = self.vacate(slot)
        sequence.num_preemptions += 1
        self.journal.note(sequence, Kind.PREEMPTED, self.index, self.folded)
        self.num_preemptions += 1
        self.queue.push(sequence)

    def finish(
        self,
        sequence: Sequence,
        reason: sampling_pb2.FinishReason.ValueType,
        now: float,
        *,
        stop_token_id: int | None = None,
        error: KvernError | None = None,
        embedding: bytes = b"",
    ) -> None:
        """Ends a waiting or running sequence and says so in the changes."""
        if sequence.state is State.FINISHED:
            return
        if sequence.state is State.RUNNING:
            self.vacate(sequence.slot)
        elif sequence not in sequence.request.waiting_siblings:
            self.queue.forget(sequence)
        finish_sequence(
            sequence,
            reason,
            now,
            self.changes,
            self.journal,
            step=self.folded,
            stop_token_id=stop_token_id,
            error=error,
            embedding=embedding,
        )
        if sequence.choice == 0:
            self.release_siblings(sequence)

    def assign_adapters(self) -> None:
        """Slots for what waiting sequences need; ``adapters.loads`` says what the worker must be asked for."""
        oldest = self.in_flight[0].step if self.in_flight else self.step + 1
        self.adapters.assign(self.queue.awaited_adapters(), oldest)

    def adapter_placed(self, slot: int, number: int) -> None:
        """The worker has filled the slot: those that waited for it queue again."""
        self.adapters.ready(slot, number)
        self.queue.put_back(self.queue.unpark(number))

    def adapter_failed(self, slot: int, number: int, error: KvernError, now: float) -> None:
        """It could not: those that waited for it end."""
        self.adapters.clear(slot)
        for sequence in self.queue.unpark(number):
            self.finish(sequence, sampling_pb2.FINISH_REASON_ERROR, now, error=error)

    def release_siblings(self, first: Sequence) -> None:
        """Choice 0 has computed the prompt, or never will: the other choices queue now."""
        siblings, first.request.waiting_siblings = first.request.waiting_siblings, []
        for sibling in siblings:
            if sibling.state is State.WAITING:
                self.enqueue(sibling)

    def lose(self, *, keep_blocks: bool) -> list[Sequence]:
        """The worker's batch is gone. Returns all sequences, outputs kept, in order of rank; nothing is in flight any
        more. ``keep_blocks``: the worker itself lives, so the prefix index stays true."""
        for slot in np.flatnonzero(self.batch.active).tolist():
            self.queue.push(self.vacate(slot))
        self.released.clear()
        if self.states is not None:
            for plan in self.in_flight:
                self.states.release(plan.saves.blocks)
        self.in_flight.clear()
        if self.tiers is not None:
            self.tiers.lose()
        self.adapters = SlotTable(len(self.adapters))
        if not keep_blocks:
            for pool in self.pools:
                pool.drop_index()
        return self.queue.drain()

    def check_integrity(self) -> None:
        """Raises IntegrityError where blocks, slots, queue and reservations contradict each other."""
        moving = self.tiers.pinned() if self.tiers is not None else []
        self.pool.check_integrity([*self.batch.tables(), *moving])
        if self.states is not None:
            self.states.check_integrity([plan.saves.blocks for plan in self.in_flight])
        self.batch.check_integrity()
        if self.num_reserved != int(self.batch.reserved.sum()) or self.num_reserved > self.pool.num_available:
            raise IntegrityError(
                f"{self.num_reserved} blocks reserved, {self.pool.num_available} available, "
                f"{int(self.batch.reserved.sum())} counted"
            )
        waiting = list(self.queue)
        if len(waiting) != self.queue.num_waiting:
            raise IntegrityError(f"{self.queue.num_waiting} counted as waiting, {len(waiting)} queued")
        if sum(s.num_tokens for s in waiting) != self.queue.num_tokens:
            raise IntegrityError("the queue's count of tokens is wrong")
        users = np.bincount(self.batch.adapter_slot, minlength=len(self.adapters) + 1)[1:]
        if users.tolist() != self.adapters.users:
            raise IntegrityError("the counts of sequences by adapter slot are wrong")
        for slot in self.prefilling:
            if not self.batch.active[slot] or self.batch.decoding[slot]:
                raise IntegrityError(f"slot {slot} prefills, but is empty or decodes")


def finish_sequence(
    sequence: Sequence,
    reason: sampling_pb2.FinishReason.ValueType,
    now: float,
    changes: Changes,
    journal: Journal,
    *,
    step: int = 0,
    stop_token_id: int | None = None,
    error: KvernError | None = None,
    embedding: bytes = b"",
) -> None:
    """Marks the end of a sequence that holds neither slot nor place in a queue."""
    arrived = sequence.request.arrived
    scheduled = sequence.first_scheduled or now
    sequence.state = State.FINISHED
    sequence.finish = Finish(
        reason,
        len(sequence.output),
        stop_token_id,
        error,
        embedding,
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
        queue_seconds=max(0.0, scheduled - arrived),
        prefill_seconds=max(0.0, (sequence.first_token or now) - scheduled),
        e2e_seconds=max(0.0, now - arrived),
    )
    sequence.request.num_unfinished -= 1
    group = sequence.group.index if isinstance(sequence.group, Group) else 0
    journal.note(sequence, Kind.FINISHED, group, step, reason, len(sequence.output))
    changes.finished.append(sequence)
