"""The load client and the figures, against a server whose bytes and pace the test decides."""

from __future__ import annotations

import asyncio
import json
import selectors
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import numpy as np
import pytest
import uvloop

from kvern_gateway.cli import bench_metrics, bench_serve
from kvern_gateway.cli.bench_workload import Prompt, draw
from kvern_gateway.cli.load_client import Connection, Pool, StreamRecord, Target

Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text: str) -> bytes:
    return (
        b"data: "
        + json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": None}]}).encode()
        + b"\n\n"
    )


def usage(prompt: int, completion: int) -> bytes:
    body = {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


class FakeServer:
    """Answers /v1/models, and gives every POST to ``handler``."""

    def __init__(self) -> None:
        self.handler: Handler = self.default
        self.bodies: list[dict[str, object]] = []
        self.open = self.most_open = 0
        self.connections = 0

    async def default(self, body: bytes, writer: asyncio.StreamWriter) -> None:
        tokens = json.loads(body)["max_tokens"]
        writer.write(STREAM_HEAD)
        for index in range(tokens):
            writer.write(chunk(event(f"t{index}")))
            await writer.drain()
            await asyncio.sleep(0.002)
        writer.write(chunk(usage(7, tokens)) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    (int(x[15:]) for x in head.decode().split("\r\n") if x.startswith("Content-Length:")), 0
                )
                body = await reader.readexactly(length)
                if head.startswith(b"GET /v1/models"):
                    answer = b'{"data": [{"id": "fake-model"}]}'
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(answer), answer))
                    continue
                self.bodies.append(json.loads(body))
                self.open += 1
                self.most_open = max(self.most_open, self.open)
                await self.handler(body, writer)
                self.open -= 1
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def fake() -> AsyncIterator[tuple[FakeServer, Target]]:
    server = FakeServer()
    listener = await asyncio.start_server(server, "127.0.0.1", 0)
    async with listener:
        yield server, Target("127.0.0.1", listener.sockets[0].getsockname()[1])


async def once(target: Target) -> StreamRecord:
    record = StreamRecord(prompt_len=3, payloads=[])
    pool = Pool(target)
    await asyncio.wait_for(pool.run(target.post("/v1/completions", {"max_tokens": 4}), record), 10)
    pool.close()
    return record


async def test_a_stream_is_counted_and_timed(fake: tuple[FakeServer, Target]) -> None:
    record = await once(fake[1])
    assert record.success
    assert sum(record.counts) == 4
    assert (record.num_output_tokens, record.prompt_len) == (4, 7)
    times = bench_metrics.event_times(record)
    assert record.start < times[0] < times[-1] <= record.end
    assert np.diff(times).min() > 0.001


@pytest.mark.parametrize("size", [1, 2, 7, 50, 10_000])
async def test_the_cut_of_the_bytes_does_not_matter(fake: tuple[FakeServer, Target], size: int) -> None:
    server, target = fake
    tricky = 'data: {"x"}\n\ndata: [DONE]\r\n\r\n"usage":{"completion_tokens": 99}'
    body = b"".join(chunk(event(text)) for text in ("a", tricky, "", "é")) + chunk(
        usage(7, 4) + b"data: [DONE]\n\n"
    )

    async def handler(_: bytes, writer: asyncio.StreamWriter) -> None:
        answer = STREAM_HEAD + body + b"0\r\n\r\n"
        for start in range(0, len(answer), size):
            writer.write(answer[start : start + size])
            await asyncio.sleep(0)

    server.handler = handler
    record = await once(target)
    assert (record.error, sum(record.counts), record.num_output_tokens) == ("", 4, 4)


async def test_several_events_in_a_chunk_and_events_cut_by_chunks(fake: tuple[FakeServer, Target]) -> None:
    server, target = fake
    whole = event("a") + event("b") + event("c")

    async def handler(_: bytes, writer: asyncio.StreamWriter) -> None:
        pieces = [whole, whole[:70], whole[70:], b": comment\n\n"]
        writer.write(STREAM_HEAD + b"".join(chunk(piece) for piece in pieces) + b"0\r\n\r\n")

    server.handler = handler
    record = await once(target)
    assert (record.error, sum(record.counts), record.num_output_tokens) == ("", 6, 0)
    assert bench_metrics.num_output_tokens(record) == 6


