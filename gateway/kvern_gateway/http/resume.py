"""Event ids of named streams: where each choice stands, so that a lost stream goes on anywhere.

An id lists, choice by choice, the index of the next output token, with an ``e`` once the choice's end was sent:
``17,12e``. A client that sends the same request again with its last id as ``Last-Event-ID`` gets what it lacks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvern.errors import KvernError, invalid

HEADER = "Last-Event-ID"
_POSITION = re.compile(r"(\d{1,9})(e?)")


@dataclass(slots=True)
class Position:
    next_index: int = 0
    ended: bool = False


class EventIds:
    """The positions of one response's choices; ``sent_before`` are those that an earlier response reached."""

    def __init__(self, sent_before: list[Position]) -> None:
        self.sent_before = sent_before
        self.resumes = any(position.next_index or position.ended for position in sent_before)
        self._words = [_word(position.next_index, position.ended) for position in sent_before]

    def after(self, choice: int, next_index: int, ended: bool) -> bytes:
        """The line that begins an event after which the choice stands there."""
        self._words[choice] = _word(next_index, ended)
        return b"id: " + b",".join(self._words) + b"\n"


def _word(next_index: int, ended: bool) -> bytes:
    return b"%de" % next_index if ended else b"%d" % next_index


def parse_last_event_id(value: str | None, max_tokens: Sequence[int]) -> EventIds:
    """``max_tokens``: of each choice. Raises KvernError where the header is none of this request's ids."""
    num_choices = len(max_tokens)
    if value is None:
        return EventIds([Position() for _ in range(num_choices)])
    found = [_POSITION.fullmatch(word) for word in value[:8192].split(",")]
    positions = [Position(int(match[1]), bool(match[2])) for match in found if match is not None]
    if len(positions) != num_choices or len(found) != num_choices:
        limit = f"the id of an event of this request, which lists {num_choices} positions"
        message = f"Last-Event-ID is {value[:60]!r}; it must be {limit}"
        raise invalid(HEADER, message, value=value[:60], limit=limit)
    for choice, (position, most) in enumerate(zip(positions, max_tokens, strict=True)):
        if position.next_index > most:
            raise beyond_the_end(HEADER, choice, position.next_index, most)
    return EventIds(positions)


def beyond_the_end(field: str, choice: int, index: int, limit: int) -> KvernError:
    """``limit``: the tokens that the choice has, or at most can have."""
    message = (
        f"{field} says that {index} tokens of choice {choice} were received; there are no more than {limit}"
    )
    return invalid(field, message, value=index, limit=limit)
