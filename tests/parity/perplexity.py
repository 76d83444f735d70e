"""`make perplexity`: SmolLM2 quantized by each scheme, on text from Python's own documentation, and the table PERPLEXITY.md.

All are rounded to nearest (tests/quantize.py, and the gguf package): nothing is calibrated, also where the layout is GPTQ's or
AWQ's. Groups are of 64 inputs, since 128 do not divide SmolLM2's 576. The embedding and the head stay bfloat16, but in GGUF.
"""

from __future__ import annotations

import math
import pydoc_data.topics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
from parity import smollm2
from quantize import SCHEMES, quantize_tensors, write_checkpoint
from safetensors.torch import load_file
from worker.conftest import load_executor
from worker.mini_scheduler import MiniScheduler, Sequence, greedy
from worker.test_worker_loaders import write_gguf

from kvern_gateway.text.tokenizer import load_text_model

TABLE = Path(__file__).with_name("PERPLEXITY.md")
TOPICS = (
    "assignment",
    "compound",
    "specialnames",
    "objects",
    "formatstrings",
    "class",
    "typesseq",
    "exprlists",
)
WINDOW = 512
GROUP = 64


@dataclass(frozen=True)
class Published:
    """By how much perplexity grew elsewhere, and where."""

    growth: float
    source: str


# Perplexities on WikiText-2 of a model of the same size, before and after rounding to nearest, 4 bits.
_RTN4 = Published(37.28 / 27.65 - 1, "OPT-125M, RTN, arXiv 2210.17323")
_CI = "OpenLLaMA-3B, ggml-org/ci 4c013bb"
# Accuracies of instruction-tuned models, the best that is known of these at this size.
_FP8 = Published(0.01, '"lossless", arXiv 2411.02355; 1 % allowed')
_INT8 = Published(0.03, "W8A8-INT, arXiv 2411.02355")

PUBLISHED = {
    **dict.fromkeys(("gptq-4", "gptq-4-asym-reordered", "awq", "w4a16", "w4a16-asym", "mxfp4"), _RTN4),
    **dict.fromkeys(("fp8-tensor", "fp8-channel", "fp8-native-block"), _FP8),
    **dict.fromkeys(("gptq-8-reordered", "w8a16", "w8a8"), _INT8),
    "Q4_0": Published(8.9700 / 8.5302 - 1, _CI),
    "Q4_1": Published(9.2144 / 8.5302 - 1, _CI),
    "Q5_0": Published(8.8267 / 8.5302 - 1, _CI),
    "Q5_1": Published(8.7199 / 8.5302 - 1, _CI),
    "Q8_0": Published(8.5695 / 8.5302 - 1, _CI),
}

HEAD = """# Perplexity of quantized models

Made by `make perplexity`: SmolLM2-135M-Instruct (its GGUF unpacked to bfloat16), rounded to nearest by each scheme, in
{dtype}, on {tokens} tokens of Python's documentation in windows of {window}. Nothing is calibrated, also where the layout is
GPTQ's or AWQ's. "Published" is what the loss was elsewhere: for 4 bits, perplexity of a model of this size; for GGUF's
kinds, perplexity of a model 25 times larger, which loses less; for 8 bits, accuracy. The 4-bit figure is of asymmetric
rounding; no figure of symmetric or e2m1 rounding at this size is known, and both exceed it.

| scheme | perplexity | growth | published | of |
|---|---|---|---|---|
"""


def windows(count: int) -> list[list[int]]:
    """``count`` of WINDOW tokens each, from different topics in turn."""
    model = load_text_model(str(smollm2.PATH))
    tokens = [model.encode(pydoc_data.topics.topics[topic], add_special_tokens=False) for topic in TOPICS]
    cut = [part[at : at + WINDOW] for at in range(0, 16 * WINDOW, WINDOW) for part in tokens]
    return [part for part in cut if len(part) == WINDOW][:count]


def perplexity(model: Path, prompts: list[list[int]], dtype: str) -> float:
    executor = load_executor(
        model, dtype=dtype, kv_cache_memory_bytes=96 * 2**20, max_model_len=1024, keep_quantized=True
    )
    sequences = [Sequence(prompt, greedy(prompt_logprobs=0), 1) for prompt in prompts]
    for sequence in sequences:
        MiniScheduler(executor).run([sequence], chunk=512)
    found = [entry.logprob for sequence in sequences for entry in sequence.prompt_logprobs.values()]
    assert len(found) == sum(len(prompt) - 1 for prompt in prompts)
    return math.exp(-sum(found) / len(found))


def plain(folder: Path) -> Path:
    """The model in bfloat16."""
    smollm2.reference().to(torch.bfloat16).save_pretrained(folder)
    return folder


def quantized(like: Path, folder: Path, scheme: str) -> Path:
    if scheme in SCHEMES:
        made = SCHEMES[scheme](GROUP)
        return write_checkpoint(
            folder, like, quantize_tensors(load_file(like / "model.safetensors"), made)[0], made
        )
    folder.mkdir()
    return write_gguf(folder / f"{scheme}.gguf", like, True, gguf.GGMLQuantizationType[scheme])


def rows(prompts: list[list[int]], dtype: str) -> Iterator[tuple[str, float]]:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        like = plain(folder / "plain")
        yield "bf16", perplexity(like, prompts, dtype)
        for scheme in PUBLISHED:
            with tempfile.TemporaryDirectory(dir=folder) as inner:
                yield scheme, perplexity(quantized(like, Path(inner) / "q", scheme), prompts, dtype)


def main() -> int:
    prompts, lines, base, failed = windows(16), [], 0.0, 0
    for scheme, value in rows(prompts, "bfloat16"):
        base = base or value
        growth, published = value / base - 1, PUBLISHED.get(scheme)
        beside = f"{published.growth:+.1%} | {published.source}" if published else "|"
        failed += published is not None and growth > published.growth
        lines.append(f"| {scheme} | {value:.3f} | {growth:+.2%} | {beside} |")
        print(lines[-1], flush=True)
    head = HEAD.format(dtype="bfloat16", tokens=sum(map(len, prompts)), window=WINDOW)
    TABLE.write_text(head + "\n".join(lines) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