async def test_crlf_events_and_a_body_that_ends_with_the_connection(fake: tuple[FakeServer, Target]) -> None:
    server, target = fake

    async def handler(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for text in "abc":
            writer.write(event(text).replace(b"\n", b"\r\n"))
            await writer.drain()
            await asyncio.sleep(0.005)
        writer.close()

    server.handler = handler
    record = await once(target)
    assert (record.error, sum(record.counts)) == ("", 3)


async def test_the_opening_role_of_a_chat_is_no_token(fake: tuple[FakeServer, Target]) -> None:
    server, target = fake

    def delta(**fields: str) -> bytes:
        return b"data: " + json.dumps({"choices": [{"delta": fields}]}).encode() + b"\n\n"

    async def handler(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(delta(role="assistant", content="")))
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(chunk(delta(content="a")) + chunk(delta(content="b")) + b"0\r\n\r\n")

    server.handler = handler
    record = await once(target)
    assert sum(record.counts) == 2
    assert record.times[0] - record.start > 0.045


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b'HTTP/1.1 400 Bad Request\r\ncontent-length: 12\r\n\r\n{"error": 1}', 'HTTP 400: {"error": 1}'),
        (STREAM_HEAD + chunk(event("a")), "connection lost"),
        (b"nonsense\r\n\r\n", "malformed response"),
        (STREAM_HEAD + chunk(b'data: {"error": {"message": "it broke"}}\n\n') + b"0\r\n\r\n", "it broke"),
    ],
)
async def test_failures_are_told(fake: tuple[FakeServer, Target], answer: bytes, message: str) -> None:
    async def handler(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        writer.close()

    fake[0].handler = handler
    record = await once(fake[1])
    assert not record.success
    assert message in record.error


async def test_no_server_is_told() -> None:
    record = await once(Target("127.0.0.1", 1))
    assert "cannot connect to 127.0.0.1:1" in record.error


def options(target: Target, **more: object) -> bench_serve.ServeOptions:
    fields = {"num_prompts": 12, "random_input_len": 5, "random_output_len": 6}
    return bench_serve.ServeOptions(base_url=f"http://{target.host}:{target.port}", **(fields | more))  # type: ignore[arg-type]


async def test_a_run_has_the_keys_of_vllm(fake: tuple[FakeServer, Target]) -> None:
    server, target = fake
    result = await bench_serve.run(options(target, max_concurrency=3, goodput_ms={"ttft": 1e6, "e2el": 1e6}))
    expected = {
        "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
        "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens",
        "total_output_tokens", "request_throughput", "request_goodput", "output_throughput",
        "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests",
    }  # fmt: skip
    expected |= {
        f"{kind}_{name}_ms"
        for kind in ("mean", "median", "std", "p99")
        for name in ("ttft", "tpot", "itl", "e2el")
    }
    assert expected <= result.keys()
    assert json.loads(json.dumps(result)) == result
    assert (result["completed"], result["failed"], result["model_id"]) == (12, 0, "fake-model")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (12 * 7, 12 * 6)
    assert server.most_open == result["max_concurrent_requests"] == 3
    assert server.connections <= 4
    assert result["request_goodput"] == result["request_throughput"]
    assert 1.9 < result["median_itl_ms"] < 20
    assert result["request_rate"] == "inf"
    table = bench_metrics.render_table(result, ("ttft", "tpot", "itl", "e2el"), (99.0,))
    assert "Successful requests:                     12" in table
    assert "P99 TTFT (ms):" in table


def test_a_run_on_uvloop_as_the_command_has_it() -> None:
    async def run() -> dict[str, object]:
        async with await asyncio.start_server(FakeServer(), "127.0.0.1", 0) as listener:
            return await bench_serve.run(options(Target("127.0.0.1", listener.sockets[0].getsockname()[1])))

    result = uvloop.run(run())
    assert (result["completed"], result["failed"]) == (12, 0)


class JumpingSelector(selectors.SelectSelector):
    """Waits for no timer: it sets the clock forward. For loops without sockets."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.virtual = JumpingSelector()
        super().__init__(self.virtual)

    def time(self) -> float:
        return self.virtual.now


class SlowPool:
    """Every request takes ``seconds``; notes when each was sent."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.sent: list[float] = []

    async def run(self, *_: object) -> None:
        self.sent.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.seconds)


def sending_times(arrivals: list[float], seconds: float, max_concurrency: int | None = None) -> list[float]:
    pool = SlowPool(seconds)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(
            bench_serve._send_all(
                cast(Pool, pool),
                [b""] * len(arrivals),
                [StreamRecord(prompt_len=0) for _ in arrivals],
                arrivals,
                max_concurrency,
            )
        )
    return pool.sent


def test_requests_are_sent_when_they_are_due() -> None:
    """Neither earlier nor later, however long the answers take; the clock is the test's."""
    due = draw(options(Target("h", 1), request_rate=40.0, num_prompts=200))[1]
    assert due[-1] == pytest.approx(5.0)
    for seconds in (0.0, 0.001, 60.0):
        assert sending_times(due, seconds) == pytest.approx(due, abs=1e-6)


def test_a_bound_on_concurrency_delays_what_is_due() -> None:
    assert sending_times([0.0, 0.1, 0.2, 3.0], 1.0, 2) == pytest.approx([0.0, 0.1, 1.0, 3.0], abs=1e-6)


