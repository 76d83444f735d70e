"""`kvern bench recovery`: a cold scheduler finds a store full of requests; how long until clients see tokens again.

The store and a simulated worker are filled by what a leader would have committed and planned. Then a scheduler's
process is started, and a gateway's side of the session asks for every live request, for one that has ended, and for a
new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc.aio
import numpy as np

from kvern.block_hash import hash_prompt, join_hashes
from kvern.rpc.channel import create_channel
from kvern.rpc.packing import pack_i32, pack_u32, unpack_u32
from kvern.v1 import sampling_pb2, session_pb2, session_pb2_grpc, worker_pb2, worker_pb2_grpc
from kvern_gateway.cli import bench_stack, stack
from kvern_gateway.cli.bench_control import resolved_greedy
from kvern_scheduler.store.base import Delta, IndexEntries, Leadership, StoredFinish, StoreUnavailable
from kvern_scheduler.store.connection import Connection
from kvern_scheduler.store.redis import RedisStore

_BLOCK_SIZE = 16
_PROMPT_BLOCKS = 4
_PROMPT_TOKENS = _PROMPT_BLOCKS * _BLOCK_SIZE + 5
_OUTPUT_TOKENS = 7
_MAX_TOKENS = 512
_VOCAB_SIZE = 32_000
_BATCH = 500
_RETENTION_S = 600
_TIMEOUT_S = 120.0
_POLL_S = 0.01
_NEW, _ENDED = 1, 2
_FIRST_LIVE = 10

PHASES = {
    "listening": "process up, answers",
    "leads": "has loaded what is live, and leads",
    "worker": "has the worker and its prefix index",
    "first_live_token": "first token of a live request",
    "all_live_tokens": "a token of every live request",
    "new_token": "first token of a new request",
    "ended_answer": "one that had ended is read again",
}


@dataclass(frozen=True)
class RecoveryOptions:
    """``blocks`` are indexed, those of the live requests' prompts included; ``finished`` requests are retained."""

    blocks: int = 200_000
    requests: int = 1000
    finished: int = 10_000
    appendfsync: str = "always"

    @property
    def flags(self) -> dict[str, object]:
        return {
            "sim_step_us": 1000,
            "sim_num_blocks": self.blocks + 40 * (self.requests + 64),
            "sim_vocab_size": _VOCAB_SIZE,
            "block_size": _BLOCK_SIZE,
            "max_num_seqs": self.requests + 64,
            "max_model_len": _PROMPT_TOKENS + _MAX_TOKENS,
        }


@dataclass
class _Clock:
    """Seconds from the start of the process to each phase."""

    started: float = field(default_factory=perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)

    def mark(self, phase: str) -> None:
        self.seconds.setdefault(phase, perf_counter() - self.started)


async def run(options: RecoveryOptions) -> dict[str, Any]:
    """Seconds by phase since the process began, and what they cost. Raises ChildFailed, RuntimeError, TimeoutError."""
    if options.blocks < options.requests * _PROMPT_BLOCKS:
        raise RuntimeError(f"--blocks {options.blocks} is too few: each request holds {_PROMPT_BLOCKS}")
    services = bench_stack.running(
        "worker", store="redis", appendfsync=options.appendfsync, flags=options.flags
    )
    async with services as bench, asyncio.timeout(_TIMEOUT_S):
        url = f"unix://{bench.options.socket('store')}"
        await _fill(options, RedisStore(url, "default", lease_s=60.0), bench.options.socket("worker"))
        redis = Connection(url)
        await redis.call("CONFIG", "RESETSTAT")
        clock = _Clock()
        spec = stack.scheduler_spec(bench.options)
        with Path(spec.log_path).open("ab") as log:
            process = await asyncio.create_subprocess_exec(*spec.argv, stdout=log, stderr=log)
        try:
            async with create_channel(bench.scheduler) as channel:
                stub = session_pb2_grpc.SchedulerServiceStub(channel)
                await _until_leading(stub, clock)
                reads = await _num_reads(redis)
                cpu_s = bench_stack.cpu_seconds(process.pid)
                await _Client(options, clock).run(stub)
                status = await stub.GetStatus(session_pb2.GetStatusRequest())
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            await redis.close()
    return {
        "blocks": options.blocks,
        "requests": options.requests,
        "finished": options.finished,
        **{f"{phase}_s": clock.seconds[phase] for phase in PHASES},
        "store_reads_until_leading": reads,
        "cpu_s": cpu_s,
        "blocks_known": status.groups[0].num_cached_blocks + _num_held(status),
    }


def _num_held(status: session_pb2.GetStatusResponse) -> int:
    group = status.groups[0]
    return group.num_blocks - group.num_free_blocks - group.num_cached_blocks


