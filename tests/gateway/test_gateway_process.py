"""The program itself: start, stop, refusals at start, and the routes that are not generation."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from gateway.conftest import Serve, Served
from gateway.fake_scheduler import FakeScheduler, until
from prometheus_client.parser import text_string_to_metric_families

from kvern_gateway.server import build_parser
from kvern_gateway.text.tokenizer import TextModel

Start = Callable[..., Awaitable[tuple[asyncio.subprocess.Process, str]]]


@pytest.fixture
async def scheduler() -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(step_s=0.01)
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def start(smollm2_path: Path, unused_tcp_port_factory: Callable[[], int]) -> AsyncIterator[Start]:
    processes: list[asyncio.subprocess.Process] = []

    async def run(scheduler: str, *flags: str, model: str = "") -> tuple[asyncio.subprocess.Process, str]:
        http, grpc = unused_tcp_port_factory(), unused_tcp_port_factory()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "kvern_gateway.server", "--scheduler", scheduler, "--model", model or str(smollm2_path)),
            *("--http-port", str(http), "--grpc-port", str(grpc), *flags),
            stderr=asyncio.subprocess.PIPE,
        )
        processes.append(process)
        return process, f"http://127.0.0.1:{http}"

    yield run
    for process in processes:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def healthy(url: str) -> float:
    """Seconds until /health is 200."""
    started = time.monotonic()
    async with httpx.AsyncClient(verify=False) as http, asyncio.timeout(20):
        while True:
            try:
                if (await http.get(f"{url}/health")).status_code == 200:
                    return time.monotonic() - started
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.02)


async def test_it_starts_fast_and_sigterm_lets_streams_finish(start: Start, scheduler: FakeScheduler) -> None:
    process, url = await start(scheduler.address)
    # About one second on an idle machine.
    assert await healthy(url) < 10
    async with httpx.AsyncClient(verify=False, timeout=20) as http:
        body = {"prompt": "x", "max_tokens": 50, "stream": True}
        running = asyncio.create_task(http.post(f"{url}/v1/completions", json=body))
        await until(lambda: scheduler.submits)
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        with pytest.raises(httpx.TransportError):
            await http.get(f"{url}/health")
        answer = await running
    assert answer.text.count("data: ") == 51
    assert answer.text.endswith("data: [DONE]\n\n")
    assert await asyncio.wait_for(process.wait(), 5) == 0
    assert process.stderr is not None
    assert b"Traceback" not in await process.stderr.read()


async def test_sigterm_ends_what_is_open_after_the_grace_with_an_error(
    start: Start, scheduler: FakeScheduler
) -> None:
    process, url = await start(scheduler.address, "--shutdown-grace", "0.3")
    await healthy(url)
    async with httpx.AsyncClient(verify=False, timeout=20) as http:
        body = {"prompt": "x", "max_tokens": 2000, "stream": True}
        async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
            pieces = answer.aiter_text()
            text = await anext(pieces)
            process.send_signal(signal.SIGTERM)
            text += "".join([piece async for piece in pieces])
    *_, last, done = text.rstrip().split("data: ")
    assert done == "[DONE]"
    last = json.loads(last)
    assert last["error"]["code"] == "unavailable"
    assert "this gateway is stopping" in last["error"]["message"]
    assert await asyncio.wait_for(process.wait(), 5) == 0


async def test_another_models_tokenizer_is_refused(start: Start) -> None:
    fake = FakeScheduler(vocab_size=32_000)
    await fake.start()
    process, _ = await start(fake.address)
    _, stderr = await asyncio.wait_for(process.communicate(), 20)
    await fake.stop()
    assert process.returncode == 1
    assert b"the tokenizer has 49152 tokens, the served model 'test-model' only 32000" in stderr
    assert b"Traceback" not in stderr


async def test_wrong_files_are_refused_in_one_line(start: Start) -> None:
    process, _ = await start("127.0.0.1:1", model="/nothing/here")
    _, stderr = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    assert stderr.decode().startswith("kvern-gateway: there is no model at /nothing/here")
    assert len(stderr.splitlines()) == 1


async def test_a_taken_port_is_refused_in_one_line(start: Start, scheduler: FakeScheduler) -> None:
    _, url = await start(scheduler.address)
    await healthy(url)
    process, _ = await start(scheduler.address, "--http-port", url.rsplit(":", 1)[1])
    _, stderr = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 1
    assert b"kvern-gateway: " in stderr and b"Traceback" not in stderr


async def test_it_never_imports_torch_or_transformers() -> None:
    code = (
        "import sys, kvern_gateway.server; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'gguf')))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0


def test_flags_have_vllms_names() -> None:
    options = build_parser().parse_args(
        ["--scheduler", "a:1,b:2", "--model", "m", "--served-model-name", "x", "y"]
    )
    assert (options.http_port, options.grpc_port, options.host) == (8000, 50051, "127.0.0.1")
    assert options.served_model_name == ["x", "y"]


async def test_tokenize_and_detokenize(served: Served, smollm2: TextModel) -> None:
    answer = await served.http.post("/tokenize", json={"prompt": "Hello 42", "return_token_strs": True})
    ids = smollm2.encode("Hello 42", True)
    assert answer.json() == {
        "count": len(ids),
        "max_model_len": 2048,
        "tokens": ids,
        "token_strs": ["Hello", "Ġ", "4", "2"],
    }
    chat = await served.http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]})
    text = smollm2.decode(chat.json()["tokens"], False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    back = await served.http.post("/detokenize", json={"tokens": chat.json()["tokens"]})
    assert back.json() == {"prompt": text}


async def test_small_routes(served: Served) -> None:
    for path in ("/health", "/ping"):
        assert (await served.http.get(path)).status_code == 200
    assert set((await served.http.get("/version")).json()) == {"version"}
    assert (await served.http.get("/load")).json() == {"server_load": 0}


async def test_names(serve: Serve) -> None:
    served = await serve()
    served.gateway.served_names = ("alias",)
    listed = (await served.http.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["alias", "test-model"]
    for name in ("alias", "test-model", None):
        body = {"prompt": "x", "max_tokens": 1, "model": name}
        answer = await served.http.post("/v1/completions", json=body)
        assert answer.json()["model"] == (name or "alias")
        assert served.scheduler.submits[-1].model == "test-model"


async def test_metrics(served: Served) -> None:
    body = {"prompt": "The mill", "max_tokens": 7, "n": 2}
    assert (await served.http.post("/v1/completions", json=body)).status_code == 200
    assert (await served.http.post("/v1/completions", json=body | {"stream": True})).status_code == 200
    assert (await served.http.post("/v1/completions", json={"prompt": ""})).status_code == 400
    answer = await served.http.get("/metrics")
    samples = {
        (sample.name, sample.labels.get("finished_reason", sample.labels.get("code"))): sample
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    expected = {
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:inter_token_latency_seconds_count": 24,
        "vllm:e2e_request_latency_seconds_count": 4,
        "vllm:request_prompt_tokens_sum": 4,
        "vllm:request_generation_tokens_sum": 28,
        "vllm:prompt_tokens_total": 4,
        "vllm:generation_tokens_total": 28,
        "vllm:request_params_n_sum": 4,
    }
    assert {name: samples[name, None].value for name in expected} == expected
    assert samples["vllm:request_success_total", "length"].value == 4
    assert samples["kvern_gateway_refused_total", "invalid_argument"].value == 1
    assert samples["vllm:prompt_tokens_total", None].labels == {"model_name": "test-model", "engine": "0"}


async def test_draining_refuses_new_requests(served: Served) -> None:
    served.gateway.draining = True
    answer = await served.http.post("/v1/completions", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert (await served.http.get("/health")).status_code == 503
