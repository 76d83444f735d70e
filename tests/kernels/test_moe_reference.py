"""Routing and experts against transformers' own modules."""

import pytest
import torch
from transformers import DeepseekV3Config, GptOssConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

import kvern_kernels as kernels
from kvern_kernels import reference


def by_id(weights: torch.Tensor, ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Routing weights [T, E], zero where an expert wasn't chosen."""
    return torch.zeros(ids.shape[0], experts).scatter(1, ids.long(), weights.float())


def test_grouped_sigmoid_routing_is_deepseek_v3s() -> None:
    config = DeepseekV3Config(
        hidden_size=32,
        n_routed_experts=16,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        routed_scaling_factor=2.5,
    )
    router = deepseek.DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(router.weight)
    router.e_score_correction_bias = torch.randn(16) * 0.3
    x = torch.randn(40, 32)
    logits, expected_weights, expected_ids = router(x)
    weights, ids = reference.moe_route(
        logits, 3, "sigmoid", True, router.e_score_correction_bias, num_groups=4, top_groups=2, scale=2.5
    )
    torch.testing.assert_close(by_id(weights, ids, 16), by_id(expected_weights, expected_ids, 16))


@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_routing_and_experts_are_qwen3s(renormalize: bool) -> None:
    config = Qwen3MoeConfig(
        hidden_size=24,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=renormalize,
        moe_intermediate_size=20,
    )
    block = qwen3.Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(1, 17, 24)
    weights, ids = reference.moe_route(x[0] @ block.gate.weight.t(), 2, renormalize=renormalize)
    experts = kernels.pack_experts(
        [kernels.pack_linear(w.detach()) for w in block.experts.gate_up_proj],
        [kernels.pack_linear(w.detach()) for w in block.experts.down_proj],
    )
    got = kernels.fused_moe(x[0], weights, ids, experts)
    torch.testing.assert_close(got, block(x).view(17, 24), rtol=1e-4, atol=1e-5)


def test_gpt_oss_experts() -> None:
    config = GptOssConfig(hidden_size=24, intermediate_size=20, num_local_experts=4, num_experts_per_tok=2)
    experts = gpt_oss.GptOssExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    x, logits = torch.randn(9, 24) * 3, torch.randn(9, 4)
    weights, ids = reference.moe_route(logits, 2)
    order = torch.cat((torch.arange(0, 40, 2), torch.arange(1, 40, 2)))  # theirs are interleaved
    packed = reference.pack_experts(
        [
            reference.pack_linear(w.t()[order], b[order])
            for w, b in zip(experts.gate_up_proj, experts.gate_up_proj_bias, strict=True)
        ],
        [
            reference.pack_linear(w.t(), b)
            for w, b in zip(experts.down_proj, experts.down_proj_bias, strict=True)
        ],
        "swiglu_oai",
    )
    expected = experts(x, ids.long(), weights)
    torch.testing.assert_close(reference.fused_moe(x, weights, ids, packed), expected, rtol=1e-4, atol=1e-4)


def test_ranks_add_up_and_counts_are_of_all_experts() -> None:
    gate_up, down = torch.randn(5, 12, 8), torch.randn(5, 8, 6)
    x, logits = torch.randn(7, 8), torch.randn(7, 5)
    weights, ids = reference.moe_route(logits, 2)
    ids[3, 1] = -1  # padding
    pack = reference.pack_linear

    def part(held: list[int]) -> torch.Tensor:
        placed = torch.full((5,), -1, dtype=torch.int32)
        placed[held] = torch.arange(len(held), dtype=torch.int32)
        experts = reference.pack_experts([pack(gate_up[e]) for e in held], [pack(down[e]) for e in held])
        counts = torch.ones(5, dtype=torch.int32)
        out = reference.fused_moe(x, weights, ids, experts, placed, counts)
        assert counts.tolist() == [1 + int((ids == e).sum()) for e in range(5)]
        return out

    whole = reference.pack_experts([pack(w) for w in gate_up], [pack(w) for w in down])
    torch.testing.assert_close(part([0, 3]) + part([4, 1, 2]), reference.fused_moe(x, weights, ids, whole))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="unknown router scoring 'tanh'"):
        reference.moe_route(torch.zeros(1, 4), 2, "tanh")
    with pytest.raises(ValueError, match="cannot choose 3 of 2 experts"):
        reference.moe_route(torch.zeros(1, 4), 3, num_groups=2, top_groups=1)
    linears = [reference.pack_linear(torch.zeros(12, 8))]
    with pytest.raises(ValueError, match="do not fit each other"):
        reference.pack_experts(linears, linears)
    with pytest.raises(ValueError, match="unknown expert activation 'relu'"):
        reference.pack_experts(linears, linears, "relu")
