"""`kvern bench control`: what a scheduler step costs, with a simulated worker behind the real gRPC service.

The load is a gateway's side of the session and nothing else: it keeps N sequences decoding and reads what comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc.aio
import numpy as np

from kvern.block_hash import hash_prompt, join_hashes
from kvern.rpc.channel import create_channel
from kvern.rpc.packing import pack_i32
from kvern.v1 import sampling_pb2, session_pb2, session_pb2_grpc
from kvern_gateway.cli import bench_stack

_HEARTBEAT_S = 0.25
_START_TIMEOUT_S = 30.0
_PROMPT_TOKENS = 32
_VOCAB_SIZE = 32_000
_BLOCK_SIZE = 16
_SUBMITS_PER_MESSAGE = 64


@dataclass(frozen=True)
class ControlOptions:
    """``steps`` are measured after all sequences decode; ``step_us`` is what the worker pretends to compute."""

    sequences: int
    store: str = "memory"
    appendfsync: str = "always"
    step_us: int = 5000
    steps: int = 1000

    @property
    def output_tokens(self) -> int:
        """Of one sequence: more than the measurement takes, so that hardly any ends within it."""
        return 2 * self.steps + 256

    @property
    def flags(self) -> dict[str, object]:
        blocks_each = (_PROMPT_TOKENS + self.output_tokens) // _BLOCK_SIZE + 2
        return {
            "sim_step_us": self.step_us,
            "sim_num_blocks": self.sequences * blocks_each + 64,
            "sim_vocab_size": _VOCAB_SIZE,
            "block_size": _BLOCK_SIZE,
            "max_num_seqs": self.sequences,
            "max_model_len": _PROMPT_TOKENS + self.output_tokens,
        }


class DecodingLoad:
    """Keeps sequences decoding on one session. A sequence that ends is followed by another."""

    def __init__(self, options: ControlOptions) -> None:
        self._options = options
        self._handles = itertools.count()
        self._random = np.random.default_rng(0)
        self._outgoing: asyncio.Queue[session_pb2.SessionRequest] = asyncio.Queue()
        self._first_token_missing: set[int] = set()
        self.all_decoding = asyncio.Event()
        self.num_tokens = 0

    async def run(self, scheduler: session_pb2_grpc.SchedulerServiceAsyncStub) -> None:
        """Until cancelled. Raises RuntimeError when a request is refused or fails."""
        # A queue of its own: the writer of a call that was refused may still wait at the old one.
        self._outgoing = asyncio.Queue()
        call = scheduler.Session(self._requests(self._outgoing), wait_for_ready=True)
        async for response in call:
            if response.HasField("welcome"):
                self._submit(self._options.sequences)
            self._read(response)

    async def _requests(
        self, outgoing: asyncio.Queue[session_pb2.SessionRequest]
    ) -> AsyncIterator[session_pb2.SessionRequest]:
        yield session_pb2.SessionRequest(hello=session_pb2.Hello(gateway_id="bench-control"))
        while True:
            try:
                yield await asyncio.wait_for(outgoing.get(), _HEARTBEAT_S)
            except TimeoutError:
                yield session_pb2.SessionRequest()

    def _submit(self, count: int) -> None:
        submits = [self._new_submit() for _ in range(count)]
        for start in range(0, count, _SUBMITS_PER_MESSAGE):
            message = session_pb2.SessionRequest(submits=submits[start : start + _SUBMITS_PER_MESSAGE])
            self._outgoing.put_nowait(message)

    def _new_submit(self) -> session_pb2.Submit:
        handle = next(self._handles)
        self._first_token_missing.add(handle)
        prompt = self._random.integers(256, _VOCAB_SIZE, _PROMPT_TOKENS).tolist()
        return session_pb2.Submit(
            handle=handle,
            request_id=f"bench-{handle}",
            tenant="bench",
            body_digest=hashlib.sha256(str(handle).encode()).digest(),
            prompt_token_ids=pack_i32(prompt),
            params=resolved_greedy(self._options.output_tokens),
            n=1,
            block_hashes=join_hashes(hash_prompt(prompt, _BLOCK_SIZE)),
        )

    def _read(self, response: session_pb2.SessionResponse) -> None:
        if response.refused:
            raise RuntimeError(f"the scheduler refused a request: {response.refused[0].error.message}")
        self.num_tokens += len(response.token_handles) // 4
        if self._first_token_missing:
            self._first_token_missing -= set(np.frombuffer(response.token_handles, "<u4").tolist())
            if not self._first_token_missing and response.token_handles:
                self.all_decoding.set()
        if response.finished:
            for finished in response.finished:
                if finished.reason != sampling_pb2.FINISH_REASON_LENGTH:
                    raise RuntimeError(f"a request failed: {finished.error.message}")
            self._submit(len(response.finished))


def resolved_greedy(max_tokens: int) -> sampling_pb2.SamplingParams:
    """Greedy, with every default filled in, as the scheduler expects it."""
    return sampling_pb2.SamplingParams(
        temperature=0,
        top_p=1,
        top_k=0,
        min_p=0,
        repetition_penalty=1,
        presence_penalty=0,
        frequency_penalty=0,
        seed=0,
        max_tokens=max_tokens,
        ignore_eos=True,
    )


async def run(options: ControlOptions) -> dict[str, Any]:
    """The scheduler's own medians, microseconds, and counted rates. Raises ChildFailed, RuntimeError, TimeoutError."""
    services = bench_stack.running(
        "worker", "scheduler", store=options.store, appendfsync=options.appendfsync, flags=options.flags
    )
    async with services as bench, create_channel(bench.scheduler) as channel:
        scheduler = session_pb2_grpc.SchedulerServiceStub(channel)
        load = DecodingLoad(options)
        loading = asyncio.create_task(_reconnecting(load, scheduler))
        try:
            await _first(loading, load.all_decoding.wait(), _START_TIMEOUT_S + options.sequences * 0.05)
            bench.supervisor.mark_ready()
            cpu_before, tokens_before, started = bench.cpu_seconds(), load.num_tokens, perf_counter()
            first = last = await _timings(scheduler)
            while last.steps - first.steps < options.steps:
                await _first(loading, asyncio.sleep(0.2), 1.0)
                last = await _timings(scheduler)
            elapsed = perf_counter() - started
            steps = last.steps - first.steps
            cpu = {name: seconds - cpu_before.get(name, 0.0) for name, seconds in bench.cpu_seconds().items()}
            tokens = load.num_tokens - tokens_before
            store = bench.options.data_dir / "store"
            fdatasync_us = await asyncio.to_thread(measure_fdatasync, store) if "store" in cpu else 0.0
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
    return {
        "sequences": options.sequences,
        "store": options.store,
        "sim_step_us": options.step_us,
        "plan_us_p50": last.plan_us_p50,
        "fold_us_p50": last.fold_us_p50,
        "commit_us_p50": last.commit_us_p50,
        "fdatasync_us_p50": fdatasync_us,
        "step_us_p50": last.step_us_p50,
        # Counted, not 1 / median: what holds up a few steps for long must show.
        "steps_per_s": steps / elapsed,
        "steps": steps,
        "tokens_per_s": tokens / elapsed,
        "cpu_us_per_step": {name: seconds * 1e6 / steps for name, seconds in cpu.items()},
    }


