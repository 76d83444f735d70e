"""`kvern bench slow-clients`: clients that open a long stream and never read it, beside a few that do.

Nobody may pay for them: a step takes as long as before, the other streams get their tokens, and memory stays bounded.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc.aio

from kvern.rpc.channel import CHANNEL_OPTIONS, create_channel
from kvern.v1 import generation_pb2, generation_pb2_grpc, sampling_pb2, session_pb2, session_pb2_grpc
from kvern_gateway.cli import bench_stack
from kvern_gateway.cli.bench_overload import percentile_ms
from kvern_gateway.cli.load_client import Connection, StreamRecord, Target
from kvern_gateway.cli.ports import claim_port

HOST = "127.0.0.1"
NUM_PROBES = 8
PROBE_TOKENS = 256
PROMPT = "Once upon a time there was a mill"
# Small, so that the server's side fills instead of this client's.
_RECEIVE_BUFFER = 4096
_POLL_S = 0.05
_SETTLE_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class SlowOptions:
    clients: int = 200
    output_len: int = 4096
    logprobs: int = 0
    step_us: int = 10_000

    @property
    def max_model_len(self) -> int:
        return self.output_len + 1024


@dataclass
class Seen:
    """What the streams that are read saw, and the steps meanwhile."""

    step_us: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


async def run(options: SlowOptions) -> dict[str, Any]:
    """Raises ChildFailed, ConnectionError, TimeoutError where the services do not start or serve."""
    http_port, grpc_port = claim_port(HOST, 0, "--http-port"), claim_port(HOST, 0, "--grpc-port")
    sequences = options.clients + NUM_PROBES
    flags = {
        "sim_step_us": options.step_us,
        "sim_num_blocks": sequences * (options.max_model_len // 16 + 2),
        "max_num_seqs": sequences,
        "max_model_len": options.max_model_len,
    }
    async with (
        bench_stack.running(
            *("worker", "scheduler", "gateway"),
            store="memory",
            appendfsync="no",
            flags=flags,
            http_port=http_port,
            grpc_port=grpc_port,
        ) as bench,
        create_channel(bench.scheduler) as channel,
    ):
        await bench_stack.until_healthy(Target(HOST, http_port))
        bench.supervisor.mark_ready()
        scheduler = session_pb2_grpc.SchedulerServiceStub(channel)
        await _probe(http_port, scheduler)  # warms up
        before = await _probe(http_port, scheduler)
        rss_before = _rss(bench)
        async with _unread(options, http_port, grpc_port):
            during = await _probe(http_port, scheduler)
            await _until_computed(scheduler)
            rss_after = _rss(bench)
            in_kernel = _send_queues(http_port) + _send_queues(grpc_port)
            answered_after = await _probe(http_port, scheduler)
        await _until_computed(scheduler)
    texts = {*before.texts, *during.texts, *answered_after.texts}
    growth = {name: (rss_after[name] - rss_before[name]) / options.clients for name in rss_after}
    step_before, step_with = _median(before.step_us), _median(during.step_us)
    return {
        "clients": options.clients,
        "output_len": options.output_len,
        "logprobs": options.logprobs,
        "sim_step_us": options.step_us,
        "step_us_before": step_before,
        "step_us_with": step_with,
        "step_ratio": step_with / step_before,
        "itl_ms_p50_before": percentile_ms(before.gaps, 0.5),
        "itl_ms_p99_before": percentile_ms(before.gaps, 0.99),
        "itl_ms_p50_with": percentile_ms(during.gaps, 0.5),
        "itl_ms_p99_with": percentile_ms(during.gaps, 0.99),
        "rss_bytes_per_client": growth,
        "kernel_bytes_per_client": in_kernel / options.clients,
        "wrong_texts": len(texts) - 1,
    }


async def _probe(port: int, scheduler: Any) -> Seen:
    """A few clients that read. All ask for the same, so all have to get the same."""
    seen = Seen()
    records = [StreamRecord(prompt_len=0, payloads=[]) for _ in range(NUM_PROBES)]
    watching = asyncio.create_task(_watch_steps(scheduler, seen))
    await asyncio.gather(*(_read(port, record) for record in records))
    watching.cancel()
    for record in records:
        if not record.success:
            raise ConnectionError(f"a stream beside the ones that are not read failed: {record.error}")
        seen.gaps += [b - a for a, b in zip(record.times, record.times[1:], strict=False)]
        seen.texts.append(_text(record.payloads or []))
    return seen


async def _read(port: int, record: StreamRecord) -> None:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(Connection, HOST, port)
    await connection.run(Target(HOST, port).post("/v1/completions", _body(PROBE_TOKENS)), record)
    connection.close()


async def _watch_steps(scheduler: Any, seen: Seen) -> None:
    """Steps counted between two looks: what one took."""
    last: tuple[float, int] | None = None
    while True:
        status = await scheduler.GetStatus(session_pb2.GetStatusRequest())
        now = (perf_counter(), status.timings.steps)
        if last is not None and now[1] > last[1]:
            seen.step_us.append(1e6 * (now[0] - last[0]) / (now[1] - last[1]))
        last = now
        await asyncio.sleep(10 * _POLL_S)


def _text(payloads: Sequence[bytes]) -> str:
    events = b"".join(payloads).split(b"\n\n")
    parsed = [json.loads(event[6:]) for event in events if event.startswith(b"data: {")]
    return "".join(choice["text"] for event in parsed for choice in event["choices"])


def _body(max_tokens: int, logprobs: int = 0) -> dict[str, Any]:
    body = {
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    return {**body, "logprobs": logprobs} if logprobs else body


@asynccontextmanager
async def _unread(options: SlowOptions, http_port: int, grpc_port: int) -> AsyncIterator[None]:
    """Half of the clients on HTTP, half on gRPC, each on a connection of its own; all accepted."""
    num_http = options.clients // 2
    sockets: list[socket.socket] = []
    channels: list[grpc.aio.Channel] = []
    calls: list[Any] = []
    loop = asyncio.get_running_loop()
    request = Target(HOST, http_port).post("/v1/completions", _body(options.output_len, options.logprobs))
    try:
        for _ in range(num_http):
            one = socket.socket()
            sockets.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
            one.setblocking(False)
            await loop.sock_connect(one, (HOST, http_port))
            await loop.sock_sendall(one, request)
        for _ in range(options.clients - num_http):
            channel = grpc.aio.insecure_channel(
                f"{HOST}:{grpc_port}", options=[*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
            )
            channels.append(channel)
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            call: Any = stub.Generate(_grpc_request(options))
            calls.append(call)
            await call.read()  # it is accepted
        yield
    finally:
        for call in calls:
            call.cancel()
        for one in sockets:
            one.close()
        await asyncio.gather(*(channel.close(None) for channel in channels))


def _grpc_request(options: SlowOptions) -> generation_pb2.GenerateRequest:
    sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=options.output_len, ignore_eos=True)
    if options.logprobs:
        sampling.logprobs = options.logprobs
    return generation_pb2.GenerateRequest(prompt=PROMPT, sampling=sampling)


async def _until_computed(scheduler: Any) -> None:
    """Until no sequence runs any more."""
    async with asyncio.timeout(_SETTLE_TIMEOUT_S):
        while True:
            status = await scheduler.GetStatus(session_pb2.GetStatusRequest())
            if not any(group.num_running + group.num_waiting for group in status.groups):
                return
            await asyncio.sleep(_POLL_S)


def _rss(bench: bench_stack.Bench) -> dict[str, int]:
    """Resident bytes of the processes that streams pass through."""
    found = {}
    for name in ("scheduler", "gateway"):
        status = Path(f"/proc/{bench.supervisor.pid(name)}/status").read_text()
        found[name] = 1024 * int(status.partition("VmRSS:")[2].split()[0])
    return found


def _send_queues(port: int) -> int:
    """Bytes that the kernel holds for the clients of a port, unsent or unacknowledged."""
    total = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[1].rpartition(":")[2], 16) == port:
            total += int(fields[4].partition(":")[0], 16)
    return total


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0


def render(result: dict[str, Any]) -> str:
    memory = ", ".join(
        f"{name} {size / 1024:.0f} KiB" for name, size in result["rss_bytes_per_client"].items()
    )
    asked = f" with {result['logprobs']} log-probabilities each" if result["logprobs"] else ""
    return "\n".join(
        [
            f"{result['clients']} clients that ask for {result['output_len']} tokens{asked} and read none",
            f"step    {result['step_us_before']:.0f} µs before, {result['step_us_with']:.0f} µs with them "
            f"({result['step_ratio']:.2f}; simulated {result['sim_step_us']} µs)",
            f"ITL     of others {result['itl_ms_p50_before']:.1f} ms p50, {result['itl_ms_p99_before']:.1f} ms p99 "
            f"before; {result['itl_ms_p50_with']:.1f} ms p50, {result['itl_ms_p99_with']:.1f} ms p99 with them",
            f"memory  per client: {memory}, kernel {result['kernel_bytes_per_client'] / 1024:.0f} KiB",
            f"others  {result['wrong_texts']} of their texts differ",
        ]
    )


def exit_code(result: dict[str, Any]) -> int:
    """1 where another client's text was changed."""
    return 1 if result["wrong_texts"] else 0