# -- what was there before ------------------------------------------------------------------------------------------


async def _fill(options: RecoveryOptions, store: RedisStore, worker: Path) -> None:
    """Commits what a leader would have, and has the worker's blocks be of the generations that the store says."""
    leadership = await _lead(store)
    generator = np.random.default_rng(0)
    step = leadership.step

    async def commit(delta: Delta) -> None:
        nonlocal step
        step += 1
        while True:
            try:
                await store.commit(leadership.epoch, step, delta, delta.digest())
                return
            except StoreUnavailable:
                await asyncio.sleep(_POLL_S)  # repeated with the same step, it is applied once

    hashes: list[bytes] = []
    ended_submit = _submit(0, generator)
    rids = np.arange(1, options.finished + options.requests + 1)
    for start in range(0, rids.size, _BATCH):
        batch = rids[start : start + _BATCH].tolist()
        submits = {
            rid: _named(ended_submit, rid) if rid <= options.finished else _submit(rid, generator)
            for rid in batch
        }
        await commit(
            Delta(
                next_rid=batch[-1] + 1,
                requests=[(rid, submit.SerializeToString()) for rid, submit in submits.items()],
            )
        )
        await commit(
            Delta(
                seq_nos=np.array(batch, np.int64) << 7,
                counts=np.full(len(batch), _OUTPUT_TOKENS, np.uint32),
                tokens=generator.integers(256, _VOCAB_SIZE, len(batch) * _OUTPUT_TOKENS).astype(np.int32),
            )
        )
        ended = session_pb2.Finished(
            reason=sampling_pb2.FINISH_REASON_LENGTH, num_output_tokens=_OUTPUT_TOKENS
        ).SerializeToString()
        finished = [rid for rid in batch if rid <= options.finished]
        await commit(
            Delta(
                finished=[
                    StoredFinish(rid << 7, ended, True, _RETENTION_S, name=("bench", f"bench-{rid}"))
                    for rid in finished
                ]
            )
        )
        hashes += [submits[rid].block_hashes for rid in batch if rid > options.finished]
    known = b"".join(hashes)
    known += generator.bytes(32 * options.blocks - len(known))
    async with create_channel(f"unix:{worker}") as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        instance = await _occupy(stub, leadership.epoch, options.blocks)
    blocks = np.arange(options.blocks, dtype=np.uint32)
    for first in range(0, options.blocks, 8 * _BATCH):
        part = blocks[first : first + 8 * _BATCH]
        entries = IndexEntries(
            instance, part, np.ones(part.size, np.uint32), known[32 * first : 32 * (first + part.size)]
        )
        await commit(Delta(indexed=[entries]))
    await store.resign(leadership.epoch)
    await store.close()


async def _lead(store: RedisStore) -> Leadership:
    while True:
        with contextlib.suppress(StoreUnavailable):  # it starts
            answer = await store.acquire("bench", "bench")
            if isinstance(answer, Leadership):
                return answer
        await asyncio.sleep(0.05)


def _submit(rid: int, generator: np.random.Generator, handle: int = 0) -> session_pb2.Submit:
    prompt = generator.integers(256, _VOCAB_SIZE, _PROMPT_TOKENS).tolist()
    submit = session_pb2.Submit(
        handle=handle,
        tenant="bench",
        prompt_token_ids=pack_i32(prompt),
        params=resolved_greedy(_MAX_TOKENS),
        n=1,
        block_hashes=join_hashes(hash_prompt(prompt, _BLOCK_SIZE)),
        resumable=True,
    )
    return _named(submit, rid)


def _named(submit: session_pb2.Submit, rid: int) -> session_pb2.Submit:
    """A copy under the name of request ``rid``."""
    named = session_pb2.Submit()
    named.CopyFrom(submit)
    named.request_id = f"bench-{rid}"
    named.body_digest = hashlib.sha256(named.request_id.encode()).digest()
    return named


async def _occupy(stub: Any, epoch: int, blocks: int) -> str:
    """Gives the worker one sequence that holds the first ``blocks`` blocks, in generation 1. The next leader's first
    word ends it; the generations stay. Returns the worker's instance."""
    while True:
        description = await stub.Describe(worker_pb2.DescribeRequest(), wait_for_ready=True)
        if description.phase == worker_pb2.WORKER_PHASE_READY:
            break
        await asyncio.sleep(0.05)
    call = stub.Execute()
    held = worker_pb2.NewSequence(
        slot=0,
        sequence_id="0.0",
        token_ids=pack_i32([5]),
        num_prompt_tokens=1,
        block_ids=np.arange(blocks, dtype=np.uint32).tobytes(),
        block_generations=pack_u32([1] * blocks),
        params=resolved_greedy(1),
    )
    plans = [
        worker_pb2.StepPlan(epoch=epoch, step=0),
        worker_pb2.StepPlan(epoch=epoch, step=1, new_sequences=[held]),
    ]
    await call.write(worker_pb2.ExecuteRequest(plans=plans))
    last = -1
    while last < 1:
        response = await call.read()
        last = max((result.step for result in response.results), default=last)
    call.cancel()
    return str(description.instance_id)


