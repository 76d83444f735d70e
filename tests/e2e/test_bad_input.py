"""Wrong input gets a typed error within a second, and its neighbours' tokens do not change."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from e2e.running import Running, Stream, run_kvern

from kvern.rpc.errors import ERROR_TRAILER
from kvern.v1 import error_pb2, generation_pb2, generation_pb2_grpc, sampling_pb2

NEIGHBOUR = {
    "prompt": "The mill grinds",
    "temperature": 0,
    "max_tokens": 600,
    "ignore_eos": True,
    "stream": True,
}
ANSWER_S = 1.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    flags = ("--device", "sim", "--sim-step-us", "10000", "--max-model-len", "1024")
    with run_kvern(tmp_path_factory.mktemp("bad"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def expected(served: Running) -> str:
    return Stream(served.base_url, NEIGHBOUR).result()


@pytest.fixture(scope="module")
def neighbour(served: Running, expected: str) -> Iterator[None]:
    """A stream beside all of the module's bad requests, renewed as it ends, compared at the end."""
    stopping = threading.Event()
    texts: list[str] = []

    def keep_streaming() -> None:
        while not stopping.is_set():
            texts.append(Stream(served.base_url, NEIGHBOUR).result())

    thread = threading.Thread(target=keep_streaming)
    thread.start()
    yield
    stopping.set()
    thread.join(60)
    assert texts
    assert set(texts) == {expected}


HTTP_CASES: list[tuple[str, dict[str, Any], int, str]] = [
    ("empty prompt", {"prompt": ""}, 400, "prompt"),
    ("empty token prompt", {"prompt": []}, 400, "prompt"),
    ("prompt over the context", {"prompt": [300] * 1025}, 400, "1024"),
    ("token id over the vocabulary", {"prompt": [300, 10_000_000]}, 400, "10000000"),
    ("negative token id", {"prompt": [300, -1]}, 400, "-1"),
    ("negative temperature", {"temperature": -0.5}, 400, "temperature"),
    ("temperature over the limit", {"temperature": 1e9}, 400, "temperature"),
    ("top_p of 0", {"top_p": 0}, 400, "top_p"),
    ("top_p over 1", {"top_p": 1.5}, 400, "top_p"),
    ("top_k below -1", {"top_k": -2}, 400, "top_k"),
    ("min_p over 1", {"min_p": 2}, 400, "min_p"),
    ("presence_penalty over 2", {"presence_penalty": 3}, 400, "presence_penalty"),
    ("repetition_penalty of 0", {"repetition_penalty": 0}, 400, "repetition_penalty"),
    ("n of 0", {"n": 0}, 400, "n"),
    ("n over the limit", {"n": 129}, 400, "128"),
    ("logprobs over the limit", {"logprobs": 21}, 400, "20"),
    ("min_tokens over max_tokens", {"min_tokens": 9, "max_tokens": 4}, 400, "min_tokens"),
    ("max_tokens of 0", {"max_tokens": -1}, 400, "max_tokens"),
    ("10,000 stop strings", {"stop": [f"s{index}" for index in range(10_000)]}, 400, "stop"),
    ("a wrong type", {"max_tokens": "many"}, 400, "max_tokens"),
    ("unknown model", {"model": "no-such-model"}, 404, "no-such-model"),
    ("a feature that is not there", {"structured_outputs": {"json": {}}}, 400, "structured_outputs"),
]


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize(
    ("body", "status", "mention"), [case[1:] for case in HTTP_CASES], ids=[c[0] for c in HTTP_CASES]
)
def test_http(served: Running, body: dict[str, Any], status: int, mention: str) -> None:
    started = time.monotonic()
    answer = served.client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 4, **body})
    assert time.monotonic() - started < ANSWER_S
    assert answer.status_code == status, answer.text[:500]
    error = answer.json()["error"]
    assert mention in error["message"] or mention == error["param"], error
    assert error["type"]
    assert len(answer.text) < 2000


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"prompt": "Hi", "temperature": NaN}', 400),
        (b'{"prompt": "Hi", "max_tokens": 4', 400),
        (b'{"prompt": "\xff\xfe", "max_tokens": 4}', 400),
        (b"[]", 400),
        (b"", 400),
        (json.dumps({"prompt": "x" * 10_000_000}).encode(), 413),
    ],
    ids=["NaN", "cut JSON", "invalid UTF-8", "no object", "nothing", "10 MB"],
)
def test_http_bytes(served: Running, content: bytes, status: int) -> None:
    started = time.monotonic()
    headers = {"Content-Type": "application/json"}
    answer = served.client.post("/v1/completions", content=content, headers=headers)
    assert time.monotonic() - started < ANSWER_S
    assert answer.status_code == status, answer.text[:500]
    assert answer.json()["error"]["message"]


