"""`kvern bench overload`: more requests than the worker can serve, offered whether or not earlier ones were answered.

First as many requests at once as keep every slot busy, which gives the peak; then ``factor`` times the rate that this
made, open-loop. Whatever was admitted has to finish, and what is refused has to hear so at once.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from kvern_gateway.cli import bench_stack
from kvern_gateway.cli.load_client import Pool, StreamRecord, Target
from kvern_gateway.cli.ports import claim_port

HOST = "127.0.0.1"
PATH = "/v1/chat/completions"
# Requests without an answer at a time. One that cannot be sent for it counts as such: the server refused too slowly.
MAX_OUTSTANDING = 4_000
# For what was admitted last: several times what the queue takes.
FINISH_TIMEOUT_S = 120.0
_WATCH_S = 0.01
_WORDS = (
    "wind",
    "mill",
    "stone",
    "river",
    "grain",
    "flour",
    "wheel",
    "bread",
    "north",
    "sack",
    "rye",
    "oats",
)


@dataclass(frozen=True)
class OverloadOptions:
    """``queue`` is how many may wait beside the ``slots`` that are computed; ``peak_s`` measures the peak."""

    seconds: float = 60.0
    factor: float = 10.0
    slots: int = 32
    queue: int = 64
    step_us: int = 20_000
    input_words: int = 128
    output_len: int = 64
    peak_s: float = 10.0
    store: str = "memory"
    appendfsync: str = "always"
    seed: int = 0

    @property
    def warm_up_s(self) -> float:
        """Until the slots are out of step with each other: two requests' time."""
        return 2 * self.output_len * self.step_us / 1e6


