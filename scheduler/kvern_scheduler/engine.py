"""Where the core meets the world: sessions and workers call in, the committer's acknowledgements go out.

Everything here runs in one event loop and returns at once. What a gateway sees of a request has always been committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from kvern.errors import KvernError, invalid
from kvern.rpc.packing import pack_i32
from kvern.v1 import adapter_pb2, error_pb2, session_pb2, worker_pb2
from kvern_scheduler.committer import Committer
from kvern_scheduler.convert import failed_positions, result_from_pb, submission_from_pb
from kvern_scheduler.core.cell import Cell
from kvern_scheduler.core.changes import Changes
from kvern_scheduler.core.fold import fold_step
from kvern_scheduler.core.group import Group, Limits
from kvern_scheduler.core.journal import MAX_REQUESTS, Journal
from kvern_scheduler.core.plan import Plan
from kvern_scheduler.core.planner import plan_step
from kvern_scheduler.core.requests import MAX_CHOICES, Request, Sequence, State
from kvern_scheduler.event_log import EventLog
from kvern_scheduler.metrics import Metrics
from kvern_scheduler.sessions import Session
from kvern_scheduler.subscriptions import Subscriptions
from kvern_scheduler.timings import Timings

log = logging.getLogger(__name__)

TICK_S = 0.1
UNNAMED_GRACE_S = 3.0
"""What a gateway may take to notice that its session broke, and to open another."""


class Engine:
    """The leader's state. ``start`` gives it its committer; before that it only holds what recovery loads."""

    def __init__(
        self,
        cell_name: str,
        limits: Limits,
        metrics: Metrics,
        retention_s: int = 600,
        orphan_grace_s: float = 30.0,
        clock: Callable[[], float] = time.time,
        max_timelines: int = MAX_REQUESTS,
    ) -> None:
        self.name = cell_name
        self.journal = Journal(clock, max_timelines)
        self.cell = Cell(limits, self.journal)
        self.metrics = metrics
        # Told of each sequence whose end is committed.
        self.events = EventLog()
        self.ended: list[Callable[[Sequence], None]] = [metrics.finished, self.events.ended]
        self.timings = Timings()
        self.retention_s = retention_s
        self.orphan_grace_s = orphan_grace_s
        self.unnamed_grace_s = min(UNNAMED_GRACE_S, orphan_grace_s)
        self.subscriptions = Subscriptions(self.cell.output_tokens)
        self.pumps: dict[int, Callable[[], None]] = {}
        # Group → the worker instance that holds its blocks.
        self.instances: dict[int, str] = {}
        self.clock = clock
        self.draining = False
        # As committed, so what gateways may know.
        self.adapters = session_pb2.AdapterList()
        self.committer: Committer
        # Requests whose commit is not acknowledged → whether its answer has to say what was submitted.
        self._unannounced: dict[int, bool] = {}
        # Requests of an earlier leader that go on here.
        self._adopted: set[int] = set()

    # -- what gateways ask --------------------------------------------------------------------------------------

    def submit(self, session: Session, pb: session_pb2.Submit) -> None:
        """Admits, attaches to, or refuses."""
        try:
            self._check_handles(session, pb.handle, pb.n or 1)
            if self.committer.stalled:
                raise store_is_away()
            if pb.resumes and self.cell.find(pb.tenant, pb.request_id) is None:
                raise _not_found(pb.request_id)
            request, new = self.cell.submit(submission_from_pb(pb), self.clock())
            _check_is_newest(request, pb.asked_unix_ms)
        except KvernError as error:
            session.refused(session_pb2.Refused(handle=pb.handle, error=error.to_pb()))
            self.metrics.refused(error)
            return
        self._claim(request, pb.asked_unix_ms)
        if new:
            self.events.admitted(request)
            self.subscriptions.make_room(self.cell.num_rows)
            for sequence in request.sequences:
                self.subscriptions.begin(sequence, 0)
                self.subscriptions.bind(session, sequence, pb.handle + sequence.choice)
            self._unannounced[request.rid] = False
        else:
            self._attach(session, request, pb.handle, [], known=True)

    def attach(self, session: Session, pb: session_pb2.Attach) -> None:
        """Goes on with a request from the given indexes, or refuses with REQUEST_NOT_FOUND."""
        request = self.cell.find(pb.tenant, pb.request_id)
        try:
            if request is None:
                raise _not_found(pb.request_id)
            self._check_handles(session, pb.handle, request.submission.n)
            if pb.claim and pb.claim < request.claim:
                raise _taken_over()
            if not pb.claim:
                _check_is_newest(request, pb.asked_unix_ms)
            for sequence, index in zip(request.sequences, pb.next_index, strict=False):
                limit = self.subscriptions.num_committed(sequence)
                if index > limit:
                    raise invalid(
                        "next_index", "next_index is beyond the output so far", value=index, limit=limit
                    )
        except KvernError as error:
            session.refused(session_pb2.Refused(handle=pb.handle, error=error.to_pb()))
            return
        if pb.claim:
            request.claim = pb.claim
        else:
            self._claim(request, pb.asked_unix_ms)
        self._attach(session, request, pb.handle, list(pb.next_index), known=bool(pb.claim))

    def _claim(self, request: Request, asked_ms: int) -> None:
        """A client asks: no call is newer. Clocks make that true of calls at earlier leaders, too."""
        if asked_ms:
            request.claim = max(request.claim, asked_ms)
        else:
            request.claim = max(request.claim + 1, int(self.clock() * 1000))

    def cancel(self, session: Session, pb: session_pb2.CancelHandle) -> None:
        sequence = session.sequences.get(pb.handle)
        if sequence is not None:
            self.cell.cancel(sequence, self.clock(), stopped=pb.stopped)

    def _check_handles(self, session: Session, first: int, n: int) -> None:
        if first + n > 2**32:
            raise invalid("handle", "handles are 32 bits wide", value=first)
        if n <= MAX_CHOICES and any(handle in session.sequences for handle in range(first, first + n)):
            raise invalid("handle", f"handle {first} is in use", value=first)

    def _tell_taken_over(self, request: Request, newest: Session) -> None:
        """The session that had the request so far must not ask for it again by itself when it breaks."""
        for sequence in request.sequences:
            session = self.subscriptions.session_of(sequence)
            if session is not None and session is not newest:
                handle = self.subscriptions.handle_of(sequence) - sequence.choice
                session.refused(session_pb2.Refused(handle=handle, error=_taken_over().to_pb()))
                return

    def _attach(
        self, session: Session, request: Request, handle: int, next_index: list[int], *, known: bool
    ) -> None:
        """The request's events go to ``session`` from now on, after what it lacks of the committed ones. ``known``: its
        gateway knows what was submitted."""
        self._tell_taken_over(request, session)
        for sequence in request.sequences:
            self.subscriptions.bind(session, sequence, handle + sequence.choice)
        if request.rid in self._unannounced:
            self._unannounced[request.rid] = not known
            return  # admitted when its commit is acknowledged
        for sequence in request.sequences:
            start = next_index[sequence.choice] if sequence.choice < len(next_index) else 0
            admitted = None if sequence.choice else self._admitted(request, known=known)
            self.subscriptions.replay(sequence, start, admitted)

    def _admitted(self, request: Request, *, known: bool) -> session_pb2.Admitted:
        submission = request.submission
        admitted = session_pb2.Admitted(
            handle=self.subscriptions.handle_of(request.sequences[0]),
            request_id=submission.request_id,
            claim=request.claim,
        )
        if not known:
            admitted.gateway_context = submission.gateway_context
            admitted.prompt_token_ids = pack_i32(submission.prompt)
            admitted.params.CopyFrom(submission.params)
            admitted.n = submission.n
        return admitted

    def replace_sessions(self, newest: Session) -> None:
        """A gateway has one session: a submit that was under way on an older one may not take a request back."""
        for session in self.subscriptions.sessions.values():
            if session is not newest and session.gateway_id == newest.gateway_id:
                session.replace()

    def detach(self, session: Session) -> None:
        """The session broke. Its requests wait for another one: for long where their client named them, and so may come
        back on another gateway; else for as long as their gateway may need."""
        orphans = self.subscriptions.detach(session)
        if self.draining:
            return  # it broke because we stop: the next leader goes on with all of them
        waiting = [sequence for sequence in orphans if sequence.state is not State.FINISHED]
        named = [sequence for sequence in waiting if sequence.request.submission.resumable]
        unnamed = [sequence for sequence in waiting if not sequence.request.submission.resumable]
        self._abort_later(named, self.orphan_grace_s)
        self._abort_later(unnamed, self.unnamed_grace_s)

    def _abort_later(self, orphans: list[Sequence], grace_s: float) -> None:
        """Those that nobody has attached to until then."""
        losses = [self.subscriptions.num_losses(sequence) for sequence in orphans]

        def abort() -> None:
            for sequence, num_losses in zip(orphans, losses, strict=True):
                if (
                    self.cell.sequence_of_row(sequence.row) is sequence
                    and self.subscriptions.session_of(sequence) is None
                    and self.subscriptions.num_losses(sequence) == num_losses
                ):
                    self.cell.cancel(sequence, self.clock())
            self.settle()

        if orphans:
            asyncio.get_running_loop().call_later(grace_s, abort)

    # -- what workers do ----------------------------------------------------------------------------------------

    def plan(self, group: Group) -> Plan | None:
        """The group's next step, if there is one to send."""
        started = time.perf_counter()
        plan = plan_step(group, self.clock())
        if plan is not None:
            self.timings.plan.add(time.perf_counter() - started)
        return plan

    def fold(self, group: Group, pb: worker_pb2.StepResult) -> None:
        """Takes a result in. Raises ProtocolError where it answers no plan."""
        started = time.perf_counter()
        plan = fold_step(group, result_from_pb(pb), self.clock())
        self.timings.fold.add(time.perf_counter() - started)
        self.metrics.stepped(plan)
        waiting = group.queue.num_waiting
        times = pb.wait_us, pb.prepare_us, pb.forward_us, pb.sample_us
        self.journal.stepped(group.index, plan, waiting, *times)
        group.num_images += pb.num_images
        group.num_images_cached += pb.num_images_cached
        if self.events.steps:
            self.events.stepped(group, plan, pb)

    def transferred(self, group: Group, pb: worker_pb2.TransferDone) -> None:
        """Blocks have come to where they were sent, or not. Raises ProtocolError where nobody sent them."""
        group.transferred(pb, failed_positions(pb))

    def settle(self) -> None:
        """Ends what is overdue, hands the changes to the committer and wakes the groups. After every batch of calls."""
        deadline = self.cell.next_deadline
        if deadline is not None and deadline <= (now := self.clock()):
            self.cell.expire(now)
        if self.cell.changes:
            changes = self.cell.take_changes()
            changes.num_steps = self.journal.num_steps
            self.committer.add(changes)
        for pump in list(self.pumps.values()):
            pump()

    async def committed(self) -> None:
        """Returns when all that has happened so far is committed."""
        done = asyncio.Event()
        self.cell.changes.acknowledged.append(done.set)
        self.settle()
        await done.wait()

    async def tick(self) -> None:
        """What has to happen although nobody calls: deadlines, and a look at the accounting when idle."""
        checked = False
        while True:
            await asyncio.sleep(TICK_S)
            if self.cell.next_deadline is not None:
                self.settle()
            idle = not any(group.batch.num_running for group in self.cell.groups.values())
            if idle and not checked:
                for group in self.cell.groups.values():
                    if not all(pool.adds_up() for pool in group.pools):
                        log.error("group %d: free, cached and held blocks do not add up", group.index)
            checked = idle

    # -- what the committer acknowledges ------------------------------------------------------------------------

    def release(self, changes: Changes) -> None:
        """Tells the gateways what is committed now."""
        self.journal.committed(changes.num_steps)
        for request in changes.requests:
            lacks_body = self._unannounced.pop(request.rid, False)
            session = self.subscriptions.session_of(request.sequences[0])
            if session is not None:
                session.admitted(self._admitted(request, known=not lacks_body))
        for tokens in changes.tokens:
            self.subscriptions.tokens(tokens)
        for entry in changes.logprobs:
            entry.sequence.logprobs += entry.packed
            self.subscriptions.logprobs(entry)
        for sequence in changes.finished:
            sequence.announced = True
            self.subscriptions.finish(sequence)
            for tell in self.ended:
                tell(sequence)
            request = sequence.request
            if all(s.announced for s in request.sequences):
                self._retire(request)
        if changes.adapters is not None:
            self._tell_adapters(changes.adapters)
        for acknowledge in changes.acknowledged:
            acknowledge()

    def _tell_adapters(self, packed: bytes) -> None:
        registry = adapter_pb2.AdapterRegistry.FromString(packed)
        self.adapters = session_pb2.AdapterList(adapters=registry.adapters)
        for session in self.subscriptions.sessions.values():
            session.adapters(self.adapters)

    def restore_adapters(self, packed: bytes) -> None:
        """Those that an earlier leader committed."""
        self.cell.adapters.restore(packed)
        self.adapters = session_pb2.AdapterList(adapters=self.cell.adapters.adapters.values())

    def _retire(self, request: Request) -> None:
        """All choices have ended and are committed. Named requests stay readable for a while; so do those of an
        earlier leader; others for as long as a gateway may need whose session broke on the last tokens."""

        def forget() -> None:
            self._adopted.discard(request.rid)
            with contextlib.suppress(KeyError):
                for sequence in request.sequences:
                    self.subscriptions.unbind(sequence)
                self.cell.forget(request)

        kept = request.submission.resumable or request.rid in self._adopted
        asyncio.get_running_loop().call_later(self.retention_s if kept else self.unnamed_grace_s, forget)

    def adopt(self, request: Request, committed: dict[int, int]) -> None:
        """A request of an earlier leader. ``committed``: choice → output tokens in the store."""
        self.cell.restore(request)
        self.subscriptions.make_room(self.cell.num_rows)
        for sequence in request.sequences:
            self.subscriptions.begin(sequence, committed.get(sequence.choice, 0))
            sequence.announced = sequence.state is State.FINISHED
        # Whether named or not: its gateway had no part in the leader's death.
        self._adopted.add(request.rid)
        if request.num_unfinished == 0:
            self._retire(request)
        else:
            waiting = [s for s in request.sequences if s.state is not State.FINISHED]
            self._abort_later(waiting, self.orphan_grace_s)


def store_is_away() -> KvernError:
    return KvernError(error_pb2.ERROR_CODE_UNAVAILABLE, "the store is away; try again", retry_after_ms=500)


def _check_is_newest(request: Request, asked_ms: int) -> None:
    """What a gateway sent before it died, or we froze, may be read after what its client has asked elsewhere since.
    The refusal is one to try again after: where two gateways' clocks differ, the newer call may look like the older."""
    if asked_ms and asked_ms < request.claim:
        raise KvernError(
            error_pb2.ERROR_CODE_UNAVAILABLE,
            "a call that asked later has this request; try again",
            field="request_id",
            retry_after_ms=200,
        )


def _taken_over() -> KvernError:
    return KvernError(
        error_pb2.ERROR_CODE_CANCELLED,
        "another call with the same request id has taken this one over",
        field="request_id",
    )


def _not_found(request_id: str) -> KvernError:
    return KvernError(
        error_pb2.ERROR_CODE_REQUEST_NOT_FOUND,
        "no such request: it was never submitted, or its retention is over",
        field="request_id",
        value=request_id,
    )
