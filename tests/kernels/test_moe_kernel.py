"""Mixture of experts on the C++ backend: against the reference, and bits that the batch doesn't change."""

import pytest
import torch

from kvern_kernels import cpu, reference
from kvern_kernels.reference_moe import gated

EXPERTS, WIDTH, INNER, TOP_K = 6, 64, 48, 3


def experts(kind: str, activation: str = "silu") -> tuple[object, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Packed experts, and their weights in float32."""
    packs, weights = [], []
    for _ in range(EXPERTS):
        pair = []
        for n, k in ((2 * INNER, WIDTH), (WIDTH, INNER)):
            if kind == "int8":
                codes, scales = torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n) * 0.004
                pair.append((cpu.pack_int8(codes, scales), codes.float() * scales[:, None]))
            else:
                weight = (torch.randn(n, k) * 0.2).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
                pair.append((cpu.pack_linear(weight), weight.float()))
        packs.append([packed for packed, _ in pair])
        weights.append((pair[0][1], pair[1][1]))
    packed = cpu.pack_experts([p[0] for p in packs], [p[1] for p in packs], activation)
    return packed, weights


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu_oai"])
def test_experts_match_a_plain_loop(linear_variant: str, kind: str, activation: str) -> None:
    packed, weights = experts(kind, activation)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    for tokens in (0, 1, 2, 19):
        x = torch.randn(tokens, WIDTH).to(dtype)
        ids = torch.rand(tokens, EXPERTS).argsort(1)[:, :TOP_K].int()
        if tokens > 1:
            ids[1, 0] = -1  # padding
        chosen = torch.rand(tokens, TOP_K)
        counts = torch.zeros(EXPERTS, dtype=torch.int32)
        got = cpu.fused_moe(x, chosen, ids, packed, counts=counts)
        expected = torch.zeros(tokens, WIDTH)
        for t in range(tokens):
            for j in range(TOP_K):
                if ids[t, j] >= 0:
                    up, down = weights[ids[t, j]]
                    expected[t] += chosen[t, j] * (down @ gated((up @ x[t].float())[None], activation)[0])
        error = 1e-4 if kind == "float32" else 0.02
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), expected, rtol=error, atol=error * 2)
        assert torch.equal(counts, torch.bincount(ids[ids >= 0].long(), minlength=EXPERTS).int())


@pytest.mark.parametrize("threads,activation", [(1, "silu"), (2, "swiglu_oai"), (3, "silu")])
def test_a_token_has_the_same_bits_in_every_batch(linear_variant: str, threads: int, activation: str) -> None:
    packed, _ = experts("bfloat16", activation)
    x, chosen = torch.randn(60, WIDTH).bfloat16(), torch.rand(60, TOP_K)
    ids = torch.rand(60, EXPERTS).argsort(1)[:, :TOP_K].int()
    whole = cpu.fused_moe(x, chosen, ids, packed)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for size in (1, 7, 32):
            rows = [slice(i, i + size) for i in range(0, 60, size)]
            parts = torch.cat([cpu.fused_moe(x[r], chosen[r], ids[r], packed) for r in rows])
            assert torch.equal(parts, whole)
    finally:
        torch.set_num_threads(before)


def test_experts_of_other_ranks_add_nothing() -> None:
    packed, _ = experts("float32")
    x, chosen = torch.randn(9, WIDTH), torch.rand(9, TOP_K)
    ids = torch.rand(9, EXPERTS).argsort(1)[:, :TOP_K].int()
    total = torch.zeros(9, WIDTH)
    for held in ([0, 3], [5, 1, 2, 4]):
        place = torch.full((EXPERTS,), -1, dtype=torch.int32)
        place[held] = torch.arange(len(held), dtype=torch.int32)
        mine = cpu.pack_experts([packed.gate_up[e] for e in held], [packed.down[e] for e in held])
        total += cpu.fused_moe(x, chosen, ids, mine, place)
    torch.testing.assert_close(total, cpu.fused_moe(x, chosen, ids, packed))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (16, 5)])
@pytest.mark.parametrize("biased", [True, False])
def test_routing_is_the_references(
    scoring: str, renormalize: bool, groups: int, kept: int, biased: bool
) -> None:
    logits = torch.randn(70, 16)
    logits[3] = 0.5  # all equal: the lower id comes first
    bias = torch.randn(16) * 0.3 if biased else None
    arguments = (4, scoring, renormalize, bias, groups, kept, 1.5)
    weights, ids = cpu.moe_route(logits, *arguments)
    expected_weights, expected_ids = reference.moe_route(logits, *arguments)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights)


def test_wrong_shapes_are_named() -> None:
    packed, _ = experts("float32")
    with pytest.raises(ValueError, match=r"x \[2, 63\].* experts of width 64"):
        cpu.fused_moe(torch.zeros(2, 63), torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.int32), packed)
    with pytest.raises(ValueError, match="unknown expert activation 'relu'"):
        cpu.pack_experts([], [], "relu")
