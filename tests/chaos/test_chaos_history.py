"""The checker of clients' histories finds what it is there for."""

from __future__ import annotations

import pytest

from kvern_gateway.cli.chaos_history import Ended, Event, Lost, Opened, Output, Piece, check

OUTPUT = Output((10, 11, 12, 13), "abcd", "length")
OTHER = Output((20, 21), "xy", "stop")
START = Opened((0,))


def kinds(*events: Event, expected: tuple[Output, ...] = (OUTPUT,)) -> list[str]:
    return [violation.kind for violation in check(events, expected)]


def piece(first: int, *tokens: int, choice: int = 0, text: str | None = None) -> Piece:
    letters = "".join((OUTPUT, OTHER)[choice].text[first : first + len(tokens)])
    return Piece(choice, first, tokens, letters if text is None else text)


END = Ended(0, "length")


def test_a_whole_output_is_fine() -> None:
    assert kinds(START, piece(0, 10, 11), piece(2, 12, 13), END) == []


def test_going_on_after_a_broken_connection_is_fine() -> None:
    assert kinds(START, piece(0, 10, 11), Opened((2,)), piece(2, 12, 13), END) == []


def test_starting_over_is_fine_and_compared_again() -> None:
    assert kinds(START, piece(0, 10, 11), Opened((0,)), piece(0, 10, 11, 12, 13), END) == []
    assert kinds(START, piece(0, 10, 11), Opened((0,)), piece(0, 10, 99, 12, 13), END) == ["changed token"]


def test_choices_are_kept_apart() -> None:
    events = [
        Opened((0, 0)),
        piece(0, 20, choice=1),
        piece(0, 10, 11, 12),
        piece(1, 21, choice=1),
        Ended(1, "stop"),
        Opened((3, 2), frozenset({1})),
        piece(3, 13),
        END,
    ]
    assert kinds(*events, expected=(OUTPUT, OTHER)) == []


def test_a_gap() -> None:
    assert kinds(START, piece(0, 10), piece(2, 12, 13, text="cd"), END) == ["gap", "text"]


def test_a_gap_after_a_broken_connection() -> None:
    assert kinds(START, piece(0, 10), Opened((1,)), piece(2, 12, 13), END)[0] == "gap"


def test_a_repeat() -> None:
    assert "repeat" in kinds(START, piece(0, 10, 11), Opened((2,)), piece(1, 11, 12, 13), END)


def test_a_changed_token() -> None:
    assert kinds(START, piece(0, 10, 99, 12, 13), END) == ["changed token"]


def test_a_token_too_many() -> None:
    assert kinds(START, piece(0, 10, 11, 12, 13, 14), END) == ["changed token", "early finish"]


def test_changed_text() -> None:
    assert kinds(START, piece(0, 10, 11, text="aB"), piece(2, 12, 13), END) == ["text"]


def test_text_that_was_held_back_and_lost() -> None:
    assert kinds(START, piece(0, 10, 11), piece(2, 12, 13, text="c"), END) == ["text"]


def test_a_double_finish() -> None:
    assert kinds(START, piece(0, 10, 11, 12, 13), END, END) == ["double finish"]


def test_a_finish_that_the_server_was_told_to_be_known() -> None:
    whole = (START, piece(0, 10, 11, 12, 13), END)
    assert kinds(*whole, Opened((4,), frozenset({0})), END) == ["double finish"]
    # A protocol that cannot say so repeats it, on a connection of its own.
    assert kinds(*whole, Opened((4,)), END) == []


def test_a_wrong_finish() -> None:
    assert kinds(START, piece(0, 10, 11, 12, 13), Ended(0, "stop")) == ["wrong finish"]


def test_an_early_finish() -> None:
    assert kinds(START, piece(0, 10, 11), END) == ["early finish"]


def test_a_token_after_the_finish() -> None:
    assert kinds(START, piece(0, 10, 11, 12, 13), END, piece(4, 14)) == ["after finish", "changed token"]


@pytest.mark.parametrize("events", [(START,), (START, piece(0, 10, 11)), ()])
def test_a_request_without_an_end(events: tuple[Event, ...]) -> None:
    assert kinds(*events) == ["lost"]


def test_a_lost_request_is_counted_once() -> None:
    assert kinds(START, piece(0, 10), Lost("unknown")) == ["lost"]
