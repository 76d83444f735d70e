"""SmolLM2-135M-Instruct, as its package ships it, against transformers with weights dequantised by gguf."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from worker.conftest import Progress, load_executor
from worker.mini_scheduler import MiniScheduler, Sequence, generate, greedy
from worker.test_worker_parity import assert_greedy

from kvern_worker.executor import ModelExecutor
from kvern_worker.loading import LoadOptions, load
from kvern_worker.weights.checkpoint import bundled_model
from kvern_worker.weights.gguf_file import GgufFile

GGUF = bundled_model()
VOCAB = 49_152
# "Name three colors." in the chat template, and what the model is known to answer.
COLORS = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2,
          198, 1, 4093, 198, 5820, 1296, 4683, 30, 2, 198, 1, 520, 9531, 198]  # fmt: skip
RED_BLUE_GREEN = [33, 30, 3950, 198, 34, 30, 10062, 198, 35, 30, 4910, 2]


@pytest.fixture(scope="module")
def oracle() -> Any:
    """transformers' Llama in float32, its weights dequantised by the gguf package."""

    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
             "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_output": "self_attn.o_proj",
             "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}  # fmt: skip
    weights = {}
    assert GGUF is not None
    file = GgufFile(GGUF)  # gguf's own reader takes several seconds for the vocabulary
    for tensor in file.tensors.values():
        kind = GGMLQuantizationType(tensor.type_number)
        raw = file.raw(tensor).reshape(tensor.shape[0], -1)
        value = dequantize(raw, kind) if kind != GGMLQuantizationType.F32 else raw.view(np.float32)[:, 0]
        match = re.match(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        if not match:
            name = {"token_embd.weight": "model.embed_tokens", "output_norm.weight": "model.norm"}[
                tensor.name
            ]
        else:
            name = f"model.layers.{match[1]}.{names[match[2]]}"
            if match[2] in ("attn_q", "attn_k"):
                # Rotary pairs lie side by side in the file, half a head apart in transformers.
                heads = value.reshape(-1, 32, 2, 576)
                value = np.concatenate((heads[:, :, 0], heads[:, :, 1]), axis=1).reshape(value.shape)
        weights[f"{name}.weight"] = torch.from_numpy(np.ascontiguousarray(value))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    # Buffers were made on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


@pytest.fixture(scope="module")
def smollm2() -> ModelExecutor:
    return load_executor(str(GGUF), kv_cache_memory_bytes=512 * 2**20, max_model_len=2048)


def prompts_of(count: int, low: int = 8, high: int = 80) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(20, VOCAB) for _ in range(rng.randint(low, high))] for _ in range(count)]


def test_logits_equal_transformers(smollm2: ModelExecutor, oracle: Any) -> None:
    sequence = Sequence(COLORS + RED_BLUE_GREEN, greedy(prompt_logprobs=VOCAB), 1)
    MiniScheduler(smollm2).run([sequence], chunk=16)
    with torch.inference_mode():
        expected = oracle(torch.tensor([sequence.prompt])).logits[0].log_softmax(-1)
    for index, found in sequence.prompt_logprobs.items():
        ours = torch.empty(VOCAB)
        ours[list(found.top_token_ids)] = torch.tensor(list(found.top_logprobs))
        torch.testing.assert_close(ours, expected[index - 1], atol=1e-3, rtol=1e-4)


def test_greedy_tokens_equal_transformers(smollm2: ModelExecutor, oracle: Any) -> None:
    prompts = [*prompts_of(7), COLORS]
    outputs = generate(smollm2, prompts, 32, chunk=64)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(oracle, prompt, output)


def test_chunks_batches_and_preemption_change_nothing(smollm2: ModelExecutor) -> None:
    prompts = prompts_of(16, 8, 70)
    together = generate(smollm2, prompts, 6)
    assert generate(smollm2, prompts, 6, chunk=16) == together
    assert generate(smollm2, prompts, 6, chunk=64, preempt_at=3) == together
    assert [generate(smollm2, [prompt], 6)[0] for prompt in prompts[:3]] == together[:3]


def test_bfloat16_answers_the_known_question() -> None:
    progress = Progress()
    executor = load(LoadOptions(model=str(GGUF), kv_cache_memory_bytes=64 * 2**20), progress)
    assert executor.describe().model.dtype in ("bfloat16", "float32")
    assert list(executor.describe().model.eos_token_ids) == [2]
    assert progress.loaded_bytes == progress.total_bytes > 90_000_000
    assert generate(executor, [COLORS], 12) == [RED_BLUE_GREEN]


def test_quantized_weights_give_the_tokens_of_float32_ones(smollm2: ModelExecutor, oracle: Any) -> None:
    quantized = load_executor(
        str(GGUF), kv_cache_memory_bytes=256 * 2**20, max_model_len=1024, keep_quantized=True
    )
    prompts = prompts_of(3)
    for prompt, output in zip(prompts, generate(quantized, prompts, 12), strict=True):
        assert_greedy(oracle, prompt, output)
