"""`kvern bench engine`: tokens per second of the worker alone, in this process, beside what the memory allows.

Plans go straight to the executor, as the scheduler would send them: what has sampled decodes, and prompts fill what is
left of the step's token budget. The limit is the read bandwidth measured around each run, divided by the bytes of
weights that one decode step reads (not told for mixtures of experts, which read a part of theirs).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvern.rpc.packing import pack_i32, pack_u32
from kvern.v1 import worker_pb2
from kvern.v1.sampling_pb2 import SamplingParams
from kvern_kernels.bench import read_bandwidth
from kvern_worker.executor import ModelExecutor
from kvern_worker.loading import LoadOptions, load
from kvern_worker.step_profile import StepProfile, Work, fit, relative_errors


@dataclass(frozen=True)
class Load:
    """``batch`` sequences at once, of ``input_len`` tokens each, until each has ``output_len`` more."""

    batch: int
    input_len: int
    output_len: int

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.input_len} -> {self.output_len}"


@dataclass
class Timings:
    """One run: seconds of its steps, by whether a step held prompts, where the worker says they went, and what each step
    computed."""

    prompt_s: float = 0.0
    decode_s: list[float] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    step_us: list[float] = field(default_factory=list)
    parts_us: dict[str, int] = field(default_factory=lambda: {"prepare": 0, "forward": 0, "sample": 0})

    @property
    def total_s(self) -> float:
        return self.prompt_s + sum(self.decode_s)


class _Quiet:
    def start(self, total_bytes: int) -> None: ...

    def add(self, num_bytes: int) -> None: ...


class Engine:
    """Drives one executor; every sequence keeps the slot and the blocks of its number."""

    def __init__(self, executor: ModelExecutor) -> None:
        self._executor = executor
        self._description = executor.describe()
        self._random = np.random.default_rng(0)
        self._step = 0

    def run(self, load: Load) -> Timings:
        """Raises ValueError where the executor has too few blocks or slots for ``load``."""
        limits, timings = self._description, Timings()
        blocks = -(-(load.input_len + load.output_len) // limits.block_size)
        if load.batch * blocks > limits.num_blocks or load.batch > limits.max_num_seqs:
            raise ValueError(
                f"{load.name} needs {load.batch * blocks} KV blocks, there are {limits.num_blocks}"
            )
        new = [self._sequence(slot, load.input_len, blocks) for slot in range(load.batch)]
        left = np.full(load.batch, load.input_len)
        outputs = np.zeros(load.batch, np.int64)
        while (outputs < load.output_len).any():
            decoding = np.flatnonzero((left == 0) & (outputs < load.output_len))
            taken = _fill(left, limits.max_num_batched_tokens - len(decoding))
            prompts = np.flatnonzero(taken)
            plan = worker_pb2.StepPlan(
                new_sequences=new,
                prefill_slots=pack_u32(prompts),
                prefill_lengths=pack_u32(taken[prompts]),
                decode_slots=pack_u32(decoding),
            )
            new = []
            seconds = self._timed(plan, timings)
            starts = (load.input_len - left)[prompts]
            timings.works.append(
                Work.of(starts, starts + taken[prompts], (load.input_len + outputs)[decoding])
            )
            timings.step_us.append(seconds * 1e6)
            if len(prompts):
                timings.prompt_s += seconds
            else:
                timings.decode_s.append(seconds)
            left -= taken
            outputs[decoding] += 1
            outputs[prompts[left[prompts] == 0]] += 1
        self._send(worker_pb2.StepPlan(released_slots=pack_u32(np.arange(load.batch))))
        return timings

    def _sequence(self, slot: int, length: int, blocks: int) -> worker_pb2.NewSequence:
        tokens = self._random.integers(2, self._description.model.vocab_size, length)
        return worker_pb2.NewSequence(
            slot=slot,
            token_ids=pack_i32(tokens),
            num_prompt_tokens=length,
            params=SamplingParams(temperature=0.0, ignore_eos=True),
            block_ids=pack_u32(np.arange(slot * blocks, (slot + 1) * blocks)),
            block_generations=pack_u32(np.ones(blocks, np.uint32)),
        )

    def _timed(self, plan: worker_pb2.StepPlan, timings: Timings) -> float:
        start = time.perf_counter()
        result = self._send(plan)
        seconds = time.perf_counter() - start
        for part in timings.parts_us:
            timings.parts_us[part] += getattr(result, f"{part}_us")
        return seconds

    def _send(self, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
        self._step += 1
        plan.epoch, plan.step = 1, self._step
        result = self._executor.run(plan)
        if result.errors:
            raise RuntimeError(result.errors[0].error.message)
        return result


def _fill(left: np.ndarray, budget: int) -> np.ndarray:
    """How many of its ``left`` prompt tokens each sequence runs, the first ones first, ``budget`` in all."""
    before = np.cumsum(left) - left
    return np.clip(budget - before, 0, left)


def measure(options: LoadOptions, loads: Sequence[Load], runs: int) -> Iterator[dict[str, Any]]:
    """One dict for each of ``loads``: medians over ``runs``, after one that is not counted. Their turns alternate,
    so that all see the same neighbours. Raises KvernError where the model cannot be loaded."""
    executor = load(options, _Quiet())
    engine, counted = Engine(executor), executor.weight_bytes
    results: list[list[Timings]] = [[] for _ in loads]
    bandwidths: list[list[float]] = [[] for _ in loads]
    for turn in range(runs + 1):
        for i, one in enumerate(loads):
            bandwidth, timings = read_bandwidth(), engine.run(one)
            if turn:
                results[i].append(timings)
                bandwidths[i].append(max(bandwidth, read_bandwidth()))
    for one, timed, read in zip(loads, results, bandwidths, strict=True):
        yield _summary(one, timed, read, counted)


def fit_profile(options: LoadOptions, loads: Sequence[Load], runs: int) -> tuple[StepProfile, dict[str, Any]]:
    """Terms of a step's time fitted to all steps of ``runs`` turns of ``loads``, after one that is not counted; and what
    they were fitted to, with the errors that are left. Raises KvernError where the model cannot be loaded."""
    executor = load(options, _Quiet())
    engine = Engine(executor)
    works: list[Work] = []
    step_us: list[float] = []
    for turn in range(runs + 1):
        for one in loads:
            timings = engine.run(one)
            if turn:
                works += timings.works
                step_us += timings.step_us
    profile = fit(works, step_us)
    errors = relative_errors(profile, works, step_us)
    return profile, {
        "model": options.model,
        "loads": [one.name for one in loads],
        "steps": len(works),
        "error_p50": round(float(np.median(errors)), 4),
        "error_p90": round(float(np.quantile(errors, 0.9)), 4),
        "num_blocks": executor.describe().num_blocks,
        "block_size": executor.describe().block_size,
    }


def _summary(
    load: Load, runs: Sequence[Timings], bandwidths: Sequence[float], num_bytes: int
) -> dict[str, Any]:
    rates = [load.batch * load.output_len / run.total_s for run in runs]
    decodes = [load.batch * len(run.decode_s) / sum(run.decode_s) for run in runs if run.decode_s]
    limits = [read * load.batch / num_bytes for read in bandwidths] if num_bytes else []
    parts = {
        f"{part}_share": round(statistics.median(run.parts_us[part] / run.total_s / 1e6 for run in runs), 4)
        for part in runs[0].parts_us
    }
    return {
        "batch": load.batch,
        "input_len": load.input_len,
        "output_len": load.output_len,
        "tokens_per_s": round(statistics.median(rates), 2),
        "tokens_per_s_runs": [round(rate, 2) for rate in rates],
        "decode_tokens_per_s": round(statistics.median(decodes), 2) if decodes else None,
        "decode_step_ms": round(statistics.median(s for run in runs for s in run.decode_s) * 1e3, 3)
        if decodes
        else None,
        "prefill_tokens_per_s": round(
            statistics.median(load.batch * load.input_len / run.prompt_s for run in runs), 1
        ),
        "limit_fraction": round(
            statistics.median(rate / limit for rate, limit in zip(rates, limits, strict=True)), 3
        )
        if limits
        else None,
        "gb_per_s": round(statistics.median(bandwidths) / 1e9, 1),
        "weight_bytes": num_bytes,
        **parts,
    }


def report(options: LoadOptions, loads: Sequence[Load], runs: int) -> None:
    """Print a table."""
    print(f"{torch.__config__.parallel_info().splitlines()[1].strip()}; medians of {runs} runs")
    print(
        f"{'load':18}{'tok/s':>9}{'from':>9}{'to':>9}{'decode':>9}{'step ms':>9}{'prefill':>9}{'GB/s':>7}{'of limit':>9}"
        f"{'sample':>8}"
    )
    for one, row in zip(loads, measure(options, loads, runs), strict=True):
        limit = "" if row["limit_fraction"] is None else f"{row['limit_fraction']:.0%}"
        decode = (
            ("", "") if row["decode_step_ms"] is None else (row["decode_tokens_per_s"], row["decode_step_ms"])
        )
        print(
            f"{one.name:18}{row['tokens_per_s']:9}{min(row['tokens_per_s_runs']):9}{max(row['tokens_per_s_runs']):9}"
            f"{decode[0]:>9}{decode[1]:>9}{row['prefill_tokens_per_s']:9}{row['gb_per_s']:7}{limit:>9}"
            f"{row['sample_share']:8.1%}"
        )
