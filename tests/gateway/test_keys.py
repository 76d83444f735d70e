"""API keys on both surfaces, in front of a fake scheduler that records what it is told."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from gateway.conftest import LONG, Serve, Served

from kvern.errors import KvernError
from kvern.rpc.errors import error_from_rpc
from kvern.v1 import generation_pb2, generation_pb2_grpc
from kvern_gateway import keys as keys_module
from kvern_gateway.keys import KeyFileError, Keys, current


@pytest.fixture(autouse=True)
def _nobody_afterwards() -> Iterator[None]:
    """Tests that call `enter` themselves do it in the context that later tests share."""
    yield
    keys_module._current.set(keys_module._anybody)


BODY = {"prompt": "x", "max_tokens": 3}


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def write(path: Path, **tenants: dict[str, Any]) -> Path:
    """Each tenant's key is its name in capitals."""
    path.write_text("".join(_lines(name, more) for name, more in tenants.items()))
    return path


def _lines(name: str, more: dict[str, Any]) -> str:
    return f"- name: {name}\n  sha256: {digest(name.upper())}\n" + "".join(
        f"  {key}: {value}\n" for key, value in more.items()
    )


@pytest.fixture
async def guarded(serve: Serve, tmp_path: Path) -> Served:
    keys = write(tmp_path / "keys.yaml", a={"max_concurrent_requests": 1, "priority": 5}, b={})
    return await serve(keys=Keys(["plain"], keys))


async def generate(served: Served, secret: str | None) -> list[generation_pb2.GenerateResponse]:
    metadata = (("authorization", f"Bearer {secret}"),) if secret else ()
    stub = generation_pb2_grpc.GenerationServiceStub(served.channel)
    request = generation_pb2.GenerateRequest(prompt="x")
    request.sampling.max_tokens = 3
    return [event async for event in stub.Generate(request, metadata=metadata)]


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Basic x"}, {"Authorization": "Bearer"}, bearer("a"), bearer("wrong")]
)
async def test_a_request_without_a_key_is_refused_and_costs_nothing(
    guarded: Served, headers: dict[str, str]
) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        answer = await guarded.http.post(path, json=BODY, headers=headers)
        assert answer.status_code == 401
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("authentication_error", "authorization")
    assert (await guarded.http.get("/v1/models", headers=headers)).status_code == 401
    assert not guarded.scheduler.submits


async def test_who_watches_the_service_needs_none(guarded: Served) -> None:
    for path in ("/health", "/metrics", "/version"):
        assert (await guarded.http.get(path)).status_code == 200


async def test_grpc_takes_the_same_keys(guarded: Served) -> None:
    for secret in (None, "wrong"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(guarded, secret)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert error_from_rpc(caught.value).field == "authorization"
    with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
        await generation_pb2_grpc.GenerationServiceStub(guarded.channel).ListModels(
            generation_pb2.ListModelsRequest()
        )
    assert (await generate(guarded, "B"))[-1].HasField("finished")
    assert guarded.scheduler.submits[-1].tenant == "b"


async def test_a_tenant_has_its_own_names_and_prefixes(guarded: Served) -> None:
    for secret in ("A", "B", "plain"):
        answer = await guarded.http.post(
            "/v1/completions",
            json={**BODY, "prompt": "word " * 40, "cache_salt": "s"},
            headers=bearer(secret),
        )
        assert answer.status_code == 200, answer.text
    submits = guarded.scheduler.submits
    assert [(s.tenant, s.cache_salt, s.priority) for s in submits] == [
        ("a", "a/s", 5),
        ("b", "b/s", 0),
        ("default", "default/s", 0),
    ]
    assert len({s.block_hashes for s in submits}) == 3


async def test_another_tenant_can_neither_read_nor_cancel(guarded: Served) -> None:
    guarded.scheduler.paused.clear()
    streaming = asyncio.create_task(
        guarded.http.post("/v1/completions", json={**LONG, "request_id": "mine"}, headers=bearer("A"))
    )
    stub = generation_pb2_grpc.GenerationServiceStub(guarded.channel)
    while not guarded.scheduler.submits:
        await asyncio.sleep(0.01)
    cancel = generation_pb2.CancelRequest(request_id="mine")
    assert not (await stub.Cancel(cancel, metadata=(("authorization", "Bearer B"),))).cancelled
    assert (await stub.Cancel(cancel, metadata=(("authorization", "Bearer A"),))).cancelled
    await streaming


async def test_a_key_has_its_share_of_a_gateway(guarded: Served) -> None:
    guarded.scheduler.paused.clear()
    first = asyncio.create_task(guarded.http.post("/v1/completions", json=LONG, headers=bearer("A")))
    while not guarded.scheduler.submits:
        await asyncio.sleep(0.01)
    second = await guarded.http.post("/v1/completions", json=BODY, headers=bearer("A"))
    assert second.status_code == 429
    assert second.headers["retry-after"] == "1"
    assert "1 requests running, its limit" in second.json()["error"]["message"]
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    guarded.scheduler.paused.set()
    for _ in range(100):
        answer = await guarded.http.post("/v1/completions", json=BODY, headers=bearer("A"))
        if answer.status_code == 200:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("what ended still counts")


def test_requests_by_the_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    keys = Keys(path=write(tmp_path / "keys", a={"max_requests_per_minute": 2}))
    keys.enter("Bearer A")
    for _ in range(2):
        with current().asking():
            pass
    with pytest.raises(KvernError, match="2 times a minute") as caught, current().asking():
        pass
    assert 29_000 < caught.value.retry_after_ms < 31_000
    now += 30.1
    with current().asking():
        pass


async def test_keys_are_added_and_withdrawn_while_it_runs(guarded: Served, tmp_path: Path) -> None:
    async def status(secret: str) -> int:
        answer = await guarded.http.post("/v1/completions", json=BODY, headers=bearer(secret))
        return answer.status_code

    assert (await status("B"), await status("C")) == (200, 401)
    write(tmp_path / "keys.yaml", a={}, c={})
    for _ in range(200):
        if await status("C") == 200:
            break
        await asyncio.sleep(0.02)
    assert (await status("B"), await status("C"), await status("plain")) == (401, 200, 200)


def test_a_wrong_file_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", a={})
    keys = Keys(path=path)
    path.write_text("{")
    assert keys.changed()
    with pytest.raises(KeyFileError):
        keys.reload()
    assert not keys.changed()
    keys.enter("Bearer A")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "is not YAML"),
        ("a: b", "must hold a list of keys"),
        ("- secret", "key 1: it must have name and sha256"),
        (f"- name: a b\n  sha256: {digest('x')}", "key 1: its name must be"),
        ("- name: a\n  sha256: 12", "key 1 (a): sha256 must be 64 hexadecimal digits"),
        (f"- name: a\n  sha256: {digest('x')}\n  key: S3CRET", "key is unknown"),
        (f"- name: a\n  sha256: {digest('x')}\n  max_concurrent_requests: -1", "whole number from 0"),
        (f"- name: default\n  sha256: {digest('x')}", "kept for keys without a file"),
        (
            f"- name: a\n  sha256: {digest('x')}\n- name: a\n  sha256: {digest('y')}\n  priority: 1",
            "different",
        ),
    ],
)
def test_wrong_files_are_named_and_not_quoted(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(KeyFileError) as caught:
        Keys(path=path)
    assert complaint in str(caught.value)
    assert str(path) in str(caught.value)
    assert "S3CRET" not in str(caught.value)
