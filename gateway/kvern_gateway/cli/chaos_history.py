"""What a client saw of one request, over all its connections, and whether that is what a run without faults shows.

Pure: events in, violations out. The order of events is the order in which the client received them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Output:
    """One choice of a run without faults."""

    token_ids: tuple[int, ...]
    text: str
    reason: str


@dataclass(frozen=True)
class Opened:
    """A connection was opened, and asked to go on from these indexes, one per choice. ``ended`` are the choices whose
    end the server was told to be known; all others may be told to have ended once more."""

    from_index: tuple[int, ...]
    ended: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Piece:
    """Tokens ``first_index`` and on of a choice, and the text that came with them."""

    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Ended:
    """The choice's one end."""

    choice: int
    reason: str


@dataclass(frozen=True)
class Lost:
    """The request was refused after it had been accepted, or did not end in time."""

    why: str


Event = Opened | Piece | Ended | Lost


@dataclass(frozen=True)
class Violation:
    """``kind``: gap, repeat, changed token, text, double finish, wrong finish, early finish, after finish, lost."""

    kind: str
    choice: int
    detail: str


@dataclass
class _Seen:
    """One choice on the client's side: the index it waits for, its text so far, and how it ended."""

    due: int = 0
    text: str = ""
    reason: str | None = None
    ended_here: bool = False
    # The first violation of a kind says it all.
    broken: set[str] = field(default_factory=set)


def check(events: Sequence[Event], expected: Sequence[Output]) -> list[Violation]:
    """All violations, at most one of a kind for each choice. A request without an end is lost."""
    seen = [_Seen() for _ in expected]
    found: list[Violation] = []

    def report(kind: str, choice: int, detail: str) -> None:
        if kind not in seen[choice].broken:
            seen[choice].broken.add(kind)
            found.append(Violation(kind, choice, detail))

    for event in events:
        if isinstance(event, Opened):
            _open(event, seen)
        elif isinstance(event, Lost):
            found.append(Violation("lost", 0, event.why))
        elif isinstance(event, Ended):
            state, output = seen[event.choice], expected[event.choice]
            if state.ended_here:
                report("double finish", event.choice, f"{event.reason} after {state.reason}")
            state.ended_here = True
            state.reason = event.reason
            if event.reason != output.reason:
                report("wrong finish", event.choice, f"{event.reason}, not {output.reason}")
            elif state.due != len(output.token_ids):
                report("early finish", event.choice, f"at token {state.due} of {len(output.token_ids)}")
            elif state.text != output.text:
                report("text", event.choice, f"the whole text differs {_where(state.text, output.text)}")
        else:
            for kind, detail in _take(event, seen[event.choice], expected[event.choice]):
                report(kind, event.choice, detail)
    lost = any(isinstance(event, Lost) for event in events)
    for choice, state in enumerate(seen):
        if state.reason is None and not lost:
            report("lost", choice, f"no end; {state.due} of {len(expected[choice].token_ids)} tokens came")
    return found


def _open(event: Opened, seen: list[_Seen]) -> None:
    for choice, (state, index) in enumerate(zip(seen, event.from_index, strict=True)):
        state.ended_here = choice in event.ended
        if index == 0:
            # All over again, so the text too.
            state.due, state.text = 0, ""


def _take(piece: Piece, state: _Seen, output: Output) -> list[tuple[str, str]]:
    found = []
    if state.ended_here:
        found.append(("after finish", f"token {piece.first_index}"))
    if piece.first_index > state.due:
        found.append(("gap", f"token {piece.first_index} came where {state.due} was due"))
    elif piece.first_index < state.due:
        found.append(("repeat", f"token {piece.first_index} came where {state.due} was due"))
    end = piece.first_index + len(piece.token_ids)
    wanted = output.token_ids[piece.first_index : end]
    if piece.token_ids != wanted:
        offset = next(
            (i for i, (a, b) in enumerate(zip(piece.token_ids, wanted, strict=False)) if a != b), len(wanted)
        )
        found.append(("changed token", f"token {piece.first_index + offset} of {len(output.token_ids)}"))
    state.due = end
    state.text += piece.text
    if not output.text.startswith(state.text):
        found.append(("text", f"it differs {_where(state.text, output.text)}"))
    return found


def _where(text: str, wanted: str) -> str:
    position = next((i for i, (a, b) in enumerate(zip(text, wanted, strict=False)) if a != b), None)
    if position is None:
        position = min(len(text), len(wanted))
    return f"from character {position} of {len(wanted)} on ({len(text)} came)"
