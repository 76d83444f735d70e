"""Where the core meets the world: sessions and workers call in, the committer's acknowledgements go out.

Everything here runs in one event loop and returns at once. What a gateway sees of a request has always been committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import numpy as np

from kvern.rpc.packing import pack_i32
from kvern.v1 import error_pb2, session_pb2, worker_pb2
from kvern_scheduler.committer import Committer
from kvern_scheduler.convert import finish_to_pb, logprobs_to_pb, result_from_pb, submission_from_pb
from kvern_scheduler.core.cell import Cell
from kvern_scheduler.core.changes import Changes, Logprobs, Tokens
from kvern_scheduler.core.errors import RequestError, invalid
from kvern_scheduler.core.fold import fold_step
from kvern_scheduler.core.group import Group, Limits
from kvern_scheduler.core.plan import Plan
from kvern_scheduler.core.planner import plan_step
from kvern_scheduler.core.requests import MAX_CHOICES, Request, Sequence, State
from kvern_scheduler.metrics import Metrics
from kvern_scheduler.sessions import Session
from kvern_scheduler.timings import Timings

log = logging.getLogger(__name__)

TICK_S = 0.1


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
    ) -> None:
        self.name = cell_name
        self.cell = Cell(limits)
        self.metrics = metrics
        self.timings = Timings()
        self.retention_s = retention_s
        self.orphan_grace_s = orphan_grace_s
        self.sessions: dict[int, Session] = {}
        self.pumps: dict[int, Callable[[], None]] = {}
        # Group → the worker instance that holds its blocks.
        self.instances: dict[int, str] = {}
        self.clock = clock
        self.draining = False
        self.committer: Committer
        # By row: who is told, under which handle, and how many tokens have been committed.
        self._session_of = np.full(64, -1, np.int32)
        self._handle_of = np.zeros(64, np.uint32)
        self._committed = np.zeros(64, np.uint32)
        # Requests whose commit is not acknowledged → whether somebody attached to it meanwhile.
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
        except RequestError as error:
            session.refused(session_pb2.Refused(handle=pb.handle, error=error.to_pb()))
            self.metrics.refused(error)
            return
        self._grow()
        self._claim(request)
        if new:
            for sequence in request.sequences:
                self._committed[sequence.row] = 0
                self._bind(session, sequence, pb.handle + sequence.choice)
            self._unannounced[request.rid] = False
        else:
            self._attach(session, request, pb.handle, [])

    def attach(self, session: Session, pb: session_pb2.Attach) -> None:
        """Goes on with a request from the given indexes, or refuses with REQUEST_NOT_FOUND."""
        request = self.cell.find(pb.tenant, pb.request_id)
        try:
            if request is None:
                raise _not_found(pb.request_id)
            self._check_handles(session, pb.handle, request.submission.n)
            if pb.claim and pb.claim < request.claim:
                raise _taken_over()
            for sequence, index in zip(request.sequences, pb.next_index, strict=False):
                if index > self._committed[sequence.row]:
                    raise invalid(
                        "next_index",
                        "next_index is beyond the output so far",
                        value=index,
                        limit=int(self._committed[sequence.row]),
                    )
        except RequestError as error:
            session.refused(session_pb2.Refused(handle=pb.handle, error=error.to_pb()))
            return
        if pb.claim:
            request.claim = pb.claim
        else:
            self._claim(request)
        self._attach(session, request, pb.handle, list(pb.next_index))

    def _claim(self, request: Request) -> None:
        """A client asks: no call is newer. The clock makes that true of calls at earlier leaders, too."""
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

    def _bind(self, session: Session, sequence: Sequence, handle: int) -> None:
        session.sequences[handle] = sequence
        self._session_of[sequence.row] = session.number
        self._handle_of[sequence.row] = handle

    def _unbind(self, sequence: Sequence) -> None:
        session = self.sessions.get(int(self._session_of[sequence.row]))
        if session is not None:
            session.sequences.pop(int(self._handle_of[sequence.row]), None)
        self._session_of[sequence.row] = -1

    def _tell_taken_over(self, request: Request, newest: Session) -> None:
        """The session that had the request so far must not ask for it again by itself when it breaks."""
        for sequence in request.sequences:
            session = self.sessions.get(int(self._session_of[sequence.row]))
            if session is not None and session is not newest:
                handle = int(self._handle_of[sequence.row]) - sequence.choice
                session.refused(session_pb2.Refused(handle=handle, error=_taken_over().to_pb()))
                return

    def _attach(self, session: Session, request: Request, handle: int, next_index: list[int]) -> None:
        """The request's events go to ``session`` from now on, after what it lacks of the committed ones."""
        self._tell_taken_over(request, session)
        for sequence in request.sequences:
            self._unbind(sequence)
            self._bind(session, sequence, handle + sequence.choice)
        if request.rid in self._unannounced:
            self._unannounced[request.rid] = True
            return  # admitted when its commit is acknowledged
        session.admitted(self._admitted(request, attached=True))
        for sequence in request.sequences:
            start = next_index[sequence.choice] if sequence.choice < len(next_index) else 0
            until = int(self._committed[sequence.row])
            if start < until:
                tokens = self.cell.output_tokens(sequence)[start:until]
                session.tokens(
                    np.full(tokens.size, handle + sequence.choice, np.uint32),
                    np.arange(start, until, dtype=np.uint32),
                    tokens,
                )
            for entry in sequence.logprobs:
                if (start == 0) if entry.prompt else (entry.first_index >= start):
                    self._release_logprobs(entry)
            if sequence.announced:
                self._announce_finish(sequence)

    def _admitted(self, request: Request, *, attached: bool) -> session_pb2.Admitted:
        row = request.sequences[0].row
        admitted = session_pb2.Admitted(
            handle=int(self._handle_of[row]),
            request_id=request.submission.request_id,
            claim=request.claim,
        )
        if attached:
            submission = request.submission
            admitted.gateway_context = submission.gateway_context
            admitted.prompt_token_ids = pack_i32(submission.prompt)
            admitted.params.CopyFrom(submission.params)
            admitted.n = submission.n
        return admitted

    def replace_sessions(self, newest: Session) -> None:
        """A gateway has one session: a submit that was under way on an older one may not take a request back."""
        for session in self.sessions.values():
            if session is not newest and session.gateway_id == newest.gateway_id:
                session.replace()

    def detach(self, session: Session) -> None:
        """The session broke. Requests whose client named them wait for another one, the rest is aborted."""
        self.sessions.pop(session.number, None)
        orphans = list(session.sequences.values())
        session.sequences.clear()
        for sequence in orphans:
            self._session_of[sequence.row] = -1
        if self.draining:
            return  # it broke because we stop: the next leader goes on with all of them
        kept = [s for s in orphans if s.request.submission.resumable and s.state is not State.FINISHED]
        for sequence in orphans:
            if not sequence.request.submission.resumable:
                self.cell.cancel(sequence, self.clock())
        if kept:
            asyncio.get_running_loop().call_later(self.orphan_grace_s, self._abort_orphans, kept)
        self.settle()

    def _abort_orphans(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if self._session_of[sequence.row] < 0 and self.cell.sequence_of_row(sequence.row) is sequence:
                self.cell.cancel(sequence, self.clock())
        self.settle()

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

    def settle(self) -> None:
        """Ends what is overdue, hands the changes to the committer and wakes the groups. After every batch of calls."""
        deadline = self.cell.next_deadline
        if deadline is not None and deadline <= (now := self.clock()):
            self.cell.expire(now)
        if self.cell.changes:
            self.committer.add(self.cell.take_changes())
        for pump in list(self.pumps.values()):
            pump()

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
                    if not group.pool.adds_up():
                        log.error("group %d: free, cached and held blocks do not add up", group.index)
            checked = idle

    # -- what the committer acknowledges ------------------------------------------------------------------------

    def release(self, changes: Changes) -> None:
        """Tells the gateways what is committed now."""
        for request in changes.requests:
            attached = self._unannounced.pop(request.rid, False)
            session = self.sessions.get(int(self._session_of[request.sequences[0].row]))
            if session is not None:
                session.admitted(self._admitted(request, attached=attached))
        for tokens in changes.tokens:
            self._release_tokens(tokens)
        for entry in changes.logprobs:
            entry.sequence.logprobs.append(entry)
            self._release_logprobs(entry)
        for sequence in changes.finished:
            sequence.announced = True
            self._announce_finish(sequence)
            self.metrics.finished(sequence)
            request = sequence.request
            if all(s.announced for s in request.sequences):
                # Its gateway may have had no session yet when it ended.
                self._retire(request, recovered=request.rid in self._adopted)

    def _release_tokens(self, tokens: Tokens) -> None:
        rows = tokens.rows
        self._committed[rows] = tokens.indexes + np.uint32(1)
        numbers = self._session_of[rows]
        first = int(numbers[0])
        if (numbers == first).all():
            session = self.sessions.get(first)
            if session is not None:
                session.tokens(self._handle_of[rows], tokens.indexes, tokens.token_ids)
            return
        for number in np.unique(numbers).tolist():
            session = self.sessions.get(number)
            if session is not None:
                mine = numbers == number
                session.tokens(self._handle_of[rows[mine]], tokens.indexes[mine], tokens.token_ids[mine])

    def _release_logprobs(self, entry: Logprobs) -> None:
        session = self.sessions.get(int(self._session_of[entry.sequence.row]))
        if session is not None:
            session.logprobs(logprobs_to_pb(entry, int(self._handle_of[entry.sequence.row])))

    def _announce_finish(self, sequence: Sequence) -> None:
        session = self.sessions.get(int(self._session_of[sequence.row]))
        if session is not None and sequence.finish is not None:
            session.finished(finish_to_pb(sequence.finish, int(self._handle_of[sequence.row])))
            self._session_of[sequence.row] = -1

    def _retire(self, request: Request, *, recovered: bool = False) -> None:
        """All choices have ended and are committed. Named requests stay readable for a while; so do those of an
        earlier leader, whose last tokens may not have arrived."""
        if not request.submission.resumable and not recovered:
            self.cell.forget(request)
            return

        def forget() -> None:
            self._adopted.discard(request.rid)
            with contextlib.suppress(KeyError):
                for sequence in request.sequences:
                    self._unbind(sequence)
                self.cell.forget(request)

        asyncio.get_running_loop().call_later(self.retention_s, forget)

    def adopt(self, request: Request, committed: dict[int, int]) -> None:
        """A request of an earlier leader. ``committed``: choice → output tokens in the store."""
        self.cell.restore(request)
        self._grow()
        for sequence in request.sequences:
            self._session_of[sequence.row] = -1
            self._committed[sequence.row] = committed.get(sequence.choice, 0)
            sequence.announced = sequence.state is State.FINISHED
        if request.num_unfinished == 0:
            self._retire(request, recovered=True)
        else:  # whether named or not: its gateway had no part in the leader's death
            self._adopted.add(request.rid)
            waiting = [s for s in request.sequences if s.state is not State.FINISHED]
            asyncio.get_running_loop().call_later(self.orphan_grace_s, self._abort_orphans, waiting)

    def _grow(self) -> None:
        """Room for every row."""
        missing = self.cell.num_rows - self._session_of.size
        if missing > 0:
            size = max(missing, self._session_of.size)
            self._session_of = np.concatenate([self._session_of, np.full(size, -1, np.int32)])
            self._handle_of = np.concatenate([self._handle_of, np.zeros(size, np.uint32)])
            self._committed = np.concatenate([self._committed, np.zeros(size, np.uint32)])


def store_is_away() -> RequestError:
    return RequestError(error_pb2.ERROR_CODE_UNAVAILABLE, "the store is away; try again", retry_after_ms=500)


def _taken_over() -> RequestError:
    return RequestError(
        error_pb2.ERROR_CODE_CANCELLED,
        "another call with the same request id has taken this one over",
        field="request_id",
    )


def _not_found(request_id: str) -> RequestError:
    return RequestError(
        error_pb2.ERROR_CODE_REQUEST_NOT_FOUND,
        "no such request: it was never submitted, or its retention is over",
        field="request_id",
        value=request_id,
    )
