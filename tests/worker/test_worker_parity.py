"""The executor computes what transformers computes, and always the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from worker.conftest import CONFIGS, load_executor
from worker.mini_scheduler import MiniScheduler, Sequence, generate, greedy

from kvern_worker.executor import ModelExecutor

# Where the two best logits differ by less, either may win.
TIE = 1e-4

Reference = Callable[[str], Any]
Executors = Callable[[str], ModelExecutor]


def random_prompts(count: int, low: int = 9, high: int = 60, vocab: int = 263) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(3, vocab) for _ in range(rng.randint(low, high))] for _ in range(count)]


@torch.inference_mode()
def assert_greedy(model: Any, prompt: list[int], output: list[int], tie: float = TIE) -> None:
    """Every token of ``output`` is the reference's arg max after the tokens before it, or within a tie of it."""
    tokens = torch.tensor([prompt + output])
    logits = model(tokens, logits_to_keep=len(output) + 1).logits[0, :-1].float()
    gaps = logits.amax(-1) - logits[torch.arange(len(output)), torch.tensor(output)]
    assert gaps.max() < tie, (gaps.max(), gaps.argmax())


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str, reference: Reference, executor: Executors) -> None:
    prompt = random_prompts(1, 50, 50)[0]
    sequence = Sequence(prompt, greedy(prompt_logprobs=263), 1)
    MiniScheduler(executor(name)).run([sequence], chunk=16)
    with torch.inference_mode():
        expected = reference(name)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for index in range(1, len(prompt)):
        found = sequence.prompt_logprobs[index]
        assert found.token_id == prompt[index]
        assert found.logprob == pytest.approx(expected[index - 1, prompt[index]].item(), abs=2e-4)
        ours = torch.empty(263)
        ours[list(found.top_token_ids)] = torch.tensor(list(found.top_logprobs))
        torch.testing.assert_close(ours, expected[index - 1], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_equal_transformers(name: str, reference: Reference, executor: Executors) -> None:
    prompts = random_prompts(6)
    outputs = generate(executor(name), prompts, 24, chunk=16)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == 24
        assert_greedy(reference(name), prompt, output)


def traced(
    executor: ModelExecutor, prompts: list[list[int]], chunk: int = 512, preempt_at: int = 0
) -> list[tuple[list[int], list[list[float]]]]:
    """Greedy tokens and the exact log-probabilities of the five best, for each prompt."""
    sequences = [Sequence(prompt, greedy(logprobs=5), 12, preempt_at=preempt_at) for prompt in prompts]
    MiniScheduler(executor, shuffle_seed=chunk + preempt_at).run(sequences, chunk)
    return [(s.output, [list(lp.top_logprobs) for lp in s.logprobs]) for s in sequences]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2-windows", "qwen3"])
def test_bits_depend_neither_on_batch_nor_on_chunks_nor_on_preemption(
    name: str, dtype: str, checkpoint: Callable[[str], Path]
) -> None:
    executor = load_executor(checkpoint(name), dtype=dtype)
    prompts = random_prompts(32, 9, 100)
    batched = traced(executor, prompts)
    for chunk in (16, 64):
        assert traced(executor, prompts, chunk) == batched
    assert traced(executor, prompts, preempt_at=5) == batched
    for prompt, expected in zip(prompts[:5], batched[:5], strict=True):
        assert traced(executor, [prompt]) == [expected]


def test_a_prefill_step_gives_the_bits_of_decode_steps(executor: Executors) -> None:
    """What is decoded token by token, prefilled as one chunk, has the same log-probabilities."""
    prompt = random_prompts(1, 20, 20)[0]
    decoded = Sequence(prompt, greedy(logprobs=263), 30)
    MiniScheduler(executor("llama")).run([decoded])
    prefilled = Sequence(decoded.tokens, greedy(prompt_logprobs=263), 1)
    MiniScheduler(executor("llama")).run([prefilled], chunk=512)
    for index, expected in enumerate(decoded.logprobs):
        found = prefilled.prompt_logprobs[len(prompt) + index]
        assert list(found.top_logprobs) == list(expected.top_logprobs)
        assert found.logprob == expected.logprob


def test_block_sizes_give_the_same_tokens(checkpoint: Callable[[str], Path], executor: Executors) -> None:
    prompts = random_prompts(4)
    expected = generate(executor("llama"), prompts, 12)
    for block_size in (8, 32, 128):
        assert generate(load_executor(checkpoint("llama"), block_size=block_size), prompts, 12) == expected


def test_float16_is_close(checkpoint: Callable[[str], Path], reference: Reference) -> None:
    prompt = random_prompts(1)[0]
    output = generate(load_executor(checkpoint("llama"), dtype="float16"), [prompt], 12)[0]
    assert_greedy(reference("llama"), prompt, output, tie=0.1)
