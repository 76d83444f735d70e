"""One family that sees through the scheduler's core and the executor, against transformers."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch
from parity.families import VOCAB
from parity.family_check import TIE, Parity
from parity.local_engine import LocalEngine
from parity.vision_families import IMAGE_TOKEN, VisionFamily, picture, place, preparation_of
from PIL import Image
from worker.conftest import load_executor
from worker.mini_scheduler import MiniScheduler, Sequence, greedy

from kvern.v1 import media_pb2
from kvern_scheduler.core.group import Limits
from kvern_worker.executor import ModelExecutor

SIZES = ((60, 60), (31, 90), (150, 40), (200, 130), (57, 300))


def check(family: VisionFamily, folder: Path, num_prompts: int, length: int) -> Parity:
    """Raises AssertionError where something differs from transformers, or from one schedule to another."""
    torch.set_num_threads(1)
    reference = family.make()
    family.save(reference, folder)
    started = time.perf_counter()
    executor = load_executor(folder, threads=1)
    load_seconds = time.perf_counter() - started
    asked = list(prompts(num_prompts, folder))

    error = max(logit_error(family, reference, executor, *one) for one in asked[:4])
    assert error < 5e-4, error

    chunked = LocalEngine(executor, Limits(max_num_seqs=8, max_num_batched_tokens=16))
    outputs = generate(chunked, asked, length)
    gap = max(worst_gap(family, reference, *pair) for pair in zip(asked, outputs, strict=True))
    assert gap < TIE, gap

    assert generate(LocalEngine(executor), asked[:1], length) == outputs[:1]
    mixed = LocalEngine(executor, Limits(max_num_seqs=32))
    assert generate(mixed, asked, length) == outputs

    # Prompts that go on where earlier answers stood find those, images and all, in the cache.
    half = length // 2
    longer = [
        (tokens + output[:half], media, images)
        for (tokens, media, images), output in zip(asked, outputs, strict=True)
    ]
    assert generate(mixed, longer, length - half) == [output[half:] for output in outputs]
    assert mixed.group.num_prefix_hits > 0

    preempted = [Sequence(tokens, greedy(), length, media=media, preempt_at=5) for tokens, media, _ in asked]
    MiniScheduler(executor).run(preempted, chunk=16)
    assert [sequence.output for sequence in preempted] == outputs
    return Parity(
        num_prompts,
        sum(map(len, outputs)),
        error,
        gap,
        mixed.group.num_prefix_hits,
        len(preempted),
        load_seconds,
    )


Asked = tuple[list[int], list[media_pb2.MediaItem], list[Image.Image]]


def prompts(count: int, folder: Path) -> list[Asked]:
    """Texts with one image or two between them; every fourth has none."""
    prepare = preparation_of(folder)
    rng = random.Random(count)
    asked = []
    for index in range(count):
        images = [
            picture(10 * index + i, *SIZES[(index + i) % len(SIZES)]) for i in range((0, 1, 2, 1)[index % 4])
        ]
        pieces: list[Any] = [_text(rng)]
        for image in images:
            pieces += [image, _text(rng)]
        tokens, media = place(pieces, prepare)
        asked.append((tokens, media, images))
    return asked


def _text(rng: random.Random) -> list[int]:
    return [rng.randrange(3, IMAGE_TOKEN - 4) for _ in range(rng.randint(3, 20))]


def generate(engine: LocalEngine, asked: list[Asked], length: int) -> list[list[int]]:
    requests = [engine.submit(tokens, length, media=media) for tokens, media, _ in asked]
    engine.run()
    return [engine.outputs(request)[0] for request in requests]


@torch.inference_mode()
def logit_error(
    family: VisionFamily,
    reference: Any,
    executor: ModelExecutor,
    tokens: list[int],
    media: list[media_pb2.MediaItem],
    images: list[Image.Image],
) -> float:
    sequence = Sequence(tokens, greedy(prompt_logprobs=VOCAB), 1, media=media)
    MiniScheduler(executor).run([sequence], chunk=16)
    assert sequence.error is None, sequence.error
    expected = reference(**family.arguments(tokens, images)).logits[0].float().log_softmax(-1)
    worst = 0.0
    for index in range(1, len(tokens)):
        found = sequence.prompt_logprobs[index]
        ours = torch.empty(VOCAB)
        ours[list(found.top_token_ids)] = torch.tensor(list(found.top_logprobs))
        worst = max(worst, float((ours - expected[index - 1]).abs().max()))
    return worst


@torch.inference_mode()
def worst_gap(family: VisionFamily, reference: Any, asked: Asked, output: list[int]) -> float:
    tokens, _, images = asked
    # An output that happens to be the image's placeholder would be taken for one.
    whole = [*tokens, *output]
    if IMAGE_TOKEN in output:
        whole = whole[: len(tokens) + output.index(IMAGE_TOKEN)]
    logits = reference(**family.arguments(whole, images)).logits[0, len(tokens) - 1 : -1].float()
    chosen = torch.tensor(whole[len(tokens) :])
    return float((logits.amax(-1) - logits[torch.arange(len(chosen)), chosen]).max())
