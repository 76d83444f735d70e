"""Routing, grouping and experts against the reference."""

from dataclasses import replace

import pytest
import torch
from packed_weights import both, fp8, gptq, int8, mxfp4

from kvern_kernels import reference
from kvern_kernels.triton import moe, packing, routing
from kvern_kernels.triton.grouping import group_rows

D, INNER = 64, 32
PROJECTIONS = {
    "plain": lambda n, k: both("pack_linear", torch.randn(n, k) * 0.2, torch.randn(n)),
    "int8": lambda n, k: int8(n, k, None),
    "w8a8 int8": lambda n, k: int8(n, k, "int8"),
    "fp8 blocks": lambda n, k: fp8(n, k, True, None),
    "w8a8 fp8 blocks": lambda n, k: fp8(n, k, True, "fp8"),
    "w8a8 fp8 channel": lambda n, k: fp8(n, k, False, "fp8"),
    "gptq 4": lambda n, k: gptq(n, k, 4, 16, reordered=True),
    "mxfp4": mxfp4,
}


def experts(kind: str, count: int, activation: str, device: str) -> tuple:
    """(reference's, Triton's) experts."""
    gate_up = [PROJECTIONS[kind](2 * INNER, D) for _ in range(count)]
    down = [PROJECTIONS[kind](D, INNER) for _ in range(count)]
    expected = reference.pack_experts([a for a, _ in gate_up], [a for a, _ in down], activation)
    packed = moe.pack_experts([b for _, b in gate_up], [b for _, b in down], activation)

    def to(one: packing.PackedLinear) -> packing.PackedLinear:
        planes = {name: getattr(one, name) for name in (*packing.PLANES, "bias", "order")}
        return replace(one, **{name: plane.to(device) for name, plane in planes.items() if plane is not None})

    return expected, replace(packed, gate_up=to(packed.gate_up), down=to(packed.down))


@pytest.mark.parametrize(
    ("count", "top_k", "options"),
    [
        (8, 2, {}),
        (6, 6, {"renormalize": False, "scoring": "sigmoid"}),
        (12, 3, {"scoring": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5, "bias": True}),
        (12, 4, {"num_groups": 3, "top_groups": 2}),
    ],
)
def test_routing(device: str, count: int, top_k: int, options: dict) -> None:
    if "bias" in options:
        options = {**options, "bias": torch.randn(count) * 0.3}
    for tokens in (0, 1, 5):
        logits = torch.randn(tokens, count + 2)[:, 2:]
        logits[:, 1] = logits[:, 0]  # a tie goes to the lower id
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        weights, ids = routing.moe_route(logits.to(device), top_k, **moved)
        expected_weights, expected_ids = reference.moe_route(logits, top_k, **options)
        assert torch.equal(ids.cpu(), expected_ids)
        torch.testing.assert_close(weights.cpu(), expected_weights, rtol=1e-5, atol=1e-6)


def test_a_broken_row_keeps_ids_in_range(device: str) -> None:
    logits = torch.randn(2, 6, device=device)
    logits[0, 3] = float("nan")
    weights, ids = routing.moe_route(logits, 2)
    assert bool(((ids >= 0) & (ids < 6)).all()) and bool(weights[0].isnan().all())
    assert not bool(weights[1].isnan().any())


@pytest.mark.parametrize(
    ("tokens", "groups", "top_k", "block"), [(70, 5, 3, 16), (40, 5, 3, 64), (3, 300, 2, 16)]
)
def test_grouping_is_a_plain_sort(device: str, tokens: int, groups: int, top_k: int, block: int) -> None:
    ids = torch.randint(-1, groups + 1, (tokens, top_k), dtype=torch.int32)
    placed = torch.arange(groups, dtype=torch.int32).flip(0)
    placed[1::3] = -1
    counts = torch.ones(groups, dtype=torch.int32, device=device)
    held = int((placed >= 0).sum())
    got = group_rows(ids.to(device), groups, held, block, placed.to(device), counts)
    pairs = ids.flatten().tolist()
    rows: list[int] = []
    owners: list[int] = []
    for group in range(groups):
        mine = [pair for pair, one in enumerate(pairs) if one == group and placed[group] >= 0]
        for start in range(0, len(mine), block):
            part = mine[start : start + block]
            rows += part + [len(pairs)] * (block - len(part))
            owners.append(int(placed[group]))
    assert got.owners.tolist() == owners + [-1] * (got.blocks - len(owners))
    assert got.rows.tolist() == rows + [len(pairs)] * (got.blocks * block - len(rows))
    assert counts.tolist() == [1 + pairs.count(group) for group in range(groups)]


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_experts(device: str, kind: str) -> None:
    expected, packed = experts(kind, 3, "silu", device)
    for tokens in (0, 1, 20):
        x, logits = torch.randn(tokens, D), torch.randn(tokens, 3)
        weights, ids = reference.moe_route(logits, 2)
        got = moe.fused_moe(x.to(device), weights.to(device), ids.to(device), packed).cpu()
        wanted = reference.fused_moe(x, weights, ids, expected)
        # A quantized activation may round to its neighbour.
        bound = 2e-2 if "w8a8" in kind else 1e-5
        assert got.shape == x.shape and (got - wanted).norm() <= bound * wanted.norm()


@pytest.mark.parametrize("activation", ["gelu", "swiglu_oai"])
def test_activations(device: str, activation: str) -> None:
    expected, packed = experts("plain", 2, activation, device)
    x, logits = torch.randn(5, D) * 3, torch.randn(5, 2)
    weights, ids = reference.moe_route(logits, 1)
    got = moe.fused_moe(x.to(device), weights.to(device), ids.to(device), packed).cpu()
    torch.testing.assert_close(got, reference.fused_moe(x, weights, ids, expected), rtol=1e-4, atol=1e-4)


def test_all_tokens_to_one_expert_padding_and_other_ranks(device: str) -> None:
    expected, packed = experts("plain", 2, "silu", device)
    placed = torch.tensor([-1, 1, -1, 0], dtype=torch.int32)
    for chosen in ([1, 1], [0, 2], [3, -1], [1, 3], [9, 1]):
        ids = torch.tensor([chosen] * 17, dtype=torch.int32)
        weights, x = torch.rand(17, 2), torch.randn(17, D)
        counts = torch.zeros(4, dtype=torch.int32)
        seen = counts.to(device)
        arguments = (x.to(device), weights.to(device), ids.to(device), packed, placed.to(device), seen)
        got = moe.fused_moe(*arguments).cpu()
        wanted = reference.fused_moe(x, weights, ids, expected, placed, counts)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(seen.cpu(), counts)


def test_a_broken_token_leaves_the_others_as_they_are(device: str) -> None:
    _, packed = experts("plain", 2, "silu", device)
    x, weights = torch.randn(6, D, device=device), torch.rand(6, 1, device=device)
    ids = torch.zeros(6, 1, dtype=torch.int32, device=device)
    before = moe.fused_moe(x, weights, ids, packed)
    x[2] = float("nan")
    after = moe.fused_moe(x, weights, ids, packed)
    others = [0, 1, 3, 4, 5]
    assert bool(after[2].isnan().all()) and torch.equal(after[others], before[others])


def test_what_does_not_fit_is_named(device: str) -> None:
    _, packed = experts("plain", 2, "silu", device)
    with pytest.raises(ValueError, match="do not fit each other or experts of 64 features"):
        moe.fused_moe(torch.zeros(2, 8), torch.zeros(2, 1), torch.zeros(2, 1), packed)
