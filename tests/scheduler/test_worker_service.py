"""The worker's service over a simulated executor: order, fencing, errors, heartbeats, loading."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from kvern.rpc.channel import create_channel
from kvern.rpc.errors import error_from_rpc
from kvern.rpc.packing import pack_i32, pack_u32, unpack_i32, unpack_u32
from kvern.v1 import error_pb2, worker_pb2, worker_pb2_grpc
from kvern_worker.service import Progress, serve
from kvern_worker.sim import SimConfig, SimExecutor, continue_greedily

SIM = SimConfig(num_blocks=16, block_size=4, max_num_seqs=4, vocab_size=97, max_model_len=64, strict=True)

GRACE_S = 15.0


class Running:
    """A served executor, and a stub for it."""

    def __init__(self, folder: Path, load: Callable[[Progress], Any]) -> None:
        self.address = f"unix:{folder}/w"
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(serve(self.address, load, stop=self.stop, grace_s=GRACE_S))
        self._channel = create_channel(self.address)
        self.stub = worker_pb2_grpc.WorkerServiceStub(self._channel)

    async def describe(self) -> worker_pb2.DescribeResponse:
        return await self.stub.Describe(worker_pb2.DescribeRequest(), wait_for_ready=True, timeout=5)

    async def ready(self) -> None:
        async with asyncio.timeout(5):
            while (await self.describe()).phase != worker_pb2.WORKER_PHASE_READY:
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        self.stop.set()
        await asyncio.gather(self.task, return_exceptions=True)
        await self._channel.close()

    def execute(self) -> Any:
        return self.stub.Execute()  # type: ignore[call-arg]


async def ended(call: Any) -> grpc.aio.AioRpcError:
    """How the worker ended the stream."""
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )


async def last_word(call: Any) -> grpc.aio.AioRpcError:
    """Reads until the worker ends the stream."""
    try:
        while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
            pass
    except grpc.aio.AioRpcError as error:
        return error
    return await ended(call)


async def run(call: Any, *plans: worker_pb2.StepPlan) -> list[worker_pb2.StepResult]:
    """Sends the plans in one message and waits for their results."""
    results: list[worker_pb2.StepResult] = []
    try:
        await call.write(worker_pb2.ExecuteRequest(plans=plans))
        while len(results) < len(plans):
            response = await call.read()
            if response is grpc.aio.EOF:  # type: ignore[attr-defined]
                raise await ended(call)
            results += response.results
    except asyncio.InvalidStateError:
        raise await ended(call) from None
    return results


def enter(step: int, epoch: int = 1, slot: int = 0, generation: int = 1) -> worker_pb2.StepPlan:
    """A prompt of three tokens that is prefilled at once."""
    new = worker_pb2.NewSequence(
        slot=slot,
        token_ids=pack_i32([5, 6, 7]),
        num_prompt_tokens=3,
        block_ids=pack_u32([slot]),
        block_generations=pack_u32([generation]),
    )
    return worker_pb2.StepPlan(
        epoch=epoch,
        step=step,
        new_sequences=[new],
        prefill_slots=pack_u32([slot]),
        prefill_lengths=pack_u32([3]),
    )


def decode(step: int, epoch: int = 1) -> worker_pb2.StepPlan:
    return worker_pb2.StepPlan(epoch=epoch, step=step, decode_slots=pack_u32([0]))


def grow(step: int) -> worker_pb2.StepPlan:
    plan = decode(step)
    plan.append_slots, plan.append_blocks = pack_u32([0]), pack_u32([9])
    plan.append_generations = pack_u32([4])
    return plan


@pytest.fixture(params=[0, 300], ids=["inline", "threaded"])
async def worker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Running]:
    running = Running(tmp_path, lambda progress: SimExecutor(replace(SIM, step_us=request.param)))
    await running.ready()
    yield running
    await running.close()


async def refusal(call: Any, *plans: worker_pb2.StepPlan) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await run(call, *plans)
    return caught.value


async def test_results_come_in_order_and_the_inventory_follows(worker: Running) -> None:
    call = worker.execute()
    first = await run(call, enter(7), decode(8))
    second = await run(call, grow(9))
    assert [result.step for result in first + second] == [7, 8, 9]
    tokens = [unpack_i32(result.token_ids).tolist() for result in first + second]
    assert [token for step in tokens for token in step] == continue_greedily([5, 6, 7], 3, SIM)
    inventory = await worker.stub.GetInventory(worker_pb2.GetInventoryRequest())
    assert (inventory.epoch, inventory.step) == (1, 9)
    expected = np.zeros(16, np.uint32)
    expected[[0, 9]] = [1, 4]
    assert unpack_u32(inventory.generations).tolist() == expected.tolist()
    assert (await worker.describe()).steps == 3


async def test_a_gap_ends_the_stream(worker: Running) -> None:
    call = worker.execute()
    await run(call, enter(1))
    error = await refusal(call, decode(3))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error_from_rpc(error).field == "step"


async def test_a_higher_epoch_replaces_and_a_lower_one_is_refused(worker: Running) -> None:
    old, new = worker.execute(), worker.execute()
    await run(old, enter(1))
    claimed = await run(new, worker_pb2.StepPlan(epoch=2, step=10))
    assert claimed[0].step == 10
    error = await last_word(old)
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert error_from_rpc(error).code == error_pb2.ERROR_CODE_FENCED
    late = await refusal(worker.execute(), decode(2))
    assert error_from_rpc(late).code == error_pb2.ERROR_CODE_FENCED
    # The batch is empty, the blocks keep their generations.
    assert (await run(new, enter(11, epoch=2, generation=2)))[0].token_ids
    inventory = await worker.stub.GetInventory(worker_pb2.GetInventoryRequest())
    assert inventory.epoch == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"decode_slots": pack_u32([4])},
        {"decode_slots": b"123"},
        {"prefill_slots": pack_u32([0])},
        {"append_slots": pack_u32([0]), "append_blocks": pack_u32([16]), "append_generations": pack_u32([1])},
        {"copy_sources": pack_u32([0]), "decode_slots": pack_u32([0])},
        {"new_sequences": [worker_pb2.NewSequence(slot=1)]},
    ],
)
async def test_a_malformed_plan_ends_the_stream_and_not_the_worker(
    worker: Running, fields: dict[str, Any]
) -> None:
    call = worker.execute()
    await run(call, enter(1))
    error = await refusal(call, worker_pb2.StepPlan(epoch=1, step=2, **fields))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (await run(worker.execute(), enter(1)))[0].token_ids


async def test_a_step_that_raises_fails_its_sequences_only(worker: Running) -> None:
    call = worker.execute()
    # Position 3 is in block 0; without another block position 4 has none, which the strict executor notices.
    *_, failed = await run(call, enter(1), decode(2), decode(3))
    assert not failed.slots
    assert [error.slot for error in failed.errors] == [0]
    assert failed.errors[0].error.code == error_pb2.ERROR_CODE_INTERNAL
    assert (await run(call, enter(4, slot=1)))[0].token_ids


async def test_idle_streams_beat(worker: Running) -> None:
    call = worker.execute()
    await run(call, enter(1))
    gaps, last = [], time.monotonic()
    for _ in range(4):
        response = await asyncio.wait_for(call.read(), 30)
        assert not response.results
        gaps.append(time.monotonic() - last)
        last += gaps[-1]
    # Four a second, where the machine has the time.
    assert min(gaps) < 0.6


async def test_draining_hands_the_stream_over_and_waits_for_nobody(worker: Running) -> None:
    """Long before the grace of open calls is over: the scheduler has sequences to take elsewhere."""
    call = worker.execute()
    await run(call, enter(1))
    worker.stop.set()
    async with asyncio.timeout(GRACE_S / 3):
        error = await last_word(call)
        await worker.task
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in error_from_rpc(error).message


async def test_loading_can_be_watched_and_plans_are_refused_meanwhile(tmp_path: Path) -> None:
    go = threading.Event()

    def load(progress: Progress) -> SimExecutor:
        progress.start(100)
        progress.add(40)
        go.wait(5)
        return SimExecutor(SIM)

    worker = Running(tmp_path, load)
    async with asyncio.timeout(5):
        while (await worker.describe()).loaded_bytes != 40:
            await asyncio.sleep(0.01)
    description = await worker.describe()
    assert (description.phase, description.total_bytes) == (worker_pb2.WORKER_PHASE_LOADING, 100)
    error = await refusal(worker.execute(), enter(1))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    go.set()
    await worker.ready()
    await worker.close()


async def test_a_failed_load_is_told_and_then_ends_the_process(tmp_path: Path) -> None:
    def load(progress: Progress) -> SimExecutor:
        raise ValueError("no weights here")

    worker = Running(tmp_path, load)
    async with asyncio.timeout(5):
        while (await worker.describe()).phase != worker_pb2.WORKER_PHASE_FAILED:
            await asyncio.sleep(0.01)
    assert "no weights here" in (await worker.describe()).error.message
    with pytest.raises(ValueError, match="no weights"):
        await worker.task
    await worker.close()