# -- what a client sees ---------------------------------------------------------------------------------------------


async def _until_leading(stub: Any, clock: _Clock) -> None:
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            status = await stub.GetStatus(session_pb2.GetStatusRequest(), timeout=1.0)
            clock.mark("listening")
            if status.leader:
                clock.mark("leads")
                return
        await asyncio.sleep(_POLL_S)


class _Client:
    """A gateway that has lost its leader, and gets a new request."""

    def __init__(self, options: RecoveryOptions, clock: _Clock) -> None:
        self._options = options
        self._clock = clock
        self._missing = set(range(_FIRST_LIVE, _FIRST_LIVE + options.requests))

    async def run(self, stub: Any) -> None:
        """Until everything that was asked for has been answered."""
        call = stub.Session()
        await call.write(session_pb2.SessionRequest(hello=session_pb2.Hello(gateway_id="bench-recovery")))
        beating = asyncio.create_task(self._beat(call))
        wanted = set(PHASES) - ({"ended_answer"} if not self._options.finished else set())
        try:
            while not wanted <= self._clock.seconds.keys():
                response = await call.read()
                if response is grpc.aio.EOF:  # type: ignore[attr-defined]
                    raise RuntimeError(f"the session ended: {await call.details()}")
                if response.HasField("welcome"):
                    self._clock.mark("worker")
                    await call.write(self._asks())
                self._read(response)
        finally:
            beating.cancel()
            call.cancel()
        self._clock.seconds.setdefault("ended_answer", 0.0)

    def _asks(self) -> session_pb2.SessionRequest:
        finished, requests = self._options.finished, self._options.requests
        attaches = [
            session_pb2.Attach(
                handle=_FIRST_LIVE + number,
                request_id=f"bench-{finished + 1 + number}",
                tenant="bench",
                next_index=[_OUTPUT_TOKENS],
            )
            for number in range(requests)
        ]
        if finished:
            attaches.append(session_pb2.Attach(handle=_ENDED, request_id="bench-1", tenant="bench"))
        new = _submit(finished + requests + 1, np.random.default_rng(1), handle=_NEW)
        return session_pb2.SessionRequest(submits=[new], attaches=attaches)

    def _read(self, response: session_pb2.SessionResponse) -> None:
        if response.refused:
            raise RuntimeError(f"refused: {response.refused[0].error.message}")
        spoken = set(unpack_u32(response.token_handles).tolist())
        if any(handle >= _FIRST_LIVE for handle in spoken):
            self._clock.mark("first_live_token")
        self._missing -= spoken
        if not self._missing:
            self._clock.mark("all_live_tokens")
        if _NEW in spoken:
            self._clock.mark("new_token")
        if any(finished.handle == _ENDED for finished in response.finished):
            self._clock.mark("ended_answer")

    async def _beat(self, call: Any) -> None:
        with contextlib.suppress(grpc.aio.BaseError, asyncio.InvalidStateError):
            while True:
                await asyncio.sleep(0.25)
                await call.write(session_pb2.SessionRequest())


async def _num_reads(redis: Connection) -> int:
    """Commands by which a recovery reads, since the statistics were reset. The commits of steps, which may have begun
    meanwhile, use none of them."""
    stats = (await redis.call("INFO", "commandstats")).decode()
    counted = 0
    for line in stats.splitlines():
        name, _, values = line.partition(":")
        if name.removeprefix("cmdstat_") in ("get", "hgetall", "mget", "smembers"):
            counted += int(values.split("calls=")[1].split(",")[0])
    return counted


def render(result: dict[str, Any]) -> str:
    head = (
        f"{result['blocks']} indexed blocks, {result['requests']} live and {result['finished']} ended requests; "
        "since the process began:"
    )
    rows = [f"{result[f'{phase}_s']:6.2f} s  {title}" for phase, title in PHASES.items()]
    tail = (
        f"{result['cpu_s']:6.2f} s  CPU time of the scheduler until it led; {result['store_reads_until_leading']} reads from "
        f"the store; {result['blocks_known']} blocks known"
    )
    return "\n".join([head, *rows, tail])
