"""Services are killed with requests in flight. Tokens of the simulated worker depend on their history, so a lost,
repeated or changed token changes all that follow."""

from __future__ import annotations

import os
import signal
import time

import pytest
from e2e.running import Running, Stream, run_gateway, until

PROMPT = "Once upon a time there was a mill"
TOKENS = 200


@pytest.fixture(scope="module")
def expected(sim_stack: Running) -> str:
    text: str = sim_stack.complete(PROMPT, max_tokens=TOKENS, ignore_eos=True)["choices"][0]["text"]
    return text


@pytest.mark.parametrize("name", ["worker", "scheduler", "gateway", "store"])
def test_a_killed_service_is_restarted_and_serves_again(sim: Running, expected: str, name: str) -> None:
    old = sim.kill(name)
    sim.until_restarted(name, old)
    until(lambda: f"{name} was killed by SIGKILL" in sim.output, "the line about the death")
    sim.until_serving(30)
    assert sim.complete(PROMPT, max_tokens=TOKENS, ignore_eos=True)["choices"][0]["text"] == expected


def test_a_stream_outlives_its_worker(sim: Running, expected: str) -> None:
    stream = sim.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True)
    stream.until_events(40)
    sim.kill("worker")
    assert stream.result() == expected


def test_a_stream_outlives_a_frozen_worker(sim: Running, expected: str) -> None:
    stream = sim.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True)
    stream.until_events(40)
    frozen = sim.children()["worker"]
    os.kill(frozen, signal.SIGSTOP)
    # Longer than the silence after which the scheduler gives a worker up.
    time.sleep(2)
    os.kill(frozen, signal.SIGCONT)
    assert stream.result() == expected


def test_a_stream_outlives_its_store(sim: Running, expected: str) -> None:
    stream = sim.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True)
    stream.until_events(40)
    sim.kill("store")
    assert stream.result() == expected


def test_a_stream_outlives_its_scheduler(sim: Running, expected: str) -> None:
    stream = sim.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True)
    stream.until_events(40)
    sim.kill("scheduler")
    assert stream.result() == expected


def test_the_other_gateway_serves_on(sim: Running, expected: str) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "stream": True, "max_tokens": TOKENS, "ignore_eos": True}
    with run_gateway(sim) as (_, url):
        mine = Stream(sim.base_url, body)
        other = Stream(url, body)
        mine.until_events(20)
        sim.kill("gateway")
        assert other.result() == expected
        mine.wait()
        assert mine.finish_reason is None
        assert expected.startswith(mine.text)


def test_a_named_request_goes_on_at_another_gateway(sim: Running, expected: str) -> None:
    body = {
        "prompt": PROMPT,
        "temperature": 0,
        "stream": True,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "request_id": "goes-on-elsewhere",
    }
    with run_gateway(sim) as (_, url):
        first = Stream(sim.base_url, body)
        first.until_events(40)
        sim.kill("gateway")
        first.wait()
        rest = Stream(url, body, {"Last-Event-ID": first.last_event_id})
        assert first.text + rest.result() == expected
        assert rest.num_events < TOKENS
        assert Stream(url, body).result() == expected
