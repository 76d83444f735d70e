"""One family's checkpoint through the scheduler's core and the executor, against transformers."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from parity.families import VOCAB, Family
from parity.local_engine import LocalEngine
from worker.conftest import load_executor
from worker.mini_scheduler import MiniScheduler, Sequence, greedy
from worker.test_worker_parity import traced

from kvern_scheduler.core.group import Limits
from kvern_worker.executor import ModelExecutor

# Where the two best logits differ by less, either may win.
TIE = 1e-4


@dataclass
class Parity:
    """What was measured: the largest difference of a logit, and of the reference's best one to the one chosen."""

    prompts: int
    tokens: int
    logit_error: float
    worst_gap: float
    prefix_hits: int
    preemptions: int
    load_seconds: float


def check(family: Family, folder: Path, num_prompts: int, length: int) -> Parity:
    """Raises AssertionError where something differs from transformers, or from one schedule to another."""
    # One thread: these matrices are smaller than a barrier, and the machine may be busy.
    torch.set_num_threads(1)
    reference = family.make()
    family.save(reference, folder)
    started = time.perf_counter()
    executor = load_executor(
        folder,
        max_model_len=family.max_model_len,
        mamba_block_size=family.state_block_size,
        threads=1,
    )
    load_seconds = time.perf_counter() - started
    rng = random.Random(num_prompts)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(9, 60))] for _ in range(num_prompts)]

    error = max(logit_error(reference, executor, prompt) for prompt in prompts[:3])
    assert error < 5e-4, error

    # All at once: long prompts are cut into chunks of what decodes leave of 32 tokens a step.
    chunked = LocalEngine(executor, Limits(max_num_seqs=8, max_num_batched_tokens=32))
    outputs = chunked.generate(prompts, length)
    gap = max(worst_gap(reference, *pair) for pair in zip(prompts, outputs, strict=True))
    assert gap < TIE, gap

    assert LocalEngine(executor).generate(prompts[:1], length) == outputs[:1]
    mixed = LocalEngine(executor, Limits(max_num_seqs=32))
    assert mixed.generate(prompts, length) == outputs

    # Prompts that go on where earlier answers stood find those in the cache.
    half = length // 2
    longer = [prompt + output[:half] for prompt, output in zip(prompts, outputs, strict=True)]
    assert mixed.generate(longer, length - half) == [output[half:] for output in outputs]
    assert mixed.group.num_prefix_hits > 0

    # Pools that hold one or two sequences to their end. Where windows slide, only short ones grow.
    short = [prompt[:9] for prompt in prompts[:6]]
    preemptions = 0
    for some, wanted, num_blocks in (
        (prompts[:6], outputs[:6], 8),
        (short, mixed.generate(short, length), 5),
    ):
        small = LocalEngine(
            executor, Limits(max_num_seqs=8, enable_prefix_caching=False), num_blocks=num_blocks
        )
        assert small.generate(some, length) == wanted
        preemptions += small.group.num_preemptions
    assert preemptions > 0
    # The exact log-probabilities, too.
    expected = traced(executor, prompts[:4])
    for how in ({"chunk": 16}, {"preempt_at": 5}):
        assert traced(executor, prompts[:4], **how) == expected, how

    return Parity(
        prompts=num_prompts,
        tokens=sum(map(len, outputs)),
        logit_error=error,
        worst_gap=gap,
        prefix_hits=mixed.group.num_prefix_hits,
        preemptions=preemptions,
        load_seconds=load_seconds,
    )


@torch.inference_mode()
def logit_error(reference: Any, executor: ModelExecutor, prompt: list[int]) -> float:
    """The largest difference of a log-probability, over all tokens at every position of the prompt."""
    sequence = Sequence(prompt, greedy(prompt_logprobs=VOCAB), 1)
    MiniScheduler(executor).run([sequence], chunk=16)
    assert sequence.error is None, sequence.error
    expected = reference(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    worst = 0.0
    for index in range(1, len(prompt)):
        found = sequence.prompt_logprobs[index]
        ours = torch.empty(VOCAB)
        ours[list(found.top_token_ids)] = torch.tensor(list(found.top_logprobs))
        worst = max(worst, float((ours - expected[index - 1]).abs().max()))
    return worst


@torch.inference_mode()
def worst_gap(reference: Any, prompt: list[int], output: list[int]) -> float:
    """By how much the reference's best logit exceeds the chosen token's, at the worst position: below a tie's width,
    each token is the reference's own after the same tokens."""
    logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits[torch.arange(len(output)), torch.tensor(output)]
    return float((logits.amax(-1) - chosen).max())
