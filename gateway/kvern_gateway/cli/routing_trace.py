"""Requests for `kvern bench routing`, and a data-parallel cell that serves them in virtual time.

The scheduler's core is the real one; a worker's step takes ``STEP_S`` and ``TOKEN_S`` for each of its tokens, and says
nothing that matters.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256

import numpy as np

from kvern.v1 import model_pb2, sampling_pb2
from kvern_scheduler.core.cell import Cell
from kvern_scheduler.core.fold import fold_step
from kvern_scheduler.core.group import Group, Limits
from kvern_scheduler.core.plan import Plan, Result
from kvern_scheduler.core.planner import plan_step
from kvern_scheduler.core.requests import Request, Sequence, Submission

BLOCK_SIZE = 16
STEP_S, TOKEN_S = 0.004, 60e-6
STEP_TOKENS = 512
MAX_LEN = 16_384
# How often the groups' queues are looked at.
SAMPLE_S = 0.1


@dataclass(frozen=True)
class Arrival:
    """``prefix``: number and length in tokens of what it shares with others; ``length``: of its whole prompt."""

    at: float
    prefix: int
    prefix_len: int
    length: int
    output: int


def prefix_heavy(requests: int, seed: int = 0) -> list[Arrival]:
    """Long system prompts, some much more popular than others (Zipf, exponent 1), and short questions."""
    draw = np.random.default_rng(seed)
    weights = 1 / np.arange(1, 65)
    lengths = draw.integers(60, 200, 64) * BLOCK_SIZE
    prefixes = draw.choice(64, requests, p=weights / weights.sum())
    times = np.cumsum(draw.exponential(1.0, requests))
    own, outputs = draw.integers(16, 200, requests), draw.integers(8, 64, requests)
    return [
        Arrival(at, prefix, int(lengths[prefix]), int(lengths[prefix]) + length, output)
        for at, prefix, length, output in zip(
            times.tolist(), prefixes.tolist(), own.tolist(), outputs.tolist(), strict=True
        )
    ]


def skewed(requests: int, seed: int = 0) -> list[Arrival]:
    """Prompts of very different lengths (log-normal) that share nothing."""
    draw = np.random.default_rng(seed)
    lengths = np.clip(draw.lognormal(5.5, 1.6, requests).astype(int), 16, 12_000)
    times = np.cumsum(draw.exponential(1.0, requests))
    outputs = draw.integers(8, 64, requests)
    return [
        Arrival(at, -1 - number, 0, length, output)
        for number, (at, length, output) in enumerate(
            zip(times.tolist(), lengths.tolist(), outputs.tolist(), strict=True)
        )
    ]


TRACES = (("prefix-heavy", prefix_heavy, 0.45), ("skewed lengths", skewed, 0.9))
"""And how busy they keep the groups."""


def at_load(arrivals: list[Arrival], load: float, groups: int) -> list[Arrival]:
    """The same, as far apart as makes ``groups`` busy for the share ``load`` of the time, where each of them
    computes each prefix once."""
    prompts = sum(a.length for a in arrivals) - ideal_hits(arrivals)
    prefixes = sum({a.prefix: a.prefix_len for a in arrivals}.values())
    computed = prompts + (groups - 1) * prefixes + sum(a.output for a in arrivals)
    scale = computed * TOKEN_S / groups / load / arrivals[-1].at
    return [replace(arrival, at=arrival.at * scale) for arrival in arrivals]


def hashes_of(arrival: Arrival, number: int) -> list[bytes]:
    """As different as the prompts are; nobody reads the tokens."""
    shared = arrival.prefix_len // BLOCK_SIZE
    return [
        sha256(f"{arrival.prefix if i < shared else (arrival.prefix, number)} {i}".encode()).digest()
        for i in range(arrival.length // BLOCK_SIZE)
    ]


def ideal_hit_rate(arrivals: list[Arrival]) -> float:
    """Of one cache that forgets nothing."""
    return ideal_hits(arrivals) / sum(arrival.length for arrival in arrivals)


def ideal_hits(arrivals: list[Arrival]) -> int:
    """Tokens that an earlier prompt had."""
    seen: set[int] = set()
    hits = 0
    for arrival in arrivals:
        if arrival.prefix in seen:
            hits += arrival.prefix_len
        seen.add(arrival.prefix)
    return hits


Route = Callable[[Cell, Sequence], Group]


def round_robin() -> Route:
    turn = 0

    def route(cell: Cell, sequence: Sequence) -> Group:
        nonlocal turn
        turn += 1
        return cell.groups[turn % len(cell.groups)]

    return route


def least_requests() -> Route:
    def route(cell: Cell, sequence: Sequence) -> Group:
        return min(cell.groups.values(), key=lambda g: (g.queue.num_waiting + g.batch.num_running, g.index))

    return route


ROUTES: dict[str, Callable[[], Route | None]] = {
    "kvern": lambda: None,
    "round robin": round_robin,
    "least requests": least_requests,
}


@dataclass
class Outcome:
    """Seconds to the first token of each request, in order of arrival; hit rate 0 to 1; mean waiting tokens by group."""

    ttft: list[float] = field(default_factory=list)
    hit_rate: float = 0.0
    waiting: list[float] = field(default_factory=list)

    def percentile(self, q: float) -> float:
        return float(np.percentile(self.ttft, q))

    @property
    def imbalance(self) -> float:
        """Waiting tokens of the fullest group over those of the emptiest."""
        return max(self.waiting) / max(min(self.waiting), 1.0)


def serve(arrivals: list[Arrival], route: Route | None, groups: int = 4, blocks: int = 4096) -> Outcome:
    """Runs all requests to their end. ``route``: None is the cell's own; ``blocks``: of each group."""
    cell = Cell(Limits(max_queued_requests=10**6, max_queued_tokens=10**9))
    model = model_pb2.ModelInfo(name="virtual", vocab_size=8, max_model_len=MAX_LEN, digest=bytes(32))
    for _ in range(groups):
        cell.add_group(model, blocks, BLOCK_SIZE, 256, STEP_TOKENS)
    if route is not None:
        chosen = route
        cell._route = lambda sequence: (chosen(cell, sequence), -1)  # type: ignore[method-assign]
    events: list[tuple[float, int, Plan | Arrival | None, Group | None]] = []
    for number, arrival in enumerate(arrivals):
        heapq.heappush(events, (arrival.at, number, arrival, None))
    counter, requests = len(arrivals), list[Request]()
    # When each group's worker is free again: it computes one plan after the other.
    free = dict.fromkeys(cell.groups, 0.0)
    samples: list[list[int]] = []
    heapq.heappush(events, (SAMPLE_S, -1, None, None))

    def pump(now: float) -> None:
        nonlocal counter
        for index, group in cell.groups.items():
            while (plan := plan_step(group, now)) is not None:
                free[index] = max(now, free[index]) + STEP_S + TOKEN_S * plan.num_computed_tokens
                counter += 1
                heapq.heappush(events, (free[index], counter, plan, group))

    while events:
        now, number, event, owner = heapq.heappop(events)
        if event is None:
            samples.append([group.pending_tokens for group in cell.groups.values()])
            if events:
                heapq.heappush(events, (now + SAMPLE_S, -1, None, None))
        elif isinstance(event, Arrival):
            requests.append(cell.submit(_submission(event, number), now)[0])
        elif owner is not None:
            tokens = np.ones(event.sampled.size, np.int32)
            fold_step(owner, Result(event.step, event.sampled.packed, tokens), now)
            cell.take_changes()
        pump(now)
    firsts = [request.sequences[0].first_token - request.arrived for request in requests]
    hits = sum(request.sequences[0].num_cached_tokens for request in requests)
    return Outcome(
        firsts, hits / sum(arrival.length for arrival in arrivals), np.mean(samples, axis=0).tolist()
    )


def _submission(arrival: Arrival, number: int) -> Submission:
    params = sampling_pb2.SamplingParams(max_tokens=arrival.output, ignore_eos=True)
    prompt = np.zeros(arrival.length, np.int32)
    return Submission(str(number), "", b"", prompt, params, hashes=hashes_of(arrival, number))