class Offered:
    """Sends requests and keeps what came of each."""

    def __init__(self, options: OverloadOptions, port: int) -> None:
        self.records: list[StreamRecord] = []
        self.num_not_sent = 0
        self._options = options
        self._pool = Pool(Target(HOST, port))
        self._choices = random.Random(options.seed)
        self._open: set[asyncio.Task[None]] = set()

    async def saturate(self, seconds: float) -> None:
        """One more than the slots at a time, so that none is ever empty; then until all have ended."""
        until = perf_counter() + seconds

        async def client() -> None:
            while perf_counter() < until:
                await self._request()

        await asyncio.gather(*(client() for _ in range(self._options.slots + self._options.slots // 4 + 1)))

    async def offer(self, rate: float, seconds: float) -> None:
        """Poisson arrivals at ``rate`` per second; returns when the time is over, with requests still open."""
        start = perf_counter()
        due = start
        while (due := due + self._choices.expovariate(rate)) < start + seconds:
            if (wait := due - perf_counter()) > 0:
                await asyncio.sleep(wait)
            if len(self._open) >= MAX_OUTSTANDING:
                self.num_not_sent += 1
                continue
            task = asyncio.create_task(self._request())
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def finish(self, timeout_s: float) -> None:
        """Waits for the answers that are open; what has none by then never ended."""
        if self._open:
            _, late = await asyncio.wait(self._open, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _request(self) -> None:
        record = StreamRecord(prompt_len=0)
        self.records.append(record)
        try:
            await self._pool.run(self._body(), record)
        except asyncio.CancelledError:
            record.error = record.error or "no end in time"
            raise

    def _body(self) -> bytes:
        options = self._options
        text = " ".join(self._choices.choices(_WORDS, k=options.input_words))
        return self._pool.target.post(
            PATH,
            {
                "messages": [{"role": "user", "content": text}],
                "max_tokens": options.output_len,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )

    def close(self) -> None:
        self._pool.close()


async def _watch(lateness: list[float]) -> None:
    """How late this process itself is: on a busy machine, a part of every time that it measures."""
    while True:
        due = perf_counter() + _WATCH_S
        await asyncio.sleep(_WATCH_S)
        lateness.append(perf_counter() - due)


def tokens_between(records: Sequence[StreamRecord], start: float, end: float) -> int:
    """Output tokens that came in that time, of requests that were answered whole."""
    return sum(
        count
        for record in records
        if record.success
        for moment, count in zip(record.times, record.counts, strict=True)
        if start <= moment < end
    )


async def run(options: OverloadOptions) -> dict[str, Any]:
    """Raises ChildFailed, ConnectionError, TimeoutError where the services do not start or serve."""
    http_port, grpc_port = claim_port(HOST, 0, "--http-port"), claim_port(HOST, 0, "--grpc-port")
    flags = {
        "sim_step_us": options.step_us,
        "sim_num_blocks": 64
        * (options.slots + 1)
        * (1 + (8 * options.input_words + options.output_len) // 1024),
        "max_num_seqs": options.slots,
        "max_queued_requests": options.queue,
    }
    async with bench_stack.running(
        *("worker", "scheduler", "gateway"),
        store=options.store,
        appendfsync=options.appendfsync,
        flags=flags,
        http_port=http_port,
        grpc_port=grpc_port,
    ) as bench:
        await bench_stack.until_healthy(Target(HOST, http_port))
        bench.supervisor.mark_ready()
        peak = Offered(options, http_port)
        start = perf_counter()
        await peak.saturate(options.warm_up_s + options.peak_s)
        peak_goodput = (
            tokens_between(
                peak.records, start + options.warm_up_s, start + options.warm_up_s + options.peak_s
            )
            / options.peak_s
        )
        peak.close()
        if not peak_goodput:
            raise ConnectionError(f"no request was answered: {peak.records[0].error}")
        rate = options.factor * peak_goodput / options.output_len
        offered = Offered(options, http_port)
        lateness: list[float] = []
        watching = asyncio.create_task(_watch(lateness))
        before, waited_before, start = bench.cpu_seconds(), bench.cpu_waited_seconds(), perf_counter()
        await offered.offer(rate, options.warm_up_s + options.seconds)
        after, waited_after, end = bench.cpu_seconds(), bench.cpu_waited_seconds(), perf_counter()
        watching.cancel()
        await offered.finish(FINISH_TIMEOUT_S)
        offered.close()
    cpu = {name: (after[name] - before.get(name, 0.0)) / (end - start) for name in after}
    waited = {
        name: (waited_after[name] - waited_before.get(name, 0.0)) / (end - start) for name in waited_after
    }
    result = _result(options, peak_goodput, rate, offered, start + options.warm_up_s)
    return {
        **result,
        "cpu_share": cpu,
        "cpu_waited_share": waited,
        "client_lateness_ms_p50": percentile_ms(lateness, 0.5),
        "client_lateness_ms_p99": percentile_ms(lateness, 0.99),
    }


def _result(
    options: OverloadOptions,
    peak_goodput: float,
    rate: float,
    offered: Offered,
    start: float,
) -> dict[str, Any]:
    records = offered.records
    goodput = tokens_between(records, start, start + options.seconds) / options.seconds
    refused = [record for record in records if record.status == 429]
    admitted = [record for record in records if record.status == 200]
    unfinished = [
        record for record in admitted if not record.success or record.num_output_tokens != options.output_len
    ]
    others = [record for record in records if record.status not in (200, 429)]
    return {
        "factor": options.factor,
        "seconds": options.seconds,
        "store": options.store,
        "sim_step_us": options.step_us,
        "slots": options.slots,
        "peak_goodput": peak_goodput,
        "goodput": goodput,
        "goodput_ratio": goodput / peak_goodput,
        "offered_rate": rate,
        "offered": len(records),
        "not_sent": offered.num_not_sent,
        "admitted": len(admitted),
        "refused": len(refused),
        "refusal_ms_p50": percentile_ms([record.end - record.start for record in refused], 0.5),
        "refusal_ms_p99": percentile_ms([record.end - record.start for record in refused], 0.99),
        "ttft_ms_p50": percentile_ms([r.times[0] - r.start for r in admitted if r.times], 0.5),
        "ttft_ms_p99": percentile_ms([r.times[0] - r.start for r in admitted if r.times], 0.99),
        "admitted_but_unfinished": len(unfinished),
        "other_errors": len(others),
        "first_error": next((record.error for record in [*unfinished, *others]), None),
    }


def percentile_ms(seconds: Sequence[float], share: float) -> float:
    """0 of nothing."""
    ordered = sorted(seconds)
    return 1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def render(result: dict[str, Any]) -> str:
    waited = result["cpu_waited_share"]
    shares = ", ".join(
        f"{name} {100 * share:.0f} % (waited for one {100 * waited[name]:.0f} %)"
        for name, share in result["cpu_share"].items()
    )
    lines = [
        f"peak      {result['peak_goodput']:.0f} tokens/s ({result['slots']} slots, simulated step "
        f"{result['sim_step_us']} µs, store {result['store']})",
        f"overload  {result['offered_rate']:.0f} requests/s for {result['seconds']:g} s, "
        f"{result['factor']:g} times what can be served",
        f"goodput   {result['goodput']:.0f} tokens/s, {100 * result['goodput_ratio']:.1f} % of the peak",
        f"refused   {result['refused']} of {result['offered']}, told after {result['refusal_ms_p50']:.1f} ms p50, "
        f"{result['refusal_ms_p99']:.1f} ms p99",
        f"admitted  {result['admitted']}, TTFT {result['ttft_ms_p50']:.0f} ms p50, {result['ttft_ms_p99']:.0f} ms "
        f"p99; {result['admitted_but_unfinished']} did not finish",
        f"failed    {result['other_errors']} otherwise, {result['not_sent']} not even sent",
        f"CPU       {shares}; this client is {result['client_lateness_ms_p50']:.1f} ms late p50, "
        f"{result['client_lateness_ms_p99']:.1f} ms p99",
    ]
    if result["first_error"]:
        lines.append(f"first error: {json.dumps(result['first_error'])}")
    return "\n".join(lines)


def exit_code(result: dict[str, Any]) -> int:
    """1 where something admitted did not finish, or failed otherwise than by a refusal."""
    return 1 if result["admitted_but_unfinished"] or result["other_errors"] else 0
