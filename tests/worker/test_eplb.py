"""Placement tables and load balancing of experts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern_worker.parallel import eplb

LOAD = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)


def test_placement_tables() -> None:
    assert eplb.place_linear(10, 4) == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert eplb.place_round_robin(10, 4) == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    assert eplb.place_round_robin(4, 2) == [[0, 2], [1, 3]]
    assert eplb.expert_map([1, 5, 9], 10).tolist() == [-1, 0, -1, -1, -1, 1, -1, -1, -1, 2]


def test_the_published_example() -> None:
    plan = eplb.balance(LOAD, places=16, groups=4, nodes=2, ranks=8)
    assert plan.logical.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, dict[str, int]]:
    nodes, per_node = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    ranks = nodes * per_node
    groups = draw(st.integers(1, 6))
    experts = groups * draw(st.integers(1, 4)) * nodes
    places = -(-experts // ranks) * ranks + ranks * draw(st.integers(0, 2))
    seed, layers = draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, 3))
    random = np.random.default_rng(seed)
    load = np.stack([random.permutation(1e5 / np.arange(1, experts + 1)).round() for _ in range(layers)])
    return load, {
        "places": places,
        "groups": groups * nodes if draw(st.booleans()) else groups,
        "nodes": nodes,
        "ranks": ranks,
    }


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_plan_is_whole(case: tuple[np.ndarray, dict[str, int]]) -> None:
    load, sizes = case
    plan = eplb.balance(load, **sizes)
    layers, experts = load.shape
    assert plan.logical.shape == plan.copy.shape == (layers, sizes["places"])
    assert (plan.copies >= 1).all() and (plan.copies.sum(1) == sizes["places"]).all()
    table = plan.places_of()
    for layer in range(layers):
        assert np.bincount(plan.logical[layer], minlength=experts).tolist() == plan.copies[layer].tolist()
        held = table[layer][table[layer] >= 0]
        assert sorted(held.tolist()) == list(range(sizes["places"]))
        for expert in range(experts):
            places = table[layer, expert, : plan.copies[layer, expert]]
            assert (plan.logical[layer, places] == expert).all()
    if sizes["groups"] % sizes["nodes"] == 0:
        # All of a group's copies lie on one node.
        group = plan.logical // (experts // sizes["groups"])
        node = np.arange(sizes["places"]) // (sizes["places"] // sizes["nodes"])
        for layer in range(layers):
            assert len(set(zip(group[layer], node, strict=True))) == sizes["groups"]


def trivial(experts: int, places: int, layers: int) -> eplb.ExpertPlan:
    """Experts in order, spare places repeat the first."""
    logical = np.tile(np.arange(places) % experts, (layers, 1))
    copies = np.tile(np.bincount(np.arange(places) % experts, minlength=experts), (layers, 1))
    return eplb.ExpertPlan(logical, np.tile(np.arange(places) // experts, (layers, 1)), copies)


def test_skewed_load_becomes_more_even() -> None:
    random = np.random.default_rng(3)
    for _ in range(20):
        load = np.stack([random.permutation(1e6 / np.arange(1, 65) ** 1.2) for _ in range(4)])
        plan = eplb.balance(load, places=80, groups=1, nodes=1, ranks=8)
        before = eplb.balancedness(load, trivial(64, 80, 4), 8)
        assert eplb.balancedness(load, plan, 8) > max(before, 0.9)


def test_no_load_is_even() -> None:
    plan = eplb.balance(np.zeros((1, 4)), places=4, groups=1, nodes=1, ranks=2)
    assert eplb.balancedness(np.zeros((1, 4)), plan, 2) == 1.0


@settings(max_examples=50, deadline=None)
@given(cases(), st.integers(0, 2**32 - 1))
def test_what_stays_on_a_rank_stays_in_place(case: tuple[np.ndarray, dict[str, int]], seed: int) -> None:
    load, sizes = case
    ranks = sizes["ranks"]
    before = eplb.balance(load, **sizes).logical
    after = eplb.balance(np.random.default_rng(seed).permutation(load, axis=1), **sizes)
    kept = eplb.keep_places(before, after, ranks)
    for layer in range(load.shape[0]):
        for old, new, moved in zip(
            *(np.split(table[layer], ranks) for table in (before, after.logical, kept.logical)), strict=True
        ):
            assert sorted(new.tolist()) == sorted(moved.tolist())
            common = sum(min((old == e).sum(), (new == e).sum()) for e in set(old.tolist()))
            assert (old == moved).sum() == common
    for layer, expert in np.ndindex(*kept.copies.shape):
        mine = kept.copy[layer][kept.logical[layer] == expert]
        assert sorted(mine.tolist()) == list(range(kept.copies[layer, expert]))


def test_numbers_that_do_not_divide_are_named() -> None:
    with pytest.raises(
        ValueError, match="cannot place 12 experts of 4 groups in 15 places of 8 ranks on 2 nodes"
    ):
        eplb.balance(LOAD, 15, 4, 2, 8)