@pytest.mark.usefixtures("neighbour")
def test_a_request_id_with_another_body_is_refused(served: Running) -> None:
    body = {"prompt": "Hi", "max_tokens": 4, "temperature": 0, "request_id": "twice-with-another-body"}
    first = served.client.post("/v1/completions", json=body)
    assert first.status_code == 200
    started = time.monotonic()
    second = served.client.post("/v1/completions", json=body | {"prompt": "Ho"})
    assert time.monotonic() - started < ANSWER_S
    assert second.status_code == 409, second.text
    assert second.json()["error"]["param"] == "request_id"


def _sampling(**fields: Any) -> Callable[[generation_pb2.GenerateRequest], None]:
    def change(request: generation_pb2.GenerateRequest) -> None:
        request.sampling.MergeFrom(sampling_pb2.SamplingParams(**fields))

    return change


def _field(**fields: Any) -> Callable[[generation_pb2.GenerateRequest], None]:
    def change(request: generation_pb2.GenerateRequest) -> None:
        request.MergeFrom(generation_pb2.GenerateRequest(**fields))

    return change


def _ids(*ids: int) -> Callable[[generation_pb2.GenerateRequest], None]:
    return _field(prompt_token_ids=generation_pb2.TokenIds(ids=ids))


INVALID = error_pb2.ERROR_CODE_INVALID_ARGUMENT
GRPC_CASES: list[tuple[str, Callable[[generation_pb2.GenerateRequest], None], int]] = [
    ("empty prompt", _field(prompt=""), INVALID),
    ("prompt over the context", _ids(*[300] * 1025), error_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED),
    ("token id over the vocabulary", _ids(300, 10_000_000), INVALID),
    ("NaN temperature", _sampling(temperature=float("nan")), INVALID),
    ("infinite temperature", _sampling(temperature=float("inf")), INVALID),
    ("NaN top_p", _sampling(top_p=float("nan")), INVALID),
    ("top_p over 1", _sampling(top_p=1.5), INVALID),
    ("NaN logit bias", _sampling(logit_bias={5: float("nan")}), INVALID),
    ("logit bias of no token", _sampling(logit_bias={10_000_000: 1.0}), INVALID),
    ("n over the limit", _field(n=129), INVALID),
    ("logprobs over the limit", _sampling(logprobs=21), INVALID),
    ("min_tokens over max_tokens", _sampling(min_tokens=9, max_tokens=4), INVALID),
    ("10,000 stop strings", _field(stop=[f"s{index}" for index in range(10_000)]), INVALID),
    ("unknown model", _field(model="no-such-model"), error_pb2.ERROR_CODE_MODEL_NOT_FOUND),
    ("a bad request id", _field(request_id="with space"), INVALID),
]


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize(
    ("change", "code"), [case[1:] for case in GRPC_CASES], ids=[case[0] for case in GRPC_CASES]
)
def test_grpc(served: Running, change: Callable[[generation_pb2.GenerateRequest], None], code: int) -> None:
    request = generation_pb2.GenerateRequest(prompt="Hi", sampling=sampling_pb2.SamplingParams(max_tokens=4))
    change(request)
    with grpc.insecure_channel(served.grpc_address) as channel:
        generation = generation_pb2_grpc.GenerationServiceStub(channel)
        grpc.channel_ready_future(channel).result(5)
        started = time.monotonic()
        with pytest.raises(grpc.RpcError) as raised:
            list(generation.Generate(request, timeout=10))
        assert time.monotonic() - started < ANSWER_S
    trailers = dict(raised.value.trailing_metadata())  # type: ignore[attr-defined]
    error = error_pb2.Error.FromString(trailers[ERROR_TRAILER])
    assert error.code == code, error
    assert error.message
    assert error.field


@pytest.mark.usefixtures("neighbour")
def test_a_broken_protobuf_is_refused(served: Running) -> None:
    with grpc.insecure_channel(served.grpc_address) as channel:
        call = channel.unary_stream("/kvern.v1.GenerationService/Generate")
        with pytest.raises(grpc.RpcError) as raised:
            list(call(b"\xff\xff\xff", timeout=10))
    assert raised.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
