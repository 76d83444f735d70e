"""Embeddings as clients ask for them: the OpenAI SDK, gRPC, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import grpc
import numpy as np
import pytest
from gateway.conftest import Serve, Served
from gateway.fake_scheduler import FakeScheduler, until

from kvern.errors import KvernError
from kvern.rpc.errors import error_from_rpc
from kvern.rpc.packing import unpack_i32
from kvern.v1 import error_pb2, generation_pb2, generation_pb2_grpc, model_pb2, session_pb2
from kvern_gateway.limits import Limits
from kvern_gateway.text.tokenizer import TextModel

SIZE = 6


def vector(submit: session_pb2.Submit) -> list[float]:
    """Depends on the prompt."""
    ids = unpack_i32(submit.prompt_token_ids)
    return [float(ids.size + i + ids[0] % 7) for i in range(SIZE)]


def of(ids: list[int], dimensions: int = SIZE) -> list[float]:
    raw = np.array([len(ids) + i + ids[0] % 7 for i in range(dimensions)], np.float64)
    return list(raw / np.linalg.norm(raw))


def embedder(**pooling: Any) -> FakeScheduler:
    scheduler = FakeScheduler(max_model_len=64)
    scheduler.embed = vector
    values = {"kind": model_pb2.POOLING_KIND_MEAN, "size": SIZE, "normalized": True, "bidirectional": True}
    scheduler.welcome.model.pooling.CopyFrom(model_pb2.Pooling(**{**values, **pooling}))
    return scheduler


async def test_the_openai_sdk(serve: Serve, smollm2: TextModel) -> None:
    served = await serve(embedder())
    texts = ["One text", "and another one"]
    ids = [smollm2.encode(text, True) for text in texts]
    async with served.openai() as client:
        answer = await client.embeddings.create(model="test-model", input=texts)  # base64, unasked
        floats = await client.embeddings.create(model="test-model", input=texts[0], encoding_format="float")
        by_ids = await client.embeddings.create(model="test-model", input=[[5, 6, 7], [8]])
        one = await client.embeddings.create(model="test-model", input=[5, 6, 7])
    assert [entry.index for entry in answer.data] == [0, 1]
    for entry, tokens in zip(answer.data, ids, strict=True):
        np.testing.assert_allclose(entry.embedding, of(tokens), rtol=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    np.testing.assert_allclose(floats.data[0].embedding, of(ids[0]), rtol=1e-6)
    np.testing.assert_allclose(by_ids.data[1].embedding, of([8]), rtol=1e-6)
    assert one.data[0].embedding == by_ids.data[0].embedding
    for submit in served.scheduler.submits:
        assert (submit.pooling, submit.params.max_tokens, submit.block_hashes) == (True, 0, b"")


async def test_shorter_vectors_where_the_model_has_them(serve: Serve) -> None:
    served = await serve(embedder(truncatable=True, sizes=[2, 4]))
    async with served.openai() as client:
        answer = await client.embeddings.create(model="test-model", input=[5], dimensions=4)
        np.testing.assert_allclose(answer.data[0].embedding, of([5], 4), rtol=1e-6)
    error = await refused(served, {"input": "x", "dimensions": 3})
    assert (error["param"], "one of 2, 4" in error["message"]) == ("dimensions", True)


async def test_base64_is_float32_as_it_came(serve: Serve) -> None:
    served = await serve(embedder(normalized=False))
    answer = await served.http.post("/v1/embeddings", json={"input": [5], "encoding_format": "base64"})
    packed = base64.b64decode(answer.json()["data"][0]["embedding"])
    assert np.frombuffer(packed, "<f4").tolist() == [1.0 + i + 5 for i in range(SIZE)]


async def test_grpc(serve: Serve, smollm2: TextModel) -> None:
    served = await serve(embedder())
    stub = generation_pb2_grpc.GenerationServiceStub(served.channel)
    inputs = [
        generation_pb2.EmbedInput(text="One text"),
        generation_pb2.EmbedInput(token_ids=generation_pb2.TokenIds(ids=[5, 6, 7])),
    ]
    answer = await stub.Embed(generation_pb2.EmbedRequest(inputs=inputs))
    ids = smollm2.encode("One text", True)
    np.testing.assert_allclose(answer.embeddings[0].values, of(ids), rtol=1e-6)
    np.testing.assert_allclose(answer.embeddings[1].values, of([5, 6, 7]), rtol=1e-6)
    assert (answer.model, answer.num_prompt_tokens) == ("test-model", len(ids) + 3)
    for request, field, mention in (
        (generation_pb2.EmbedRequest(), "inputs", "at least one"),
        (generation_pb2.EmbedRequest(inputs=inputs, dimensions=7), "dimensions", "1 to 6"),
        (generation_pb2.EmbedRequest(inputs=inputs, dimensions=3), "dimensions", "not trained for shorter"),
        (
            generation_pb2.EmbedRequest(inputs=[generation_pb2.EmbedInput()]),
            "inputs[0]",
            "at least one token",
        ),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Embed(request)
        error = error_from_rpc(raised.value)
        assert (error.field, mention in error.message) == (field, True), error.message


async def refused(served: Served, body: dict[str, Any], path: str = "/v1/embeddings") -> dict[str, Any]:
    answer = await served.http.post(path, content=json.dumps(body))
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


WRONG: list[tuple[dict[str, Any], str, str, str]] = [
    ({"input": None}, "input", "missing", "invalid_argument"),
    ({"input": ""}, "input", "at least one token", "invalid_argument"),
    ({"input": []}, "input", "at least one token", "invalid_argument"),
    ({"input": ["a", ""]}, "input[1]", "at least one token", "invalid_argument"),
    ({"input": [[1], []]}, "input[1]", "at least one token", "invalid_argument"),
    ({"input": 7}, "input", "a string, a list of token ids", "invalid_argument"),
    ({"input": {"a": 1}}, "input", "a string", "invalid_argument"),
    ({"input": ["a", 7]}, "input[1]", "a string or a list", "invalid_argument"),
    ({"input": [1, 49152]}, "input[1]", "0 to 49151", "invalid_argument"),
    ({"input": [1, True]}, "input[1]", "is true", "invalid_argument"),
    ({"input": ["a"] * 9}, "input", "9 entries; at most 8", "invalid_argument"),
    ({"input": [1] * 65}, "input", "65 tokens", "context_length_exceeded"),
    ({"input": "x" * 7_000}, "input", "7000 characters", "context_length_exceeded"),
    ({"encoding_format": "int8"}, "encoding_format", '"float" or "base64"', "invalid_argument"),
    ({"encoding_format": 3}, "encoding_format", "is 3", "invalid_argument"),
    ({"dimensions": 0}, "dimensions", "1 to 6", "invalid_argument"),
    ({"dimensions": 7}, "dimensions", "1 to 6", "invalid_argument"),
    ({"dimensions": "4"}, "dimensions", "1 to 6", "invalid_argument"),
    ({"dimensions": 4}, "dimensions", "test-model was not trained for shorter vectors", "unimplemented"),
    ({"priority": 2**31}, "priority", str(2**31), "invalid_argument"),
    ({"request_id": "a"}, "request_id", "not supported", "unimplemented"),
    ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens", "not supported", "unimplemented"),
    ({"messages": [{"role": "user", "content": "x"}]}, "messages", "not supported", "unimplemented"),
]


async def test_wrong_requests(serve: Serve) -> None:
    served = await serve(embedder(), Limits(max_embedding_inputs=8))
    for change, param, mention, code in WRONG:
        error = await refused(served, {"input": "x", **change})
        assert (error["param"], error["code"]) == (param, code), (change, error)
        assert mention in error["message"], error
    assert served.scheduler.submits == []


async def test_models_that_do_the_other_thing_refuse_by_name(serve: Serve, served: Served) -> None:
    error = await refused(served, {"input": "x"})
    assert (error["param"], error["code"]) == ("model", "unimplemented")
    assert "test-model generates" in error["message"] and "--runner pooling" in error["message"]
    encoder = await serve(embedder())
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        error = await refused(encoder, body, path)
        assert (error["param"], "test-model gives embeddings" in error["message"]) == ("model", True)
    stub = generation_pb2_grpc.GenerationServiceStub(encoder.channel)
    with pytest.raises(grpc.aio.AioRpcError, match="gives embeddings"):
        async for _ in stub.Generate(generation_pb2.GenerateRequest(prompt="x")):
            pass


async def test_one_that_fails_ends_the_others(serve: Serve) -> None:
    scheduler = embedder()
    scheduler.ends_with = KvernError(error_pb2.ERROR_CODE_NUMERICAL, "NaN somewhere")
    served = await serve(scheduler)
    answer = await served.http.post("/v1/embeddings", json={"input": [[5], [6]]})
    assert (answer.status_code, "NaN somewhere" in answer.text) == (500, True)
    scheduler.ends_with = None
    scheduler.refuse = KvernError(error_pb2.ERROR_CODE_OVERLOADED, "full", retry_after_ms=70)
    answer = await served.http.post("/v1/embeddings", json={"input": [[5], [6]]})
    assert answer.status_code == 429
    assert len(served.gateway.client.requests) == 0


@pytest.mark.parametrize("leave", ["close", "drop"])
async def test_lost_clients_and_lost_sessions(serve: Serve, leave: str) -> None:
    scheduler = embedder()
    scheduler.paused.clear()
    served = await serve(scheduler)
    asking = asyncio.create_task(served.http.post("/v1/embeddings", json={"input": [[5], [6, 7]]}))
    await until(lambda: len(scheduler.submits) == 2)
    if leave == "close":
        asking.cancel()
        await until(lambda: len(scheduler.cancels) == 2)
        assert len(served.gateway.client.requests) == 0
        return
    scheduler.drop_sessions()
    await until(lambda: scheduler.num_sessions == 2)
    scheduler.paused.set()
    data = (await asking).json()["data"]
    np.testing.assert_allclose(data[1]["embedding"], of([6, 7]), rtol=1e-6)
