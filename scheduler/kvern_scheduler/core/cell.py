"""The whole core: requests by name, admission, routing to groups, deadlines, worker loss."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np

from kvern.block_hash import adapter_keys
from kvern.errors import KvernError
from kvern.v1 import adapter_pb2, error_pb2, model_pb2, sampling_pb2
from kvern_scheduler.core.changes import Changes
from kvern_scheduler.core.errors import IntegrityError
from kvern_scheduler.core.group import Group, Limits, finish_sequence
from kvern_scheduler.core.journal import Journal, Kind
from kvern_scheduler.core.registry import Registry, not_served
from kvern_scheduler.core.requests import Request, Sequence, State, Submission
from kvern_scheduler.core.validate import check_capacity, check_submission, check_whole

MAX_LOSSES = 5
MISS_WEIGHT = 8
"""Of a token to compute against one that waits: what is computed here although another group has it also pushes other
prefixes out of the cache (`kvern bench routing` shows hit rate and times to first token)."""
ADAPTER_LOAD_TOKENS = 512
"""What filling a slot with an adapter counts when a request is routed."""


class Cell:
    """One model's requests and worker groups. Times are Unix seconds and passed in."""

    def __init__(self, limits: Limits, journal: Journal | None = None) -> None:
        self.limits = limits
        self.journal = journal or Journal()
        self.model: model_pb2.ModelInfo | None = None
        self.block_size = 0
        self.groups: dict[int, Group] = {}
        self.requests: dict[int, Request] = {}
        self.changes = Changes()
        self.adapters = Registry()
        self._by_name: dict[tuple[str, str], Request] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._homeless: list[Sequence] = []
        self._next_rid = 1
        self._rows: list[Sequence | None] = []
        self._free_rows: list[int] = []
        self._next_group = 0
        # Size of the largest pool so far, and since when there is none.
        self._known_capacity_tokens = 0
        # Tokens that a step of every group so far can compute.
        self._max_step_tokens = limits.max_num_batched_tokens
        self._groupless_since: float | None = None

    # -- worker groups ------------------------------------------------------------------------------------------

    def add_group(
        self,
        model: model_pb2.ModelInfo,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_tokens: int,
        num_state_blocks: int = 0,
        max_loras: int = 0,
        num_memory_blocks: int = 0,
        num_disk_blocks: int = 0,
    ) -> Group:
        """A worker group is ready; sequences without one go there. Raises KvernError when it serves another model
        than the cell."""
        if self.model is None:
            self.model, self.block_size = model, block_size
        elif (model.digest, model.max_model_len, block_size) != (
            self.model.digest,
            self.model.max_model_len,
            self.block_size,
        ):
            raise KvernError(
                error_pb2.ERROR_CODE_INVALID_ARGUMENT,
                f"a worker serves {model.name} ({_kind(model)}, block size {block_size}), this cell "
                f"{self.model.name} ({_kind(self.model)}, {self.block_size}): give all workers the same model and flags",
            )
        tokens = min(self.limits.max_num_batched_tokens, max_tokens)
        self._max_step_tokens = min(self._max_step_tokens, tokens)
        limits = replace(
            self.limits,
            max_num_batched_tokens=tokens,
            max_num_seqs=max(1, min(self.limits.max_num_seqs, max_num_seqs, tokens)),
        )
        group = Group(
            *(self._next_group, model, num_blocks, block_size, limits, self.changes, self.journal),
            *(num_state_blocks, max_loras, num_memory_blocks, num_disk_blocks),
        )
        self._next_group += 1
        self.readmit_group(group)
        return group

    def readmit_group(self, group: Group) -> None:
        """A group that was lost with its blocks kept works again."""
        self.groups[group.index] = group
        self._known_capacity_tokens = self.kv_capacity_tokens
        self._groupless_since = None
        homeless, self._homeless = self._homeless, []
        for sequence in homeless:
            if sequence.state is State.WAITING:
                self._place(sequence)

    def lose_group(self, group: Group, *, keep_blocks: bool, now: float) -> None:
        """The group's worker is gone: its sequences queue elsewhere, outputs kept, or wait for a group. Those that
        were computed on several lost workers without getting one token further are taken for the cause, and fail."""
        self.groups.pop(group.index, None)
        if not self.groups and self._groupless_since is None:
            self._groupless_since = now
        suspects = [sequence for sequence in group.batch.sequences if sequence is not None]
        for sequence in group.lose(keep_blocks=keep_blocks):
            sequence.group = None
            self.journal.note(sequence, Kind.LOST, group.index, group.folded)
            self._place(sequence)
        for sequence in suspects:
            stuck = sequence.num_tokens == sequence.num_tokens_at_loss
            sequence.num_losses = sequence.num_losses + 1 if stuck else 1
            sequence.num_tokens_at_loss = sequence.num_tokens
            if sequence.num_losses >= MAX_LOSSES:
                error = KvernError(
                    error_pb2.ERROR_CODE_INTERNAL,
                    f"{MAX_LOSSES} workers in a row were lost while computing the same token of this request",
                )
                self._end(sequence, sampling_pb2.FINISH_REASON_ERROR, now, error)

    def _place(self, sequence: Sequence) -> None:
        """Into the queue of a group; where none has room for it even alone, it waits for one that has."""
        group, cached = self._route(sequence) if self.groups else (None, -1)
        if group is not None and group.can_hold(sequence):
            group.enqueue(sequence, cached)
        else:
            self.journal.note(sequence, Kind.HOMELESS)
            self._homeless.append(sequence)

    def _route(self, sequence: Sequence) -> tuple[Group, int]:
        """The group with the least to do before this sequence's next token, and how many of its tokens are cached there
        (−1: there is no choice). What there is to do: what the group has queued, what of the sequence it has neither on
        its device nor below, loads from there, and the adapter's where it is not in a slot."""
        if len(self.groups) == 1:
            return next(iter(self.groups.values())), -1

        def cost(group: Group) -> tuple[bool, int, int, int]:
            too_small = not group.can_hold(sequence)
            cached = len(group.match(sequence.hashes, len(sequence.hashes))[0]) * group.block_size
            adapter = sequence.request.submission.adapter
            loading = ADAPTER_LOAD_TOKENS if adapter and not group.adapters.holds(adapter) else 0
            rest = sequence.hashes[cached // group.block_size :]
            below = 0 if group.tiers is None else group.tiers.count(rest) * group.block_size
            own = MISS_WEIGHT * (sequence.num_tokens - cached - below) + below + loading
            return too_small, own + group.load, group.index, cached

        _, _, index, cached = min(map(cost, self.groups.values()))
        return self.groups[index], cached

    # -- requests -----------------------------------------------------------------------------------------------

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that the largest pool can hold; while all groups are lost, could hold."""
        return max((g.capacity_tokens for g in self.groups.values()), default=self._known_capacity_tokens)

    @property
    def num_waiting(self) -> int:
        return sum(g.queue.num_waiting for g in self.groups.values()) + len(self._homeless)

    @property
    def num_waiting_tokens(self) -> int:
        waiting = sum(g.queue.num_tokens for g in self.groups.values())
        return waiting + sum(s.num_tokens for s in self._homeless)

    @property
    def room(self) -> int:
        """How many more sequences the queue takes; 0 where one with a prompt of any length would be refused."""
        if self.num_waiting_tokens >= self.limits.max_queued_tokens:
            return 0
        return max(0, self.limits.max_queued_requests - self.num_waiting)

    def find(self, tenant: str, request_id: str) -> Request | None:
        return self._by_name.get((tenant, request_id))

    def submit(self, submission: Submission, now: float) -> tuple[Request, bool]:
        """The request, and whether it is new: the same name with the same digest is the same request. Raises
        KvernError."""
        known = self._by_name.get((submission.tenant, submission.request_id))
        if known is not None:
            if known.submission.body_digest == submission.body_digest:
                return known, False
            raise KvernError(
                error_pb2.ERROR_CODE_REQUEST_ID_CONFLICT,
                "this request id is in use with another body; choose a new one",
                field="request_id",
                value=submission.request_id,
            )
        lost_for = 0.0 if self._groupless_since is None else now - self._groupless_since
        if self.model is None or lost_for > self.limits.max_groupless_s:
            raise KvernError(
                error_pb2.ERROR_CODE_UNAVAILABLE, "no worker is ready; try again shortly", retry_after_ms=500
            )
        check_submission(submission, self.model, self.block_size)
        check_whole(submission, self.model, self._max_step_tokens)
        check_capacity(submission, self.kv_capacity_tokens)
        self._check_adapter(submission)
        self._check_queues(submission)
        submission.lora = self._lora(submission)
        request = Request(self._next_rid, submission, now)
        self._next_rid += 1
        self._admit(request)
        self.changes.requests.append(request)
        return request, True

    def _check_adapter(self, submission: Submission) -> None:
        if not submission.adapter:
            return
        adapter = self.adapters.adapters.get(submission.adapter)
        if adapter is None or adapter.draining:
            raise not_served("model", adapter.name if adapter is not None else str(submission.adapter))
        if self.groups and not self.max_loras:
            raise no_slots()

    def _lora(self, submission: Submission) -> tuple[str, str] | None:
        adapter = self.adapters.adapters.get(submission.adapter)
        return None if adapter is None else adapter_keys(adapter)

    def _check_queues(self, submission: Submission) -> None:
        limits = self.limits
        waiting, tokens = self.num_waiting, self.num_waiting_tokens
        if waiting + submission.n > limits.max_queued_requests and waiting:
            message = f"{waiting} sequences wait already, at most {limits.max_queued_requests} may"
            value, limit = waiting + submission.n, limits.max_queued_requests
        elif tokens + submission.prompt.size > limits.max_queued_tokens and waiting:
            message = f"{tokens} tokens wait already, at most {limits.max_queued_tokens} may"
            value, limit = tokens + submission.prompt.size, limits.max_queued_tokens
        else:
            return
        raise KvernError(
            error_pb2.ERROR_CODE_OVERLOADED,
            f"overloaded: {message}; try again later",
            value=value,
            limit=limit,
            retry_after_ms=1000,
        )

    def _admit(self, request: Request, restored: bool = False) -> None:
        self.requests[request.rid] = request
        self._by_name[request.key] = request
        if request.submission.deadline:
            heapq.heappush(self._deadlines, (request.submission.deadline, request.rid))
        for sequence in request.sequences:
            sequence.row = self._free_rows.pop() if self._free_rows else len(self._rows)
            if sequence.row == len(self._rows):
                self._rows.append(sequence)
            else:
                self._rows[sequence.row] = sequence
        if request.num_unfinished:
            self.journal.begin(request)
        if restored:
            for sequence in request.sequences:
                self.journal.note(sequence, Kind.RESTORED, x=len(sequence.output))
        alive = [s for s in request.sequences if s.state is State.WAITING]
        shareable = self.limits.enable_prefix_caching and request.submission.hashes
        first = request.sequences[0]
        if shareable and first.state is State.WAITING and not first.output and len(alive) > 1:
            request.waiting_siblings = alive[1:]
            alive = alive[:1]
            for sibling in request.waiting_siblings:
                self.journal.note(sibling, Kind.HELD)
        for sequence in alive:
            self._place(sequence)

    def restore(self, request: Request) -> None:
        """A request of an earlier leader: its unfinished sequences queue, the finished ones stay readable."""
        self._next_rid = max(self._next_rid, request.rid + 1)
        request.submission.lora = self._lora(request.submission)
        self._admit(request, restored=True)

    def skip_rids(self, next_rid: int) -> None:
        """No new request gets a number below ``next_rid``."""
        self._next_rid = max(self._next_rid, next_rid)

    def cancel(self, sequence: Sequence, now: float, *, stopped: bool = False) -> None:
        """Ends a sequence: with STOP where its text is complete (``stopped``), else with ABORT. Idempotent."""
        reason = sampling_pb2.FINISH_REASON_STOP if stopped else sampling_pb2.FINISH_REASON_ABORT
        self._end(sequence, reason, now)

    def _end(
        self,
        sequence: Sequence,
        reason: sampling_pb2.FinishReason.ValueType,
        now: float,
        error: KvernError | None = None,
    ) -> None:
        if sequence.state is State.FINISHED:
            return
        if isinstance(sequence.group, Group):
            sequence.group.finish(sequence, reason, now, error=error)
            return
        if sequence in self._homeless:
            self._homeless.remove(sequence)
        finish_sequence(sequence, reason, now, self.changes, self.journal, error=error)
        if sequence.choice == 0:
            siblings, sequence.request.waiting_siblings = sequence.request.waiting_siblings, []
            for sibling in siblings:
                self._place(sibling)

    def expire(self, now: float) -> None:
        """Ends the requests whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, rid = heapq.heappop(self._deadlines)
            request = self.requests.get(rid)
            if request is None:
                continue
            error = KvernError(
                error_pb2.ERROR_CODE_DEADLINE_EXCEEDED, "the request's deadline passed before it was done"
            )
            for sequence in request.sequences:
                self._end(sequence, sampling_pb2.FINISH_REASON_ERROR, now, error)

    @property
    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    def forget(self, request: Request) -> None:
        """A finished request's retention is over: its name and rows are free again."""
        assert request.num_unfinished == 0
        del self.requests[request.rid]
        del self._by_name[request.key]
        for sequence in request.sequences:
            self._rows[sequence.row] = None
            self._free_rows.append(sequence.row)
        adapter = self.adapters.adapters.get(request.submission.adapter)
        if adapter is not None and adapter.draining:
            self._adapters_changed()

    # -- adapters -----------------------------------------------------------------------------------------------

    @property
    def max_loras(self) -> int:
        """Adapters that one group can have in a step."""
        return max((len(group.adapters) for group in self.groups.values()), default=0)

    def load_adapter(
        self,
        name: str,
        path: str,
        digest: bytes,
        rank: int,
        *,
        replace: bool = False,
        from_flags: bool = False,
    ) -> adapter_pb2.Adapter:
        """As Registry.add."""
        adapter = self.adapters.add(name, path, digest, rank, replace=replace, from_flags=from_flags)
        self._adapters_changed()
        return adapter

    def unload_adapter(self, name: str) -> tuple[adapter_pb2.Adapter, int]:
        """The adapter, and how many requests go on with it. Raises MODEL_NOT_FOUND."""
        adapter = self.adapters.drain(name)
        users = sum(
            request.submission.adapter == adapter.number and request.num_unfinished > 0
            for request in self.requests.values()
        )
        self._adapters_changed()
        return adapter, users

    def _adapters_changed(self) -> None:
        """Forgets drained adapters that no request has, ended ones that may still be asked for included, and tells the
        store and the gateways."""
        used = {request.submission.adapter for request in self.requests.values()}
        for number, adapter in list(self.adapters.adapters.items()):
            if adapter.draining and number not in used:
                del self.adapters.adapters[number]
        self.changes.adapters = self.adapters.pack()

    def end_without_slots(self, now: float) -> None:
        """Ends what waits for a slot for its adapter, since no group has any."""
        for sequence in [s for s in self._homeless if s.request.submission.adapter]:
            self._end(sequence, sampling_pb2.FINISH_REASON_ERROR, now, no_slots())

    def sequence_of_row(self, row: int) -> Sequence | None:
        return self._rows[row]

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def output_tokens(
        self, sequence: Sequence, start: int = 0, end: int | None = None
    ) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Output tokens so far, committed or not, from ``start`` to before ``end``."""
        if sequence.slot >= 0 and isinstance(sequence.group, Group):
            sequence.group.batch.flush(sequence.slot)
        return np.array(sequence.output[start:end], np.int32)

    def take_changes(self) -> Changes:
        """Everything since the last call."""
        return self.changes.take()

    def check_integrity(self) -> None:
        """Raises IntegrityError where the accounting of a group, or of requests, contradicts itself."""
        for group in self.groups.values():
            group.check_integrity()
        for request in self.requests.values():
            unfinished = sum(s.state is not State.FINISHED for s in request.sequences)
            if unfinished != request.num_unfinished:
                raise IntegrityError(f"request {request.rid}: {request.num_unfinished} counted unfinished")
            for sequence in request.sequences:
                if self._rows[sequence.row] is not sequence:
                    raise IntegrityError(f"row {sequence.row} is not its sequence's")


def no_slots() -> KvernError:
    return KvernError(
        error_pb2.ERROR_CODE_UNIMPLEMENTED,
        "no worker has slots for LoRA adapters; start workers with --enable-lora",
        field="model",
    )


def _kind(model: model_pb2.ModelInfo) -> str:
    return f"{model.dtype or 'unknown dtype'}, KV {model.kv_cache_dtype or 'unknown'}"
