"""Adapters of a cell: loaded by all its workers, committed, told to gateways, and there for the next leader."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
from scheduler.scheduler_harness import SIM, Cluster, Gateway, make_submit

from kvern.block_hash import adapter_keys, hash_prompt, join_hashes
from kvern.errors import KvernError
from kvern.rpc.errors import error_from_rpc
from kvern.v1 import adapter_pb2, error_pb2, sampling_pb2, session_pb2, worker_pb2
from kvern_worker.sim import adapter_seed, continue_greedily

PROMPT = list(range(30, 60))
CONFIG = replace(SIM, max_loras=2)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path, num_workers=2, config=CONFIG)
    cluster.flags = ["--enable-lora"]
    yield cluster
    await cluster.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], str]:
    """Any folder that exists is an adapter to a simulated worker."""

    def make(name: str) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        return str(tmp_path / name)

    return make


async def load(gateway: Gateway, name: str, path: str, *, again: bool = False) -> adapter_pb2.Adapter:
    request = session_pb2.ServeAdapterRequest(name=name, path=path, replace=again)
    adapter = (await gateway.stub.ServeAdapter(request)).adapter
    await gateway.until(lambda: adapter.number in {a.number for a in gateway.adapters})
    return adapter


async def unload(gateway: Gateway, name: str) -> session_pb2.WithdrawAdapterResponse:
    return await gateway.stub.WithdrawAdapter(session_pb2.WithdrawAdapterRequest(name=name))


async def refusal(call: grpc.aio.UnaryUnaryCall) -> KvernError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


async def ask(gateway: Gateway, handle: int, adapter: adapter_pb2.Adapter, count: int = 8) -> None:
    submit = make_submit(handle, PROMPT, count, adapter=adapter.number)
    submit.block_hashes = join_hashes(hash_prompt(PROMPT, SIM.block_size, "", adapter_keys(adapter)))
    await gateway.send(submits=[submit])


def expected(adapter: adapter_pb2.Adapter, count: int = 8) -> list[int]:
    return continue_greedily(PROMPT, count, CONFIG, adapter_seed(adapter.path))


async def test_a_loaded_adapter_is_served_until_it_is_unloaded(
    cluster: Cluster, folder: Callable[[str], str]
) -> None:
    await cluster.start()
    gateway, other = await cluster.gateway(), await cluster.gateway()
    one, two = await load(gateway, "one", folder("a")), await load(gateway, "two", folder("b"))
    await other.until(lambda: [a.name for a in other.adapters] == ["one", "two"])
    assert await load(gateway, "one", folder("a")) == one  # as it is
    await ask(gateway, 1, one)
    await ask(gateway, 2, two)
    await gateway.submit(3, PROMPT)
    await gateway.finish(1, 2, 3)
    assert (gateway.tokens[1], gateway.tokens[2]) == (expected(one), expected(two))
    assert gateway.tokens[3] == continue_greedily(PROMPT, 8, CONFIG)
    assert (await unload(gateway, "one")).num_running == 0
    await other.until(lambda: [a.name for a in other.adapters if not a.draining] == ["two"])
    await ask(gateway, 4, one)
    await gateway.finish(4)
    assert gateway.refused[4].code == error_pb2.ERROR_CODE_MODEL_NOT_FOUND
    # A number is never given again, and the name is free.
    assert (await load(gateway, "one", folder("c"))).number > two.number


async def test_what_cannot_be_loaded_is_refused_and_changes_nothing(
    cluster: Cluster, folder: Callable[[str], str]
) -> None:
    await cluster.start()
    gateway = await cluster.gateway()
    await load(gateway, "one", folder("a"))
    stub, Load = gateway.stub, session_pb2.ServeAdapterRequest
    cases = [
        (Load(name="x", path="/nowhere/at/all"), "nothing at"),
        (Load(name="x"), "lora_path"),
        (Load(name="x y", path=folder("a")), "lora_name must be"),
        (Load(name="sim", path=folder("a")), "name of the model"),
        (Load(name="one", path=folder("b")), "unload it first"),
    ]
    for request, said in cases:
        error = await refusal(stub.ServeAdapter(request))
        assert (error.code, said in error.message) == (error_pb2.ERROR_CODE_INVALID_ARGUMENT, True)
    error = await refusal(stub.WithdrawAdapter(session_pb2.WithdrawAdapterRequest(name="x")))
    assert error.code == error_pb2.ERROR_CODE_MODEL_NOT_FOUND
    assert [a.name for a in gateway.adapters] == ["one"]


async def test_without_the_flag_there_are_none(tmp_path: Path, folder: Callable[[str], str]) -> None:
    for flags, slots, said in (([], 2, "--enable-lora"), (["--enable-lora"], 0, "no worker has slots")):
        place = tmp_path / str(slots)
        place.mkdir()
        cluster = Cluster(place, config=replace(SIM, max_loras=slots))
        cluster.flags = flags
        await cluster.start()
        gateway = await cluster.gateway()
        request = session_pb2.ServeAdapterRequest(name="one", path=folder("a"))
        error = await refusal(gateway.stub.ServeAdapter(request))
        assert (error.code, said in error.message) == (error_pb2.ERROR_CODE_UNIMPLEMENTED, True)
        await cluster.stop()


@pytest.mark.parametrize("victim", ["scheduler", "worker"])
async def test_streams_with_adapters_outlive_a_death(
    cluster: Cluster, folder: Callable[[str], str], victim: str
) -> None:
    """Three adapters for two slots, and one of them is unloaded meanwhile: all get the tokens they would have had."""
    for worker in cluster.workers:
        worker.config = replace(CONFIG, step_us=3000)
    cluster.flags += ["--orphan-grace-s", "20"]
    await cluster.start()
    gateway = await cluster.gateway()
    adapters = [await load(gateway, name, folder(name)) for name in ("one", "two", "three")]
    for handle, adapter in enumerate(adapters * 2, 1):
        await ask(gateway, handle, adapter, 100)
    await gateway.until(lambda: len(gateway.tokens.get(1, [])) > 5)
    assert (await unload(gateway, "three")).num_running == 2
    if victim == "worker":
        await cluster.workers[0].stop()
        await cluster.workers[0].start()
        await gateway.finish(*range(1, 7))
        found = gateway
    else:
        await cluster.stop_scheduler()
        await cluster.start_scheduler()
        found = await cluster.gateway()
        assert [a.name for a in found.adapters if not a.draining] == ["one", "two"]
        attaches = [session_pb2.Attach(handle=h, request_id=f"r{h}") for h in range(1, 7)]
        await found.send(attaches=attaches)
        await found.finish(*range(1, 7))
        # The next number is the one after those that were given.
        assert (await load(found, "four", folder("four"))).number == adapters[-1].number + 1
    for handle, adapter in enumerate(adapters * 2, 1):
        assert found.tokens[handle] == expected(adapter, 100)
        assert found.finished[handle].reason == sampling_pb2.FINISH_REASON_LENGTH


async def test_an_adapter_that_no_longer_loads_ends_its_requests_only(
    cluster: Cluster, folder: Callable[[str], str]
) -> None:
    await cluster.start()
    gateway = await cluster.gateway()
    gone, there = await load(gateway, "gone", folder("a")), await load(gateway, "there", folder("b"))
    Path(gone.path).rmdir()
    for handle, adapter in enumerate([gone, there] * 3, 1):
        await ask(gateway, handle, adapter)
    await gateway.finish(*range(1, 7))
    for handle in (1, 3, 5):
        assert gateway.finished[handle].reason == sampling_pb2.FINISH_REASON_ERROR
        assert "nothing at" in gateway.finished[handle].error.message
        assert gateway.tokens[handle + 1] == expected(there)


async def test_modules_of_the_flags_come_and_go_with_them(
    cluster: Cluster, folder: Callable[[str], str]
) -> None:
    cluster.flags += ["--lora-modules", f"one={folder('a')}", "two=" + folder("b"), "no=/nowhere"]
    await cluster.start()
    gateway = await cluster.gateway()
    assert [a.name for a in gateway.adapters] == ["one", "two"]  # with the welcome
    await load(gateway, "mine", folder("c"))
    await cluster.stop_scheduler()
    cluster.flags = ["--enable-lora", "--lora-modules", f'{{"name": "two", "path": "{folder("d")}"}}']
    await cluster.start_scheduler()
    gateway = await cluster.gateway()
    assert {a.name: a.path for a in gateway.adapters} == {"mine": folder("c"), "two": folder("d")}


async def test_a_scrape_names_adapters(
    cluster: Cluster, folder: Callable[[str], str], unused_tcp_port: int
) -> None:
    for worker in cluster.workers:
        worker.config = replace(CONFIG, step_us=2000)
    del cluster.workers[1]
    cluster.flags += ["--metrics-port", str(unused_tcp_port)]
    await cluster.start()
    gateway = await cluster.gateway()
    adapters = [await load(gateway, name, folder(name)) for name in ("one", "two", "three")]
    for handle, adapter in enumerate(adapters, 1):
        await ask(gateway, handle, adapter, 60)
    await gateway.until(lambda: {1, 2} <= set(gateway.tokens))
    url = f"http://127.0.0.1:{unused_tcp_port}/metrics"
    text = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
    assert (
        'lora_requests_info{max_lora="2",running_lora_adapters="one,two",waiting_lora_adapters="three"}'
        in text
    )
    assert "kvern_adapters 3.0" in text
    assert 'kvern_adapter_load_seconds_count{engine="0",model_name="sim"} 2.0' in text
    await gateway.finish(1, 2, 3)


async def test_loading_stalls_no_running_stream(
    cluster: Cluster, folder: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers' reading hangs until the stream is over."""
    for worker in cluster.workers:
        worker.config = replace(CONFIG, step_us=1000)
    await cluster.start()
    gateway = await cluster.gateway()
    one = await load(gateway, "one", folder("a"))
    hanging = asyncio.Event()
    loop = asyncio.get_running_loop()
    for worker in cluster.workers:
        placed = worker.executor.place_adapter

        def slow(
            request: worker_pb2.PlaceAdapterRequest, placed: Callable = placed
        ) -> worker_pb2.PlaceAdapterResponse:
            asyncio.run_coroutine_threadsafe(hanging.wait(), loop).result()
            return placed(request)

        monkeypatch.setattr(worker.executor, "place_adapter", slow)
    await gateway.submit(1, PROMPT, 100)
    await ask(gateway, 2, one)
    loading = asyncio.create_task(load(gateway, "two", folder("b")))
    await gateway.finish(1)
    assert gateway.tokens[1] == continue_greedily(PROMPT, 100, CONFIG)
    assert (2 in gateway.tokens, loading.done()) == (False, False)
    hanging.set()
    await gateway.finish(2)
    await loading
    assert gateway.tokens[2] == expected(one)