async def test_a_rate_stretches_a_run(fake: tuple[FakeServer, Target]) -> None:
    _, target = fake
    started = time.perf_counter()
    result = await bench_serve.run(
        options(target, request_rate=40.0, random_output_len=1, save_detailed=True)
    )
    # A busy machine sends later, never earlier.
    assert time.perf_counter() - started > 0.25
    starts = result["start_times"]
    assert starts[-1] - starts[0] > 0.15


def test_equal_seeds_give_equal_prompts() -> None:
    target = Target("h", 1)
    chosen = options(target, random_range_ratio=0.5, random_prefix_len=4, random_vocab_size=1000)
    first, again = draw(chosen)[0], draw(chosen)[0]
    assert first == again != draw(options(target, seed=1, random_range_ratio=0.5))[0]
    assert len({tuple(prompt.token_ids[:4]) for prompt in first}) == 1
    assert all(256 <= token < 1000 for prompt in first for token in prompt.token_ids)
    assert {len(prompt.token_ids) for prompt in first} <= set(range(4 + 2, 4 + 9))
    assert len({len(prompt.token_ids) for prompt in first}) > 1


def test_requests_say_what_the_options_say() -> None:
    prompt = Prompt([300, 301], 9)
    body = bench_serve.request_body(options(Target("h", 1), extra_body={"temperature": 0}), "m", prompt)
    assert body["prompt"] == [300, 301]
    assert (body["max_tokens"], body["stream"], body["ignore_eos"], body["temperature"]) == (9, True, True, 0)
    chat = bench_serve.request_body(options(Target("h", 1), endpoint="/v1/chat/completions"), "m", prompt)
    assert len(chat["messages"][0]["content"].split()) == 2
    assert "prompt" not in chat


def record(start: float, times: list[float], end: float) -> StreamRecord:
    return StreamRecord(10, start, end, times, [1] * len(times), num_output_tokens=len(times), status=200)


def test_figures_of_a_known_run() -> None:
    records = [
        record(0.0, [0.1, 0.2, 0.4], 0.4),
        record(0.5, [0.8, 0.9, 1.0], 1.0),
        record(1.0, [1.1], 1.2),
        StreamRecord(10, 0.0, 1.0, error="refused"),
    ]
    result = bench_metrics.summarize(
        records, 2.0, percentiles=(50, 99.9), goodput_ms={"ttft": 150, "e2el": 450}
    )
    assert (result["completed"], result["failed"]) == (3, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 7)
    assert result["request_throughput"] == 1.5
    assert result["output_throughput"] == 3.5
    assert result["total_token_throughput"] == 18.5
    assert result["request_goodput"] == 1.0
    assert result["mean_ttft_ms"] == pytest.approx((100 + 300 + 100) / 3)
    assert result["mean_tpot_ms"] == pytest.approx((150 + 100) / 2)
    assert result["median_itl_ms"] == pytest.approx(100)
    assert result["p50_e2el_ms"] == pytest.approx(400)
    assert result["p99.9_ttft_ms"] == pytest.approx(299.6)
    assert result["max_concurrent_requests"] == 1
    assert result["max_output_tokens_per_s"] == 6


def test_a_run_without_success_has_figures_too() -> None:
    result = bench_metrics.summarize([StreamRecord(1, error="no")], 1.0)
    assert (result["completed"], result["output_throughput"], result["mean_ttft_ms"]) == (0, 0.0, 0.0)


def test_words_of_the_command_line() -> None:
    assert bench_serve.parse_goodput(["ttft:200", "tpot:50.5"]) == {"ttft": 200, "tpot": 50.5}
    for bad in ("itl:5", "ttft", "ttft:x", "ttft:-1"):
        with pytest.raises(ValueError, match="--goodput"):
            bench_serve.parse_goodput([bad])
    assert bench_serve.parse_percentiles("25,99.9") == (25, 99.9)
    with pytest.raises(ValueError, match="0 to 100"):
        bench_serve.parse_percentiles("101")
    with pytest.raises(ValueError, match="choose from"):
        bench_serve.parse_metrics("ttft,latency")
    with pytest.raises(ValueError, match="URL"):
        Target.parse("https://x")


async def test_an_event_costs_the_client_microseconds() -> None:
    connection = Connection()

    class Transport(asyncio.Transport):
        def write(self, data: object) -> None:
            pass

    connection.connection_made(Transport())
    record = StreamRecord(prompt_len=1)
    running = asyncio.create_task(connection.run(b"", record))
    await asyncio.sleep(0)
    connection.data_received(STREAM_HEAD + chunk(event("first")))
    read = chunk(event(" token"))
    started = time.process_time()
    for _ in range(20_000):
        connection.data_received(read)
    cost_us = (time.process_time() - started) / 20_000 * 1e6
    connection.data_received(b"0\r\n\r\n")
    await running
    assert sum(record.counts) == 20_001
    # About 2 µs; the allowance is for a busy machine.
    assert cost_us < 10