def measure_fdatasync(directory: Path, size: int = 4096, repeats: int = 200) -> float:
    """Median microseconds that a write of ``size`` bytes at a file's end takes to reach the disk of ``directory``: what
    a commit with appendfsync always cannot do without."""
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        seconds = []
        for _ in range(repeats):
            started = perf_counter()
            file.write(bytes(size))
            os.fdatasync(file.fileno())
            seconds.append(perf_counter() - started)
    return float(np.median(seconds)) * 1e6


async def _timings(scheduler: session_pb2_grpc.SchedulerServiceAsyncStub) -> session_pb2.StepTimings:
    return (await scheduler.GetStatus(session_pb2.GetStatusRequest())).timings


async def _reconnecting(load: DecodingLoad, scheduler: session_pb2_grpc.SchedulerServiceAsyncStub) -> None:
    """The scheduler refuses sessions until its worker is there."""
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await load.run(scheduler)
        if load.num_tokens:
            raise RuntimeError("the session ended during the measurement")
        await asyncio.sleep(0.05)


async def _first(background: asyncio.Task[None], awaited: Any, timeout_s: float) -> None:
    """Waits for ``awaited``; what ``background`` raises meanwhile comes first. Raises TimeoutError."""
    task = asyncio.ensure_future(awaited)
    try:
        done, _ = await asyncio.wait(
            {background, task}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if background in done:
            background.result()
        if not done:
            raise TimeoutError(f"the sequences did not all start within {timeout_s:.0f} s")
    finally:
        task.cancel()


def _on_disk(result: dict[str, Any]) -> str:
    disk = result["fdatasync_us_p50"]
    return f"; a bare write and fdatasync of the store's disk: {disk:.0f} µs" if disk else ""


def render(result: dict[str, Any]) -> str:
    rows = [
        (
            "sequences",
            f"{result['sequences']}, store {result['store']}, simulated step {result['sim_step_us']} µs",
        ),
        ("plan", f"{result['plan_us_p50']:.0f} µs"),
        ("fold", f"{result['fold_us_p50']:.0f} µs"),
        ("commit", f"{result['commit_us_p50']:.0f} µs (overlaps with steps){_on_disk(result)}"),
        ("step", f"{result['step_us_p50']:.0f} µs from one result to the next"),
        ("steps", f"{result['steps_per_s']:.1f} /s, {result['tokens_per_s']:.0f} tokens/s"),
        (
            "CPU",
            ", ".join(f"{name} {us:.0f} µs" for name, us in result["cpu_us_per_step"].items()) + " per step",
        ),
    ]
    return "\n".join(f"{label:<10} {text}" for label, text in rows)
