"""kvern-worker as a process: Describe answers while it loads, plans run over gRPC, errors end it with one line."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from worker.test_worker_batch import new_sequence, plan_of

from kvern.rpc.channel import create_channel
from kvern.v1 import worker_pb2, worker_pb2_grpc


@contextlib.asynccontextmanager
async def started(tmp_path: Path, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    address = f"unix:{tmp_path}/w.sock"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvern_worker.server", "--listen", address, *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process, address
    finally:
        if process.returncode is None:
            process.terminate()
            await asyncio.wait_for(process.wait(), 30)


async def describe(stub: worker_pb2_grpc.WorkerServiceAsyncStub) -> worker_pb2.DescribeResponse:
    return await stub.Describe(worker_pb2.DescribeRequest(), wait_for_ready=True, timeout=60)


async def test_a_worker_loads_describes_and_runs(
    tmp_path: Path, checkpoint: Callable[[str], Path], reference: Callable[[str], Any]
) -> None:
    flags = ("--model", str(checkpoint("llama")), "--kv-cache-memory-bytes", "8000000", "--max-num-seqs", "4",
             "--served-model-name", "tiny", "--max-model-len", "256")  # fmt: skip
    async with started(tmp_path, *flags) as (process, address), create_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        first = await describe(stub)
        assert first.phase in (worker_pb2.WORKER_PHASE_STARTING, worker_pb2.WORKER_PHASE_LOADING)
        deadline = time.monotonic() + 120
        while (now := await describe(stub)).phase != worker_pb2.WORKER_PHASE_READY:
            assert now.phase != worker_pb2.WORKER_PHASE_FAILED, now.error
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert now.loaded_bytes == now.total_bytes > 0
        assert (now.model.name, now.model.vocab_size, now.model.max_model_len) == ("tiny", 263, 256)
        assert now.model.num_parameters == reference("llama").num_parameters()
        assert (now.block_size, now.max_num_seqs, now.max_num_batched_tokens) == (16, 4, 2048)
        assert now.num_blocks == 8_000_000 // now.bytes_per_block
        call = stub.Execute()
        plan = plan_of(new_sequence(0, [5, 6, 7], [0]))
        await call.write(worker_pb2.ExecuteRequest(plans=[plan]))
        results: list[worker_pb2.StepResult] = []
        while not results:
            results += (await call.read()).results
        assert len(results[0].token_ids) == 4
        call.cancel()
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_a_model_that_cannot_be_loaded_ends_the_process(tmp_path: Path) -> None:
    async with started(tmp_path, "--model", str(tmp_path / "nowhere")) as (process, _):
        _, stderr = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 1
        assert stderr.decode().splitlines()[-1].startswith("kvern-worker: model ")
        assert "Traceback" not in stderr.decode()


async def test_sigterm_while_loading_ends_the_process_cleanly(tmp_path: Path) -> None:
    async with started(tmp_path) as (process, address), create_channel(address) as channel:
        await describe(worker_pb2_grpc.WorkerServiceStub(channel))
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_the_simulated_device_serves(tmp_path: Path) -> None:
    flags = ("--device", "sim", "--sim-num-blocks", "128", "--sim-vocab-size", "500")
    async with started(tmp_path, *flags) as (_, address), create_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        deadline = time.monotonic() + 60
        while (now := await describe(stub)).phase != worker_pb2.WORKER_PHASE_READY:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        assert (now.num_blocks, now.model.vocab_size) == (128, 500)


@pytest.mark.parametrize("flags", [("--device", "tpu"), ("--max-model-len", "lots"), ("--dtype", "int3")])
async def test_bad_flags_end_the_process_before_it_listens(tmp_path: Path, flags: tuple[str, ...]) -> None:
    async with started(tmp_path, *flags) as (process, _):
        _, stderr = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 2
        assert flags[1] in stderr.decode().splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
async def test_a_gpu_that_is_not_there_ends_the_process_with_what_to_do(tmp_path: Path) -> None:
    async with started(tmp_path, "--device", "cuda") as (process, _):
        _, stderr = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 1
        assert "--device cuda: torch" in (last := stderr.decode().splitlines()[-1])
        assert last.endswith("or use --device cpu")
