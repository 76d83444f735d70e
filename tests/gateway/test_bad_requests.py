"""Every wrong request gets a typed error that names field, value and limit, over HTTP and gRPC, at once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from gateway.conftest import Serve, Served
from gateway.fake_scheduler import FakeScheduler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvern.errors import KvernError
from kvern.rpc.errors import error_from_rpc
from kvern.v1 import error_pb2, generation_pb2, generation_pb2_grpc, sampling_pb2
from kvern_gateway.gateway import Gateway
from kvern_gateway.http import fields, parse, protocol
from kvern_gateway.http.completions import parse_completion
from kvern_gateway.limits import Limits
from kvern_gateway.scheduler_client import SchedulerClient
from kvern_gateway.text.tokenizer import TextModel

# (what changes, param, what the message holds)
COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "missing"),
    ({"prompt": ""}, "prompt", "at least one token"),
    ({"prompt": []}, "prompt", "at least one token"),
    ({"prompt": ["a", ""]}, "prompt[1]", "at least one token"),
    ({"prompt": [[1], []]}, "prompt[1]", "at least one token"),
    ({"prompt": 7}, "prompt", "a string, a list of token ids"),
    ({"prompt": ["a", 7]}, "prompt[1]", "a string or a list"),
    ({"prompt": {"a": 1}}, "prompt", "a string"),
    ({"prompt": ["x"] * 129}, "prompt", "129 prompts; at most 128"),
    ({"prompt": [1, 49152]}, "prompt[1]", "49152; it must be a token id from 0 to 49151"),
    ({"prompt": [1, -1]}, "prompt[1]", "-1"),
    ({"prompt": [1, 1.5]}, "prompt[1]", "1.5"),
    ({"prompt": [1, True]}, "prompt[1]", "is true;"),
    ({"prompt": [2**70]}, "prompt[0]", "0 to 49151"),
    ({"prompt": [1] * 2048}, "prompt", "2048 tokens"),
    ({"prompt": [1] * 2000, "max_tokens": 49}, "max_tokens", "asks for 49 more"),
    ({"prompt": "word " * 3000}, "prompt", "the context of this model is 2048 tokens"),
    ({"prompt": "x" * 300_000}, "prompt", "300000 characters"),
    ({"temperature": -0.1}, "temperature", "-0.1; it must be a number from 0 to 100"),
    ({"temperature": 101}, "temperature", "101"),
    ({"temperature": 10**400}, "temperature", "0 to 100"),
    ({"logit_bias": {"5": -(10**400)}}, "logit_bias[5]", "-100 to 100"),
    ({"temperature": "hot"}, "temperature", "'hot'"),
    ({"temperature": True}, "temperature", "is true;"),
    ({"top_p": 0}, "top_p", "above 0 up to 1"),
    ({"top_p": 1.01}, "top_p", "1.01"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"top_k": 2**31}, "top_k", str(2**31)),
    ({"top_k": 1.5}, "top_k", "an integer"),
    ({"min_p": 1.1}, "min_p", "1.1"),
    ({"min_p": -1}, "min_p", "-1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"repetition_penalty": 1000}, "repetition_penalty", "1000"),
    ({"presence_penalty": 2.1}, "presence_penalty", "2.1"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "-2.1"),
    ({"seed": 2**64}, "seed", str(2**64)),
    ({"seed": "x"}, "seed", "an integer"),
    ({"n": 0}, "n", "0; it must be an integer from 1 to 128"),
    ({"n": 129}, "n", "129"),
    ({"n": 128, "prompt": ["x"] * 9}, "n", "1152 choices"),
    ({"logprobs": 21}, "logprobs", "21; it must be an integer from 0 to 20"),
    ({"logprobs": -1}, "logprobs", "-1"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "21"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
    ({"max_tokens": 0}, "max_tokens", "0"),
    ({"max_tokens": -5}, "max_tokens", "-5"),
    ({"max_tokens": 1e300}, "max_tokens", "an integer"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "5; it must be at most max_tokens, 4"),
    ({"min_tokens": 17}, "min_tokens", "16"),
    ({"min_tokens": -1}, "min_tokens", "-1"),
    ({"stop": ["a"] * 10_000}, "stop", "10000 entries; at most 16"),
    ({"stop": ["a", ""]}, "stop[1]", "1 to 256 characters"),
    ({"stop": "x" * 257}, "stop[0]", "1 to 256 characters"),
    ({"stop": [3]}, "stop[0]", "3"),
    ({"stop": 3}, "stop", "a list"),
    ({"stop_token_ids": [49152]}, "stop_token_ids[0]", "49152"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids", "65 entries"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]", "-1"),
    ({"allowed_token_ids": [5], "bad_token_ids": [5]}, "bad_token_ids", "left to sample"),
    ({"bad_words": ["a sentence of words"]}, "bad_words[0]", "more than one token"),
    ({"bad_words": [""]}, "bad_words[0]", "at least one character"),
    ({"bad_words": [7]}, "bad_words[0]", "7"),
    ({"logit_bias": {"5": 101}}, "logit_bias[5]", "101"),
    ({"logit_bias": {"49152": 1}}, "logit_bias", "49152"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "-1"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"),
    ({"logit_bias": {"²": 1}}, "logit_bias", "0 to 49151"),
    ({"logit_bias": [1]}, "logit_bias", "an object"),
    ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias", "1025 entries; at most 1024"),
    ({"ignore_eos": "yes"}, "ignore_eos", "true or false"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream true"),
    ({"stream": True, "stream_options": 3}, "stream_options", "an object"),
    ({"cache_salt": "x" * 257}, "cache_salt", "256 characters"),
    ({"cache_salt": 5}, "cache_salt", "5"),
    ({"priority": 2**31}, "priority", str(2**31)),
    ({"request_id": "a b"}, "request_id", "'a b'"),
    ({"request_id": "x" * 129}, "request_id", "1 to 128 characters"),
    ({"request_id": 7}, "request_id", "7"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "0"),
    ({"truncate_prompt_tokens": 2048}, "truncate_prompt_tokens", "2047"),
    ({"model": 7}, "model", "7"),
]
UNBUILT: list[tuple[dict[str, Any], str]] = [
    ({"best_of": 2}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
]
USER = {"role": "user", "content": "Hi"}
CHAT: list[tuple[dict[str, Any], str, str, str]] = [
    ({"messages": []}, "messages", "at least one", "invalid_argument"),
    ({"messages": "Hi"}, "messages", "a list", "invalid_argument"),
    ({"messages": [USER, 7]}, "messages[1]", "an object", "invalid_argument"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "is null;", "invalid_argument"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is null;", "invalid_argument"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "7", "invalid_argument"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}
            ]
        },
        "messages[0].content[0]",
        "takes none",
        "unimplemented",
    ),
    (
        {"messages": [{**USER, "tool_calls": [{"id": "x"}]}]},
        "messages[0].tool_calls",
        "not supported",
        "unimplemented",
    ),
    ({"tools": [{"type": "function"}]}, "tools", "not supported", "unimplemented"),
    ({"tool_choice": "required"}, "tool_choice", "not supported", "unimplemented"),
    ({"audio": {"voice": "x"}}, "audio", "not supported", "unimplemented"),
    ({"modalities": ["text", "audio"]}, "modalities", "only|not supported", "unimplemented"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema", "unimplemented"),
    ({"chat_template": "{{ x }}"}, "chat_template", "not supported", "unimplemented"),
    ({"echo": True}, "echo", "/v1/completions", "unimplemented"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs true", "invalid_argument"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21", "invalid_argument"),
    ({"logprobs": 5}, "logprobs", "true or false", "invalid_argument"),
    ({"max_completion_tokens": 5000}, "max_completion_tokens", "5000", "context_length_exceeded"),
    (
        {"chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs.messages",
        "overridden",
        "invalid_argument",
    ),
    ({"chat_template_kwargs": 3}, "chat_template_kwargs", "an object", "invalid_argument"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "exclude",
        "invalid_argument",
    ),
    (
        {"messages": [{"role": "user", "content": "x " * 3000}]},
        "messages",
        "2048 tokens",
        "context_length_exceeded",
    ),
]


async def refused(served: Served, path: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    started = time.monotonic()
    answer = await served.http.post(path, content=json.dumps(body))
    assert time.monotonic() - started < 1
    assert answer.status_code == status, answer.text[:500]
    assert len(answer.content) < 1000
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert served.scheduler.submits == []
    return error


async def test_completions(served: Served) -> None:
    for change, param, mention in COMPLETIONS:
        error = await refused(served, "/v1/completions", {"prompt": "Hi", **change})
        assert error["param"] == param, (change, error)
        assert mention in error["message"], error
        assert error["type"] == "invalid_request_error"
        # The message can be read alone.
        assert param.split("[")[0] in error["message"] or "context" in error["message"]


async def test_features_that_are_not_built_are_refused_by_name(served: Served) -> None:
    for change, param in UNBUILT:
        error = await refused(served, "/v1/completions", {"prompt": "Hi", **change})
        assert (error["param"], error["code"]) == (param, "unimplemented"), error
        assert param in error["message"]


async def test_chats(served: Served) -> None:
    for change, param, mention, code in CHAT:
        error = await refused(served, "/v1/chat/completions", {"messages": [USER], **change})
        assert (error["param"], error["code"]) == (param, code), (change, error)
        assert any(part in error["message"] for part in mention.split("|")), error


async def test_unknown_models(served: Served) -> None:
    body = {"model": "no-such-model", "prompt": "x", "messages": [USER], "tokens": [1]}
    for path in POSTED:
        error = await refused(served, path, body, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "no-such-model" in error["message"] and "test-model" in error["message"]


POSTED = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
BROKEN = [
    b"",
    b"{",
    b"[]",
    b'"text"',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
]


async def test_bodies_that_are_no_json_objects(served: Served) -> None:
    for path in POSTED:
        for content in BROKEN:
            answer = await served.http.post(path, content=content)
            assert answer.status_code == 400, content[:40]
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert answer.json()["error"]["param"] == "body"


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        (b'{"temperature": NaN, "prompt": "x"}', "temperature", "NaN"),
        (b'{"top_p": -Infinity, "prompt": "x"}', "top_p", "-Infinity"),
        (b'{"logit_bias": {"7": 1e999}, "prompt": "x"}', "logit_bias.7", "Infinity"),
        (b'{"nested": [0, {"unknown": NaN}]}', "nested[1].unknown", "NaN"),
    ],
)
async def test_a_number_that_is_none_is_named(served: Served, body: bytes, field: str, value: str) -> None:
    for path in POSTED:
        answer = await served.http.post(path, content=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == field
        assert f"is {value}; it must be a finite number" in error["message"]


@pytest.mark.parametrize("name", ["guided_json", "structured_outputs"])
async def test_an_empty_object_is_no_way_past_a_refusal(served: Served, name: str) -> None:
    answer = await served.http.post("/v1/completions", json={"prompt": "x", name: {}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


async def chunks(count: int) -> Any:
    for _ in range(count):
        yield b"x" * 2**16


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit(serve: Serve, chunked: bool) -> None:
    served = await serve(limits=Limits(max_body_bytes=100_000))
    content = chunks(160) if chunked else b"x" * 10_000_000
    started = time.monotonic()
    answer = await served.http.post("/v1/completions", content=content)
    assert time.monotonic() - started < 1
    assert answer.status_code == 413
    assert "100000" in answer.json()["error"]["message"]
    assert (await served.http.get("/health")).status_code == 200


async def test_heads_without_end_are_refused(served: Served) -> None:
    port = int(served.base_url.rsplit(":", 1)[1])
    whole = b"GET /version HTTP/1.1\r\nx: " + b"x" * 200_000 + b"\r\n\r\n"
    for head in (b"GET /" + b"x" * 500_000, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 50_000, whole):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        async with asyncio.timeout(20):
            # To the end: it is closed in order, not reset.
            answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 431")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["param"] == "headers"
    under = await served.http.get("/version", headers={"x": "x" * 60_000})
    assert under.status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: many",
        b"content-length: -1",
        b"content-length: 1\r\ncontent-length: 2",
        b"no colon",
        b"a b: c",
    ],
)
async def test_what_is_no_http_is_refused_as_json(served: Served, head: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.base_url.rsplit(":", 1)[1]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n\r\n{}")
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400") and b"content-type: application/json" in answer
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert (error["param"], error["type"]) == ("headers", "invalid_request_error")


async def test_clients_that_send_too_slowly_are_left(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.2)
    served = await serve(limits=Limits(body_timeout_s=0.2))
    port = int(served.base_url.rsplit(":", 1)[1])
    whole = b"GET /version HTTP/1.1\r\n\r\n"
    for sent, answered in (
        (whole + b"GET / HT", b"HTTP/1.1 200"),
        (b"GET / HT", b""),
        (b"POST /tokenize HTTP/1.1\r\ncontent-length: 9\r\n\r\n{", b"HTTP/1.1 408"),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        async with asyncio.timeout(2):
            answer = await reader.read()
        writer.close()
        assert answer.startswith(answered) and bool(answer) == bool(answered)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted((fields.COMMON | fields.CHAT | fields.REFUSED | {"prompt"}) - {"messages"})


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_no_json_value_breaks_the_validator(smollm2: TextModel, values: dict[str, Any]) -> None:
    """Whatever the values are, the answer is a checked job or a KvernError that names a field."""
    gateway = _gateway(smollm2)
    scope = {"path": "/v1/completions", "headers": []}
    try:
        job = asyncio.run(parse_completion(gateway, scope, b"", {"prompt": "Hi", **values}))
    except KvernError as error:
        assert error.field
        assert len(error.message) < 1000
        return
    for prompt in job.prompts:
        params = prompt.params
        assert 0 < len(prompt.token_ids) < 2048
        assert all(0 <= token_id < 49152 for token_id in prompt.token_ids)
        assert 1 <= params.max_tokens <= 2048 - len(prompt.token_ids)
        assert params.min_tokens <= params.max_tokens
        assert 0 <= params.temperature <= 100 and 0 < params.top_p <= 1 and 0 <= params.min_p <= 1
        assert 0 <= params.top_k <= 49152
    assert 1 <= job.routing.n <= 128


def _gateway(model: TextModel, made: list[Gateway] = []) -> Gateway:  # noqa: B006 - built once
    if not made:
        client = SchedulerClient(["127.0.0.1:1"], gateway_id="x")
        client.welcome = FakeScheduler().welcome
        made.append(Gateway(model, client))
    return made[0]


async def test_unknown_fields_are_ignored_and_logged_once(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": "Hi", "max_tokens": 1, "surely_unknown_7": {"a": 1}, "user": "me", "tools": []}
    for _ in range(2):
        assert (await served.http.post("/v1/completions", json=body)).status_code == 200
    lines = [record.message for record in caplog.records if "unknown request field" in record.message]
    assert lines == ["unknown request field ignored: 'surely_unknown_7'"]


async def test_wrong_paths_and_methods(served: Served) -> None:
    answer = await served.http.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "path")
    answer = await served.http.get("/v1/completions")
    assert (answer.status_code, answer.json()["error"]["param"]) == (405, "method")


async def test_detokenize_checks_ids(served: Served) -> None:
    error = await refused(served, "/detokenize", {"tokens": [1, 49152]})
    assert error["param"] == "tokens[1]"
    error = await refused(served, "/detokenize", {"tokens": "x"})
    assert error["param"] == "tokens"


async def test_request_ids_are_echoed_only_when_they_are_some(served: Served) -> None:
    for sent, echoed in (("trace-1", "trace-1"), ("a b", None), ("x" * 200, None)):
        answer = await served.http.get("/version", headers={"X-Request-Id": sent})
        assert answer.headers.get("x-request-id") == echoed
    body = {"prompt": "Hi", "max_tokens": 1}
    answer = await served.http.post("/v1/completions", json=body, headers={"X-Request-Id": "trace-1"})
    assert answer.headers["x-request-id"] == "trace-1"
    # It traces; it does not name the request, since services pass one id on to many calls.
    assert served.scheduler.submits[-1].request_id != "trace-1"
    assert not served.scheduler.submits[-1].resumable


async def test_a_request_id_used_twice_with_another_body(served: Served) -> None:
    body = {"prompt": "Hi", "max_tokens": 2, "request_id": "once"}
    first = await served.http.post("/v1/completions", json=body)
    again = await served.http.post("/v1/completions", json=body)
    assert again.json()["choices"] == first.json()["choices"]
    other = await served.http.post("/v1/completions", json=body | {"prompt": "Ho"})
    assert other.status_code == 409
    assert other.json()["error"]["code"] == "request_id_conflict"


# gRPC: the same validator, its own spelling.


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": sampling_pb2.SamplingParams(**fields)}


def ids(*values: int) -> dict[str, Any]:
    return {"prompt": None, "prompt_token_ids": generation_pb2.TokenIds(ids=values)}


INVALID = error_pb2.ERROR_CODE_INVALID_ARGUMENT
GRPC: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "input", "no input"),
    ({"prompt": ""}, "prompt", "at least one token"),
    (ids(), "prompt_token_ids", "at least one token"),
    (ids(1, 49152), "prompt_token_ids[1]", "49152"),
    (ids(1, 2**32 - 1), "prompt_token_ids[1]", str(2**32 - 1)),
    ({"prompt": None, "chat": generation_pb2.ChatInput()}, "chat.messages", "at least one"),
    (
        {
            "prompt": None,
            "chat": generation_pb2.ChatInput(
                messages=[generation_pb2.ChatMessage(role="user", content="x")], template_kwargs_json="{"
            ),
        },
        "chat.template_kwargs_json",
        "not valid JSON",
    ),
    (sampling(temperature=float("nan")), "sampling.temperature", "NaN"),
    (sampling(temperature=float("inf")), "sampling.temperature", "Infinity"),
    (sampling(top_p=float("nan")), "sampling.top_p", "NaN"),
    (sampling(top_p=0), "sampling.top_p", "above 0"),
    (sampling(min_p=1.5), "sampling.min_p", "1.5"),
    (sampling(repetition_penalty=float("-inf")), "sampling.repetition_penalty", "-Infinity"),
    (sampling(logprobs=21), "sampling.logprobs", "21"),
    (sampling(prompt_logprobs=21), "sampling.prompt_logprobs", "21"),
    (sampling(max_tokens=0), "sampling.max_tokens", "0"),
    (sampling(min_tokens=5, max_tokens=4), "sampling.min_tokens", "at most max_tokens, 4"),
    (sampling(min_tokens=3000), "sampling.min_tokens", "3000"),
    (sampling(stop_token_ids=[49152]), "sampling.stop_token_ids[0]", "49152"),
    (sampling(bad_token_ids=[49152]), "sampling.bad_token_ids[0]", "49152"),
    (sampling(logit_bias={5: float("nan")}), "sampling.logit_bias[5]", "NaN"),
    (sampling(logit_bias={49152: 1}), "sampling.logit_bias", "49152"),
    ({"n": 129}, "n", "129"),
    ({"stop": ["x"] * 10_000}, "stop", "10000"),
    ({"request_id": "a b"}, "request_id", "'a b'"),
    ({"cache_salt": "x" * 300}, "cache_salt", "256"),
]


async def grpc_error(
    served: Served, request: generation_pb2.GenerateRequest
) -> tuple[grpc.StatusCode, KvernError]:
    stub = generation_pb2_grpc.GenerationServiceStub(served.channel)
    started = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in stub.Generate(request):
            pass
    assert time.monotonic() - started < 1
    return raised.value.code(), error_from_rpc(raised.value)


async def test_grpc(served: Served) -> None:
    for change, field, mention in GRPC:
        fields = {key: value for key, value in {"prompt": "Hi", **change}.items() if value is not None}
        status, error = await grpc_error(served, generation_pb2.GenerateRequest(**fields))
        assert status is grpc.StatusCode.INVALID_ARGUMENT, (change, error)
        assert (error.code, error.field) == (INVALID, field), (change, error.message)
        assert mention in error.message, error.message
        assert error.limit or "input" in error.message, error.message
    assert served.scheduler.submits == []


async def test_grpc_statuses(served: Served) -> None:
    status, error = await grpc_error(served, generation_pb2.GenerateRequest(prompt="x", model="other"))
    assert (status, error.field) == (grpc.StatusCode.NOT_FOUND, "model")
    long = generation_pb2.GenerateRequest(prompt_token_ids=generation_pb2.TokenIds(ids=[1] * 2048))
    status, error = await grpc_error(served, long)
    assert error.code == error_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED
    served.scheduler.refuse = KvernError(error_pb2.ERROR_CODE_OVERLOADED, "full", retry_after_ms=70)
    status, error = await grpc_error(served, generation_pb2.GenerateRequest(prompt="x"))
    assert (status, error.retry_after_ms) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 70)


@pytest.fixture(autouse=True)
def unknown_fields_are_forgotten() -> Iterator[None]:
    parse._logged_unknown.clear()
    yield
