"""A named stream that broke goes on at any gateway by its last event id: no gap, no repeat."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from gateway.conftest import Serve, Served
from gateway.fake_scheduler import FakeScheduler
from gateway.test_openai_client import MESSAGES, saying

from kvern.errors import KvernError
from kvern_gateway.http.resume import parse_last_event_id
from kvern_gateway.text.tokenizer import TextModel


class Received:
    """What a client has of each choice, over its connections."""

    def __init__(self) -> None:
        self.last_id: str | None = None
        self.events = 0
        self.texts: dict[int, str] = {}
        self.ids: dict[int, list[int]] = {}
        self.ends: list[tuple[int, str]] = []
        self.done = False

    async def read(self, served: Served, path: str, body: dict[str, Any], stop_after: int = 10**9) -> None:
        headers = {} if self.last_id is None else {"Last-Event-ID": self.last_id}
        async with served.http.stream("POST", path, json=body, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    self.last_id = line[4:]
                elif line.startswith("data: ") and line != "data: [DONE]":
                    self._event(json.loads(line[6:]))
                    self.events += 1
                    if self.events >= stop_after:
                        return
                elif line == "data: [DONE]":
                    self.done = True

    def _event(self, event: dict[str, Any]) -> None:
        for choice in event["choices"]:
            index = choice["index"]
            text = choice["text"] if "text" in choice else choice["delta"]["content"]
            self.texts[index] = self.texts.get(index, "") + text
            self.ids.setdefault(index, []).extend(choice.get("token_ids") or ())
            if choice["finish_reason"]:
                self.ends.append((index, choice["finish_reason"]))


TEXT = "Naïve 🎉🎉 日本 mills grind. STO"


@pytest.mark.parametrize("cut", [1, 2, 4, 7, 12, 17, 24, 29])
async def test_a_completion_goes_on_at_another_gateway(serve: Serve, smollm2: TextModel, cut: int) -> None:
    scheduler = saying(smollm2, TEXT + "P and more", "short 🎉")
    scheduler.step_s = 0.003
    first, second = await serve(scheduler), await serve(scheduler)
    body = {"prompt": "x", "n": 2, "stop": ["STOP"], "request_id": "mine", "stream": True, "max_tokens": 99}
    body["return_token_ids"] = True
    received = Received()
    await received.read(first, "/v1/completions", body, stop_after=cut)
    await first.server.stop(0)
    await received.read(second, "/v1/completions", body)
    assert received.done
    assert received.texts == {0: TEXT[: -len("STO")], 1: "short 🎉"}
    assert sorted(received.ends) == [(0, "stop"), (1, "stop")]
    for choice, ids in received.ids.items():
        assert ids == scheduler.requests["mine"].outputs[choice][: len(ids)]
    assert received.ids[1] == scheduler.requests["mine"].outputs[1]
    # Everything has ended: the last id says so, and asking once more gives only the end.
    assert received.last_id is not None and received.last_id.count("e") == 2
    events = received.events
    await received.read(second, "/v1/completions", body)
    assert received.events == events


async def test_a_chat_goes_on_with_its_logprobs(serve: Serve, smollm2: TextModel) -> None:
    scheduler = saying(smollm2, "one two three four five")
    scheduler.step_s = 0.003
    served = await serve(scheduler)
    body = {
        "messages": MESSAGES,
        "request_id": "mine",
        "stream": True,
        "logprobs": True,
        "return_token_ids": True,
    }
    received = Received()
    await received.read(served, "/v1/chat/completions", body, stop_after=3)
    assert received.texts == {0: "one two"}
    await received.read(served, "/v1/chat/completions", body)
    assert received.texts == {0: "one two three four five"}
    assert received.ids == {0: scheduler.requests["mine"].outputs[0]}


async def test_an_unknown_request_is_not_begun_in_its_middle(served: Served) -> None:
    body = {"prompt": "x", "stream": True, "max_tokens": 3, "request_id": "mine"}
    answer = await served.http.post("/v1/completions", json=body, headers={"Last-Event-ID": "2"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "request_not_found"
    # The beginning of a stream is no part of it: that may be asked for as long as nothing was received.
    answer = await served.http.post("/v1/completions", json=body, headers={"Last-Event-ID": "0"})
    assert answer.status_code == 200


async def test_a_stream_that_another_gateway_took_over_ends(serve: Serve) -> None:
    scheduler = FakeScheduler(step_s=0.01)
    first, second = await serve(scheduler), await serve(scheduler)
    body = {"prompt": "x", "stream": True, "max_tokens": 60, "request_id": "mine"}
    async with first.http.stream("POST", "/v1/completions", json=body) as old:
        lines = old.aiter_lines()
        await anext(lines)
        scheduler.tell_taken_over("mine")
        rest = [line async for line in lines]
    assert json.loads(rest[-4].removeprefix("data: "))["error"]["code"] == "cancelled"
    assert len(first.gateway.client.requests) == 0
    answer = await second.http.post("/v1/completions", json=body)
    assert answer.text.count('"text"') == 60


async def test_unnamed_streams_have_no_ids(served: Served) -> None:
    body = {"prompt": "x", "stream": True, "max_tokens": 3}
    answer = await served.http.post("/v1/completions", json=body, headers={"Last-Event-ID": "2"})
    assert "id: " not in answer.text.replace('"id": ', "")
    assert answer.text.count("data: ") == 4


async def test_ids_of_another_request_are_refused(served: Served) -> None:
    body = {"prompt": "x", "stream": True, "max_tokens": 3, "n": 2, "request_id": "mine"}
    for wrong in ("1", "1,2,3", "1,x", "", "1,-2", "1,2ee", "9" * 5000):
        answer: httpx.Response = await served.http.post(
            "/v1/completions", json=body, headers={"Last-Event-ID": wrong}
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "Last-Event-ID"
    assert served.scheduler.submits == []


def test_event_ids_list_every_choice() -> None:
    ids = parse_last_event_id("3,0,7e", 3)
    assert [(p.next_index, p.ended) for p in ids.sent_before] == [(3, False), (0, False), (7, True)]
    assert ids.after(1, 1, False) == b"id: 3,1,7e\n"
    assert ids.after(0, 4, True) == b"id: 4e,1,7e\n"
    with pytest.raises(KvernError):
        parse_last_event_id("3", 3)
