"""Which wait of a stream is laid at which fault's door."""

from __future__ import annotations

import pytest

from kvern_gateway.cli.bench_chaos import stalls_of
from kvern_gateway.cli.chaos_faults import KINDS, Fault, Strike, draw_faults
from kvern_gateway.cli.chaos_load import Record
from kvern_gateway.cli.chaos_surfaces import Template

TEMPLATE = Template("t", "grpc", "x", 10)


def strike(at: float, kind: str = "scheduler", process: str = "scheduler-0", alone: bool = True) -> Strike:
    return Strike(Fault(kind, "kill", 0.0, "any", 0.0, 0, True, not alone), process, at, alone)


def record(*progress: float, started: float = 0.0) -> Record:
    return Record(TEMPLATE, "r", started, progress=list(progress))


def test_the_longest_wait_after_the_fault_counts() -> None:
    stream = record(1.0, 5.0, 5.1, 5.5, 5.6, 9.0)
    assert stalls_of([strike(5.05)], 0, [stream]) == [pytest.approx(3.4)]
    assert stalls_of([strike(5.2), strike(5.55)], 0, [stream]) == [pytest.approx(0.4)]


def test_a_wait_belongs_to_the_fault_that_began_it() -> None:
    stream = record(1.0, 4.0, 4.1)
    strikes = [strike(2.0), strike(3.0)]
    assert stalls_of(strikes, 0, [stream]) == [pytest.approx(3.0)]
    assert stalls_of(strikes, 1, [stream]) == [pytest.approx(0.1)]


def test_a_wait_that_the_next_fault_ends_up_in_is_not_the_first_ones() -> None:
    stream = record(1.0, 2.2, 2.9, 6.0)
    strikes = [strike(2.0), strike(3.0)]
    assert stalls_of(strikes, 0, [stream]) == [pytest.approx(1.2)]
    assert stalls_of(strikes, 1, [stream]) == [pytest.approx(3.1)]


def test_streams_that_had_ended_or_not_begun_do_not_count() -> None:
    assert stalls_of([strike(5.0)], 0, [record(1.0, 4.9), record(6.0, 7.0, started=5.5)]) == []


def test_faults_among_others_do_not_count() -> None:
    stream = record(1.0, 5.0, 9.0)
    strikes = [strike(2.0), strike(3.0, alone=False), strike(6.0)]
    assert [stalls_of(strikes, index, [stream]) for index in range(2)] == [[], []]
    assert stalls_of(strikes, 2, [stream]) == [pytest.approx(4.0)]


def test_a_gateway_stalls_its_own_streams_only() -> None:
    mine, other = record(1.0, 4.0), record(1.0, 4.0)
    mine.gateways = [(0.0, "gateway-1"), (3.0, "gateway-0")]
    other.gateways = [(0.0, "gateway-0")]
    strikes = [strike(2.0, "gateway", "gateway-1")]
    assert stalls_of(strikes, 0, [mine, other]) == [pytest.approx(3.0)]
    assert stalls_of(strikes, 0, [other]) == []


def test_faults_follow_from_the_seed() -> None:
    drawn = draw_faults(KINDS, 5, 2, seed=7)
    assert drawn == draw_faults(KINDS, 5, 2, seed=7)
    assert drawn != draw_faults(KINDS, 5, 2, seed=8)
    names = [fault.name for fault in drawn]
    assert {name: names.count(name) for name in set(names)} == {
        f"{kind} {action}": count
        for kind in KINDS
        for action, count in (("kill", 5), ("freeze", 2), ("restart", 2))
    }
