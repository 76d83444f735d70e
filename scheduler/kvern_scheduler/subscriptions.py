"""Who is told of which sequence: one session each, under the handle that its gateway chose.

What a new session lacks of the committed output is *replayed*, in pieces, each when the one before has been written.
What is committed meanwhile joins the end of the replay, so a sequence's events keep their order::

    bind ──▶ replaying ──caught up──▶ live ──end, detach, another session──▶ (nobody)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvern.v1 import session_pb2
from kvern_scheduler.convert import finish_to_pb, logprobs_to_pb, read_logprobs
from kvern_scheduler.core.changes import Logprobs, Tokens
from kvern_scheduler.core.requests import Sequence
from kvern_scheduler.sessions import Session

# Of a replay's pieces. A token counts as one, log-probabilities as many as they have entries, the rest by its size.
REPLAY_UNITS = 4096
_BYTES_PER_UNIT = 12

OutputTokens = Callable[[Sequence, int, int], npt.NDArray[np.int32]]


@dataclass(slots=True)
class _Replay:
    """``admitted`` is the request's answer, where this is its first choice."""

    sequence: Sequence
    handle: int
    first_index: int
    next_index: int
    admitted: session_pb2.Admitted | None
    logprobs_read: int = 0
    """Of the sequence's log-probabilities, the bytes that were sent or are not lacked."""


