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
    answer = await served.http.post("/v1/completions", json=body)
    assert "id: " not in answer.text.replace('"id": ', "")
    assert answer.text.count("data: ") == 4


@pytest.mark.parametrize("more", [{"stream": True}, {"request_id": "mine"}, {}])
async def test_only_named_streams_have_a_last_event(served: Served, more: dict[str, Any]) -> None:
    body = {"prompt": "x", "max_tokens": 3, **more}
    answer = await served.http.post("/v1/completions", json=body, headers={"Last-Event-ID": "2"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "Last-Event-ID"
    assert "stream true and a request_id" in answer.json()["error"]["message"]
    assert served.scheduler.submits == []


@pytest.mark.parametrize("chat", [False, True])
async def test_an_id_beyond_the_end_is_refused(serve: Serve, smollm2: TextModel, chat: bool) -> None:
    """What the request can have at most is known at once, what it has had when its end is known."""
    scheduler = saying(smollm2, "one two", "three STOP and more")
    served = await serve(scheduler)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt = {"messages": MESSAGES} if chat else {"prompt": "x"}
    body = prompt | {"request_id": "mine", "stream": True, "n": 2, "stop": ["STOP"], "max_tokens": 30}
    received = Received()
    await received.read(served, path, body)
    assert received.last_id is not None
    first, second = (int(word[:-1]) for word in received.last_id.split(","))

    for asked, choice, limit in (
        (f"31,{second}", 0, 30),
        (f"{first},{31}e", 1, 30),
        (f"{first + 1},{second}", 0, first),
        (f"{first + 1}e,{second}e", 0, first),
        (f"{first},{second + 1}", 1, second),
    ):
        answer = await served.http.post(path, json=body, headers={"Last-Event-ID": asked})
        if limit == 30:
            assert answer.status_code == 400
            error = answer.json()["error"]
        else:
            *_, said, done = answer.text.strip().split("\n\n")
            assert done == "data: [DONE]"
            error = json.loads(said.removeprefix("data: "))["error"]
        assert (error["param"], error["code"]) == ("Last-Event-ID", "invalid_argument")
        assert f"tokens of choice {choice} were received; there are no more than {limit}" in error["message"]
    # The request is as it was.
    await received.read(served, path, body)
    assert received.done and sorted(received.ends) == [(0, "stop"), (1, "stop")]


async def test_an_id_beyond_the_end_does_not_end_what_still_runs(serve: Serve) -> None:
    scheduler = FakeScheduler(lambda submit, choice: range(1000, 1004 if choice == 0 else 1060), step_s=0.01)
    served = await serve(scheduler)
    body = {"prompt": "x", "request_id": "mine", "stream": True, "n": 2, "max_tokens": 60}
    wrong = await served.http.post("/v1/completions", json=body, headers={"Last-Event-ID": "0,0"})
    assert "error" not in wrong.text
    scheduler.requests.clear()
    received = Received()
    await received.read(served, "/v1/completions", body, stop_after=3)
    wrong = await served.http.post("/v1/completions", json=body, headers={"Last-Event-ID": "9,0"})
    assert "no more than 4" in wrong.text
    await received.read(served, "/v1/completions", body)
    assert sorted(received.ends) == [(0, "length"), (1, "length")]
    assert scheduler.cancels == []


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
    ids = parse_last_event_id("3,0,7e", [7, 7, 7])
    assert [(p.next_index, p.ended) for p in ids.sent_before] == [(3, False), (0, False), (7, True)]
    assert ids.after(1, 1, False) == b"id: 3,1,7e\n"
    assert ids.after(0, 4, True) == b"id: 4e,1,7e\n"
    with pytest.raises(KvernError):
        parse_last_event_id("3", [7, 7, 7])
