"""Which expert lies where: placement without load, and balancing by load (EPLB).

Experts of a model are *logical*; the places that hold a copy of one are *physical*, the same number on every
rank, in rank order. Pure functions on arrays; nothing here knows a device or a rank of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def place_linear(num_experts: int, num_ranks: int) -> list[list[int]]:
    """Each rank's experts in runs; the first num_experts mod num_ranks ranks hold one more."""
    each, more = divmod(num_experts, num_ranks)
    starts = [rank * each + min(rank, more) for rank in range(num_ranks + 1)]
    return [list(range(a, b)) for a, b in pairwise(starts)]


def place_round_robin(num_experts: int, num_ranks: int) -> list[list[int]]:
    """Expert e on rank e mod num_ranks, so that the experts of one routing group lie on many ranks."""
    return [list(range(rank, num_experts, num_ranks)) for rank in range(num_ranks)]


PLACEMENTS = {"linear": place_linear, "round_robin": place_round_robin}


def expert_map(held: list[int], num_experts: int) -> NDArray[np.int32]:
    """int32 [num_experts] for `fused_moe`: an expert's place among those `held` here, −1 for the others."""
    places = np.full(num_experts, -1, np.int32)
    places[held] = np.arange(len(held), dtype=np.int32)
    return places


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """Where the copies of each layer's experts lie.

    `logical` int64 [layers, places]: the expert that a place holds; `copy` [layers, places]: which of that
    expert's copies it is; `copies` [layers, experts]: how many there are.
    """

    logical: Ints
    copy: Ints
    copies: Ints

    def places_of(self) -> Ints:
        """int64 [layers, experts, most copies]: the places of each expert's copies, −1 where it has fewer."""
        layers, places = self.logical.shape
        table = np.full((*self.copies.shape, int(self.copies.max())), -1, np.int64)
        table[np.arange(layers)[:, None], self.logical, self.copy] = np.arange(places)
        return table


def balance(load: NDArray[np.number], places: int, groups: int, nodes: int, ranks: int) -> ExpertPlan:
    """Copies and places for `load` [layers, experts], the tokens that each expert gets, by DeepSeek's EPLB
    (github.com/deepseek-ai/EPLB).

    Where the `groups` of experts divide evenly among nodes, three steps: groups are packed onto nodes, so that
    tokens of a group stay within one (group-limited routing); within a node the spare places go, one after the
    other, to the expert with most load a copy; copies are packed onto the node's ranks. Else the two last
    steps are done once, over all. Packing gives each pack the same number, heaviest first to the lightest pack
    that has room; ties go to the lower index.

    Raises ValueError for numbers that do not divide.
    """
    layers, experts = load.shape
    if places < experts or places % ranks or ranks % nodes or experts % groups:
        raise ValueError(
            f"cannot place {experts} experts of {groups} groups in {places} places of {ranks} ranks on {nodes} nodes: "
            "places must be at least the experts and a multiple of the ranks, ranks a multiple of the nodes, "
            "experts of the groups"
        )
    if groups % nodes:
        groups, nodes = 1, 1
    weight = load.astype(np.float64)

    # Step 1: groups onto nodes. `by_node` lists the logical experts node after node.
    size = experts // groups
    node, position = _pack(weight.reshape(layers, groups, size).sum(-1), nodes)
    rank_of_group = node * (groups // nodes) + position
    new_index = (rank_of_group[:, :, None] * size + np.arange(size)).reshape(layers, experts)
    by_node = _inverse(new_index)

    # Step 2: copies within each node.
    on_node = np.take_along_axis(weight, by_node, 1).reshape(layers * nodes, experts // nodes)
    logical, copy, copies = _replicate(on_node, places // nodes)

    # Step 3: copies onto the node's ranks.
    share = np.take_along_axis(on_node / copies, logical, 1)
    rank, slot = _pack(share, ranks // nodes)
    source = _inverse(rank * (places // ranks) + slot)
    logical, copy = (np.take_along_axis(table, source, 1) for table in (logical, copy))

    offsets = np.arange(nodes)[None, :, None] * (experts // nodes)
    within = (logical.reshape(layers, nodes, -1) + offsets).reshape(layers, places)
    return ExpertPlan(
        np.take_along_axis(by_node, within, 1),
        copy.reshape(layers, places),
        np.take_along_axis(copies.reshape(layers, experts), new_index, 1),
    )


def _pack(weight: NDArray[np.float64], packs: int) -> tuple[Ints, Ints]:
    """weight [rows, n] → (pack, place in it), int64 [rows, n] each: n/packs items a pack, of about equal sums."""
    rows, n = weight.shape
    room = n // packs
    if room == 1:
        return np.tile(np.arange(n), (rows, 1)), np.zeros((rows, n), np.int64)
    pack, place = np.empty((rows, n), np.int64), np.empty((rows, n), np.int64)
    total, used = np.zeros((rows, packs)), np.zeros((rows, packs), np.int64)
    row = np.arange(rows)
    for item in np.argsort(-weight, axis=1, kind="stable").T:
        lightest = np.where(used < room, total, np.inf).argmin(1)
        pack[row, item], place[row, item] = lightest, used[row, lightest]
        total[row, lightest] += weight[row, item]
        used[row, lightest] += 1
    return pack, place


def _replicate(weight: NDArray[np.float64], places: int) -> tuple[Ints, Ints, Ints]:
    """weight [rows, n] → (expert and copy of each place [rows, places], copies [rows, n])."""
    rows, n = weight.shape
    expert = np.tile(np.arange(places), (rows, 1))
    copy = np.zeros((rows, places), np.int64)
    copies = np.ones((rows, n), np.int64)
    row = np.arange(rows)
    for place in range(n, places):
        heaviest = (weight / copies).argmax(1)
        expert[:, place], copy[:, place] = heaviest, copies[row, heaviest]
        copies[row, heaviest] += 1
    return expert, copy, copies


def _inverse(order: Ints) -> Ints:
    """The inverse of each row's permutation."""
    inverse = np.empty_like(order)
    np.put_along_axis(inverse, order, np.broadcast_to(np.arange(order.shape[1]), order.shape), 1)
    return inverse


def balancedness(load: NDArray[np.number], plan: ExpertPlan, ranks: int) -> float:
    """Mean ÷ maximum of what the ranks get of `load` [layers, experts], each summed over the layers: 1 is even.

    1 as well where there is no load.
    """
    share = np.take_along_axis(load / plan.copies, plan.logical, 1)
    per_rank = share.reshape(*share.shape[:1], ranks, -1).sum(-1)
    most = per_rank.max(1).sum()
    return float(per_rank.mean(1).sum() / most) if most > 0 else 1.0


def keep_places(before: Ints, after: ExpertPlan, ranks: int) -> ExpertPlan:
    """`after` with the places of each rank reordered so that an expert which the rank held `before`
    (logical [layers, places]) stays where it was: nothing is copied for it.
    """
    layers, places = before.shape
    size = places // ranks
    source = np.empty((layers, places), np.int64)
    for layer in range(layers):
        for start in range(0, places, size):
            old, new = before[layer, start : start + size], after.logical[layer, start : start + size]
            free = list(range(size))
            chosen = np.full(size, -1, np.int64)
            for place, expert in enumerate(old):
                at = next((i for i in free if new[i] == expert), None)
                if at is not None:
                    chosen[place] = at
                    free.remove(at)
            chosen[chosen < 0] = free
            source[layer, start : start + size] = start + chosen
    return ExpertPlan(
        np.take_along_axis(after.logical, source, 1),
        np.take_along_axis(after.copy, source, 1),
        after.copies,
    )
