"""The executor on a GPU's code path computes what transformers and the executor on a CPU compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from lora_adapters import merge, save_adapter
from parity.local_engine import LocalEngine
from quantize import SCHEMES, quantize_tensors, write_checkpoint
from safetensors.torch import load_file
from worker.conftest import load_executor
from worker.mini_scheduler import MiniScheduler, Sequence, generate, greedy
from worker.test_worker_embeddings import embed as pooled
from worker.test_worker_parity import assert_greedy, random_prompts

import kvern_kernels as kernels
from kvern.v1 import worker_pb2
from kvern.v1.sampling_pb2 import SamplingParams

VOCAB = 67
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
CONFIGS: dict[str, Callable[[], Any]] = {
    "dense": lambda: transformers.Qwen3Config(**SIZES),
    "moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS),
}
SAMPLING = [
    greedy(logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=0.8, top_k=9, top_p=0.9, seed=3),
    greedy(
        repetition_penalty=1.7, frequency_penalty=0.5, presence_penalty=0.3, logit_bias={5: 4.0}, logprobs=2
    ),
    SamplingParams(
        temperature=1.3, min_p=0.05, seed=4, allowed_token_ids=[3, 5, 7, 9], bad_token_ids=[5], min_tokens=9
    ),
]
SMALL: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "kv_cache_memory_bytes": 2**20,
    "max_model_len": 64,
    "cudagraph_capture_sizes": [2, 4],
}
Made = Callable[[str], tuple[Any, Path]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """By name: transformers' model, and the folder of its checkpoint."""
    made: dict[str, tuple[Any, Path]] = {}

    def get(name: str) -> tuple[Any, Path]:
        if name not in made:
            torch.manual_seed(len(name))
            built = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
            with torch.no_grad():
                for key, parameter in built.named_parameters():
                    if "norm" not in key:
                        parameter.normal_(0.0, 0.2)
            folder = tmp_path_factory.mktemp(name)
            built.save_pretrained(folder)
            made[name] = built, folder
        return made[name]

    return get


def on_cpu(run: Callable[[], Any]) -> Any:
    """``run()``, its ops from the backends of a CPU."""
    kernels.select(None)
    try:
        return run()
    finally:
        kernels.select(None if torch.cuda.is_available() else "triton")


def traced(folder: Path, **options: Any) -> list[tuple[list[int], list[tuple[list[int], list[float]]]]]:
    """Tokens of each of SAMPLING, and ids and values of its log-probabilities."""
    executor = load_executor(folder, **SMALL, **options)
    prompts = random_prompts(len(SAMPLING), 4, 14, VOCAB)
    sequences = [Sequence(prompt, how, 4) for prompt, how in zip(prompts, SAMPLING, strict=True)]
    MiniScheduler(executor).run(sequences, chunk=8)
    assert all(sequence.error is None for sequence in sequences)
    return [
        (
            sequence.output,
            [
                ([one.token_id, one.rank, *one.top_token_ids], [one.logprob, *one.top_logprobs])
                for one in (*sequence.logprobs, *sequence.prompt_logprobs.values())
            ],
        )
        for sequence in sequences
    ]


def assert_alike(found: list[Any], expected: list[Any], tolerance: float) -> None:
    for (tokens, logprobs), (wanted, known) in zip(found, expected, strict=True):
        assert tokens == wanted
        assert [ids for ids, _ in logprobs] == [ids for ids, _ in known]
        for (_, ours), (_, theirs) in zip(logprobs, known, strict=True):
            assert ours == pytest.approx(theirs, abs=tolerance)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_equal_transformers(name: str, device: str, model: Made) -> None:
    reference, folder = model(name)
    executor = load_executor(folder, device=device, **SMALL)
    assert executor.describe().device == ("cuda" if device == "cuda" else "triton interpreter")
    # Prompts in chunks beside others that decode; decodes of one to three sequences, padded to graphs of two and four.
    prompts = random_prompts(3, 4, 14, VOCAB)
    for prompt, output in zip(prompts, generate(executor, prompts, 4, chunk=8), strict=True):
        assert len(output) == 4
        assert_greedy(reference, prompt, output)


def test_sampling_on_the_device_equals_the_cpu(device: str, model: Made) -> None:
    _, folder = model("dense")
    assert_alike(traced(folder, device=device), on_cpu(lambda: traced(folder)), 1e-4)


def test_a_quantized_model_with_an_fp8_cache_equals_the_cpu(device: str, model: Made, tmp_path: Path) -> None:
    _, like = model("dense")
    scheme = SCHEMES["gptq-4-asym-reordered"](32)
    stored, _ = quantize_tensors(load_file(like / "model.safetensors"), scheme)
    folder = write_checkpoint(tmp_path / "gptq", like, stored, scheme)
    options = {"kv_cache_dtype": "fp8", "enforce_eager": True}
    assert_alike(traced(folder, device=device, **options), on_cpu(lambda: traced(folder, **options)), 1e-3)


def test_adapters_equal_merged_weights(device: str, model: Made, tmp_path: Path) -> None:
    reference, folder = model("dense")
    adapter = save_adapter(tmp_path / "adapter", reference, ["q_proj", "v_proj", "o_proj", "up_proj"], 3, 1)
    executor = load_executor(folder, device=device, max_loras=2, max_lora_rank=4, **SMALL)
    executor.place_adapter(worker_pb2.PlaceAdapterRequest(path=str(adapter), slot=2))
    prompts = random_prompts(3, 4, 10, VOCAB)
    sequences = [Sequence(prompt, greedy(), 3, adapter=2 * (i % 2)) for i, prompt in enumerate(prompts)]
    MiniScheduler(executor).run(sequences, chunk=8)
    models = {0: reference, 2: merge(reference, adapter)}
    for sequence in sequences:
        assert_greedy(models[sequence.adapter], sequence.prompt, sequence.output)
    unadapted = Sequence(prompts[1], greedy(), 3)
    MiniScheduler(executor).run([unadapted])
    assert unadapted.output != sequences[1].output


def test_embeddings_equal_the_cpu(device: str, model: Made, tmp_path: Path) -> None:
    torch.manual_seed(1)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=32, max_position_embeddings=64)
    transformers.BertModel(config).eval().save_pretrained(tmp_path)
    options = {**SMALL, "cudagraph_capture_sizes": None, "pooler_config": '{"pooling_type": "MEAN"}'}

    def embed(device: str) -> list[np.ndarray]:
        engine = LocalEngine(load_executor(tmp_path, device=device, **options))
        return pooled(engine, random_prompts(3, 4, 10, VOCAB))

    for found, expected in zip(embed(device), on_cpu(lambda: embed("cpu")), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
