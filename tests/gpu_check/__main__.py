"""``make gpu-check``: on a machine with a GPU, all that was shown in Triton's interpreter, natively; writes GPU.md.

The kernels' tests, the worker's tests of the GPU path, `kvern up` on the GPU beside one on the CPU, and `kvern bench kernels`.
``--device cpu`` runs what makes sense there, to see that the check itself works.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from e2e.running import BIN, Running, run_kvern

from kvern.errors import KvernError
from kvern_worker.gpu.device import open_gpu

TESTS = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("GPU.md")
PROMPTS = ["The capital of France is", "Once upon a time", "1, 2, 3, 4,", "Water is made of"]
NEW_TOKENS, CLIENTS = 48, 32
START_TIMEOUT_S = 600.0  # kernels are compiled for the chip, graphs captured


class Failed(Exception):
    """What a check saw instead."""


@dataclass(frozen=True)
class Check:
    """``run`` returns what was seen, or raises Failed. ``needs_gpu``: it shows nothing elsewhere."""

    name: str
    run: Callable[[str], str]
    needs_gpu: bool = False


def tests(folder: str) -> Callable[[str], str]:
    """Runs a folder of tests in a process of its own; a skipped or failed one is a failure."""

    def run(_: str) -> str:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "--durations=0",
                "-p",
                "no:cacheprovider",
                str(TESTS / folder),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-500:]
        if done.returncode:
            failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
            raise Failed(f"{last}; {', '.join(failed[:5])}")
        return last.strip("= ")

    return run


def served(device: str, *flags: str) -> tuple[list[str], float]:
    """The greedy answers to PROMPTS in float32, and output tokens per second of CLIENTS streams at once."""
    words = ("--device", device, "--store", "memory", *flags)
    with tempfile.TemporaryDirectory() as folder, run_kvern(Path(folder), *words, wait=False) as up:
        up.until_healthy(START_TIMEOUT_S)
        answers = [_complete(up, prompt) for prompt in PROMPTS]
        with ThreadPoolExecutor(CLIENTS) as pool:
            started = time.perf_counter()
            list(pool.map(lambda i: _complete(up, f"{i} {PROMPTS[i % len(PROMPTS)]}"), range(CLIENTS)))
            took = time.perf_counter() - started
    return answers, CLIENTS * NEW_TOKENS / took


def _complete(up: Running, prompt: str) -> str:
    answer = up.complete(prompt, max_tokens=NEW_TOKENS, ignore_eos=True)
    text: str = answer["choices"][0]["text"]
    return text


def serve(device: str) -> str:
    """In float32 both devices choose the same tokens, but for near ties."""
    ours, rate = served(device, "--dtype", "float32")
    theirs, _ = served("cpu", "--dtype", "float32")
    same = sum(one == other for one, other in zip(ours, theirs, strict=True))
    if same < len(PROMPTS) - 1:
        raise Failed(
            f"{same} of {len(PROMPTS)} answers are the CPU's: {list(zip(ours, theirs, strict=True))}"
        )
    return f"{same} of {len(PROMPTS)} answers are the CPU's to the letter; {rate:,.0f} tokens/s of {CLIENTS} clients"


def serve_otherwise(*flags: str) -> Callable[[str], str]:
    def run(device: str) -> str:
        answers, rate = served(device, *flags)
        if not all(answer.strip() for answer in answers):
            raise Failed(f"an empty answer: {answers}")
        return f"{rate:,.0f} tokens/s of {CLIENTS} clients"

    return run


def bench(device: str) -> str:
    command = [str(BIN / "kvern"), "bench", "kernels", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(done.stderr[-800:])
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    (TABLE.parent / f"kernels-{device}.json").write_text(json.dumps(rows, indent=1) + "\n")
    lines = [f"{row['kernel']} {row['shape']}: {row['us']} µs, {row['limit_fraction']:.0%}" for row in rows]
    return f"{len(rows)} kernels<br>" + "<br>".join(lines)


CHECKS = [
    Check("kernels against the reference", tests("kernels/triton"), needs_gpu=True),
    Check("the worker against transformers and the CPU", tests("worker/gpu"), needs_gpu=True),
    Check("kvern up, float32", serve),
    Check("kvern up, bfloat16", serve_otherwise("--dtype", "bfloat16")),
    Check("kvern up, --exact", serve_otherwise("--dtype", "bfloat16", "--exact"), needs_gpu=True),
    Check("kvern up, --enforce-eager", serve_otherwise("--dtype", "bfloat16", "--enforce-eager")),
    Check("kvern up, fp8 cache", serve_otherwise("--dtype", "bfloat16", "--kv-cache-dtype", "fp8")),
    Check("kvern bench kernels", bench),
]


def machine(device: str) -> str:
    if device == "cpu":
        return f"{platform.processor() or platform.machine()}, torch {torch.__version__}"
    free, total = torch.cuda.mem_get_info()
    return (
        f"{torch.cuda.get_device_name()}, {total / 2**30:.0f} GiB ({free / 2**30:.0f} free), torch {torch.__version__}, "
        f"CUDA {torch.version.cuda or torch.version.hip}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """0 where all checks passed. The table is written where they ran on a GPU, whatever they saw."""
    parser = argparse.ArgumentParser(prog="make gpu-check", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="", help="checks whose name contains this")
    args = parser.parse_args(argv)
    if args.device == "cuda":
        try:
            open_gpu()
        except KvernError as error:
            print(f"gpu-check: {error.message}", file=sys.stderr)
            return 1
    rows, failed = [], 0
    for check in CHECKS:
        if args.only not in check.name or (check.needs_gpu and args.device == "cpu"):
            continue
        started = time.monotonic()
        try:
            state, seen = "passed", check.run(args.device)
        except (Failed, AssertionError) as error:
            state, seen, failed = "FAILED", str(error).replace("\n", " ")[:2000], failed + 1
        took = time.monotonic() - started
        rows.append(f"| {check.name} | {state} | {took:.0f} s | {seen.replace('|', '/')} |")
        print(rows[-1].replace("<br>", "\n  "), flush=True)
    if args.device == "cuda" and not args.only:
        head = f"# On a GPU\n\nMade by `make gpu-check` on {machine('cuda')}.\n\n| check | state | took | seen |\n|---|---|---|---|\n"
        TABLE.write_text(head + "\n".join(rows) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
