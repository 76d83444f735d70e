"""--kv-cache-dtype: SmolLM2 with a narrow KV cache says nearly the same, and the same bits however it is chunked."""

from __future__ import annotations

import math
import pydoc_data.topics

import pytest
from worker.conftest import load_executor
from worker.mini_scheduler import MiniScheduler, Sequence, generate, greedy

from kvern.errors import KvernError
from kvern_gateway.text.tokenizer import load_text_model
from kvern_kernels import kv_cache
from kvern_scheduler.core.cell import Cell
from kvern_scheduler.core.group import Limits
from kvern_worker.config import KV_CACHE_DTYPES
from kvern_worker.executor import ModelExecutor
from kvern_worker.loading import choose_kv_dtype
from kvern_worker.weights.checkpoint import bundled_model

GGUF = str(bundled_model())
TOKENS = 384


def load(kv_cache_dtype: str) -> ModelExecutor:
    return load_executor(
        GGUF, kv_cache_memory_bytes=32 * 2**20, max_model_len=512, kv_cache_dtype=kv_cache_dtype
    )


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    text = pydoc_data.topics.topics["assignment"]
    return load_text_model(GGUF).encode(text, add_special_tokens=False)[:TOKENS]


def loss(executor: ModelExecutor, prompt: list[int]) -> float:
    """Mean negative log-probability of the prompt's tokens."""
    sequence = Sequence(prompt, greedy(prompt_logprobs=0), 1)
    MiniScheduler(executor).run([sequence], chunk=128)
    return -sum(entry.logprob for entry in sequence.prompt_logprobs.values()) / (len(prompt) - 1)


@pytest.fixture(scope="module")
def plain(prompt: list[int]) -> tuple[float, int, bytes]:
    executor = load("auto")
    described = executor.describe()
    assert described.model.kv_cache_dtype == "fp32"
    return loss(executor, prompt), described.bytes_per_block, described.model.digest


# What perplexity may grow by; e5m2 has two bits behind the leading one.
@pytest.mark.parametrize(
    "dtype,worse,size", [("int8", 0.01, 68 / 256), ("fp8", 0.01, 0.25), ("fp8_e5m2", 0.15, 0.25)]
)
def test_perplexity_bits_and_bytes(
    dtype: str, worse: float, size: float, prompt: list[int], plain: tuple[float, int, bytes]
) -> None:
    executor = load(dtype)
    described = executor.describe()
    assert described.model.kv_cache_dtype == dtype
    assert described.bytes_per_block == plain[1] * size
    assert described.model.digest != plain[2]
    change = math.exp(loss(executor, prompt) - plain[0]) - 1
    assert abs(change) < worse, f"perplexity changes by {change:.2%}"
    prompts = [prompt[i : i + 40 + i] for i in range(0, 32, 8)]
    together = generate(executor, prompts, 6)
    assert generate(executor, prompts, 6, chunk=16) == together
    assert generate(executor, prompts, 6, chunk=64, preempt_at=3) == together
    assert generate(executor, prompts[:1], 6) == together[:1]


def test_a_cell_refuses_workers_whose_caches_differ() -> None:
    cell, groups = Cell(Limits()), [load(dtype).describe() for dtype in ("int8", "fp8")]
    cell.add_group(groups[0].model, 8, 16, 4, 64)
    with pytest.raises(KvernError, match=r"KV fp8.*KV int8"):
        cell.add_group(groups[1].model, 8, 16, 4, 64)


def test_names() -> None:
    assert choose_kv_dtype("auto", "bfloat16") == "bf16"
    assert choose_kv_dtype("fp8_e4m3", "bfloat16") == "fp8"
    assert {choose_kv_dtype(name, "bfloat16") for name in KV_CACHE_DTYPES} == set(kv_cache.DTYPES)
    assert choose_kv_dtype("float16", "bfloat16") == "fp16"
    with pytest.raises(KvernError, match="kv-cache-dtype int4 is unknown; choose auto, fp32, bf16"):
        choose_kv_dtype("int4", "float32")