class Subscriptions:
    """Arrays are by row (kvern_scheduler.core.cell). ``output_tokens``: a sequence's output from an index to before
    another."""

    def __init__(self, output_tokens: OutputTokens) -> None:
        self.sessions: dict[int, Session] = {}
        self._output_tokens = output_tokens
        self._session = np.full(64, -1, np.int32)
        self._handle = np.zeros(64, np.uint32)
        # Output tokens that gateways may know.
        self._committed = np.zeros(64, np.uint32)
        # Goes up whenever a sequence loses its session.
        self._losses = np.zeros(64, np.uint32)
        self._replaying: set[int] = set()
        self._replays: dict[int, deque[_Replay]] = {}

    def make_room(self, num_rows: int) -> None:
        missing = num_rows - self._session.size
        if missing > 0:
            size = max(missing, self._session.size)
            self._session = np.concatenate([self._session, np.full(size, -1, np.int32)])
            self._handle, self._committed, self._losses = (
                np.concatenate([array, np.zeros(size, np.uint32)])
                for array in (self._handle, self._committed, self._losses)
            )

    def begin(self, sequence: Sequence, num_committed: int) -> None:
        """A sequence takes its row. Nobody is told of it yet."""
        self._session[sequence.row] = -1
        self._committed[sequence.row] = num_committed

    def num_committed(self, sequence: Sequence) -> int:
        return int(self._committed[sequence.row])

    def session_of(self, sequence: Sequence) -> Session | None:
        return self.sessions.get(int(self._session[sequence.row]))

    def handle_of(self, sequence: Sequence) -> int:
        return int(self._handle[sequence.row])

    def bind(self, session: Session, sequence: Sequence, handle: int) -> None:
        """``session`` is told from now on, and nobody else."""
        self.unbind(sequence)
        session.sequences[handle] = sequence
        self._session[sequence.row] = session.number
        self._handle[sequence.row] = handle

    def unbind(self, sequence: Sequence) -> None:
        session = self.session_of(sequence)
        if session is not None:
            session.sequences.pop(self.handle_of(sequence), None)
        self._session[sequence.row] = -1
        self._replaying.discard(sequence.row)

    def detach(self, session: Session) -> list[Sequence]:
        """The session is over. Returns what it was still to be told of."""
        self.sessions.pop(session.number, None)
        self._replays.pop(session.number, None)
        orphans = list(session.sequences.values())
        for sequence in orphans:
            self.unbind(sequence)
            self._losses[sequence.row] += np.uint32(1)
        return orphans

    def num_losses(self, sequence: Sequence) -> int:
        """How often its row has lost its session: unchanged and unbound means that nobody came back."""
        return int(self._losses[sequence.row])

    def replay(self, sequence: Sequence, next_index: int, admitted: session_pb2.Admitted | None) -> None:
        """Its session is told everything from ``next_index`` on that is committed, after ``admitted``."""
        session = self.session_of(sequence)
        assert session is not None
        self._replaying.add(sequence.row)
        replays = self._replays.setdefault(session.number, deque())
        replays.append(_Replay(sequence, self.handle_of(sequence), next_index, next_index, admitted))
        session.wake()

    def catch_up(self, session: Session) -> bool:
        """Puts the next piece of what is replayed into the session's message. True: there is more."""
        replays = self._replays.get(session.number)
        units = REPLAY_UNITS
        while replays and units > 0:
            replay = replays[0]
            row = replay.sequence.row
            bound = self._session[row] == session.number and self._handle[row] == replay.handle
            if bound and row in self._replaying:
                units -= self._send_piece(session, replay, units)
                left = self.num_committed(replay.sequence) - replay.next_index
                if left > 0 or replay.logprobs_read < len(replay.sequence.logprobs):
                    continue
                self._replaying.discard(row)
                if replay.sequence.announced:
                    self.finish(replay.sequence)
            replays.popleft()
        if not replays:
            self._replays.pop(session.number, None)
        return bool(replays)

    def _send_piece(self, session: Session, replay: _Replay, units: int) -> int:
        """Returns how many units it took; some more than ``units`` perhaps."""
        sequence, start = replay.sequence, replay.next_index
        taken = 1
        if replay.admitted is not None:
            taken += replay.admitted.ByteSize() // _BYTES_PER_UNIT
            session.admitted(replay.admitted)
            replay.admitted = None
        end = min(self.num_committed(sequence), start + max(1, units - taken))
        # Log-probabilities go with their tokens, those of the prompt before all tokens. So they are in the list.
        log = sequence.logprobs
        while replay.logprobs_read < len(log):
            entry, next_read = read_logprobs(log, replay.logprobs_read)
            if taken < units and (entry.prompt or entry.first_index < end):
                replay.logprobs_read = next_read
                taken += 1
                if (replay.first_index == 0) if entry.prompt else (entry.first_index >= replay.first_index):
                    entry.handle = replay.handle
                    taken += session.logprobs(entry)
                continue
            end = start if entry.prompt else max(start, min(end, entry.first_index))
            break
        if start < end:
            count = end - start
            session.tokens(
                np.full(count, replay.handle, np.uint32),
                np.arange(start, end, dtype=np.uint32),
                self._output_tokens(sequence, start, end),
            )
            taken += count
            replay.next_index = end
        return taken

    def tokens(self, tokens: Tokens) -> None:
        """They are committed: tells whom it concerns."""
        rows = tokens.rows
        self._committed[rows] = tokens.indexes + np.uint32(1)
        numbers = self._session[rows]
        if self._replaying:
            numbers[np.isin(rows, list(self._replaying))] = -1
        first = int(numbers[0])
        if np.count_nonzero(numbers != first) == 0:
            session = self.sessions.get(first)
            if session is not None:
                session.tokens(self._handle[rows], tokens.indexes, tokens.token_ids)
            return
        for number in np.unique(numbers).tolist():
            session = self.sessions.get(number)
            if session is not None:
                mine = numbers == number
                session.tokens(self._handle[rows[mine]], tokens.indexes[mine], tokens.token_ids[mine])

    def logprobs(self, entry: Logprobs) -> None:
        """They are committed, with the tokens that they are about."""
        session = self.session_of(entry.sequence)
        if session is not None and entry.sequence.row not in self._replaying:
            session.logprobs(logprobs_to_pb(entry, self.handle_of(entry.sequence)))

    def finish(self, sequence: Sequence) -> None:
        """The end is committed."""
        session = self.session_of(sequence)
        if session is not None and sequence.finish is not None and sequence.row not in self._replaying:
            session.finished(finish_to_pb(sequence.finish, self.handle_of(sequence)))
            self._session[sequence.row] = -1
