"""A worker group of real processes behind the interface of an executor, for MiniScheduler to drive."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc

from kvern.v1 import worker_pb2, worker_pb2_grpc

READY_S = 120.0


class RemoteGroup:
    """Sends every plan to every rank; the results are those of the rank that samples."""

    def __init__(self, address: str, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._first = worker_pb2_grpc.WorkerServiceStub(grpc.insecure_channel(address))
        self.description = self._ready(self._first)
        addresses = self.description.rank_addresses or [address]
        self.stubs = [worker_pb2_grpc.WorkerServiceStub(grpc.insecure_channel(one)) for one in addresses]
        self.ranks = [self._ready(stub) for stub in self.stubs]
        self._attempt = 0
        self._plans: list[queue.SimpleQueue[worker_pb2.ExecuteRequest | None]] = []
        self.reset()

    @staticmethod
    def _ready(stub: worker_pb2_grpc.WorkerServiceStub) -> worker_pb2.DescribeResponse:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            with contextlib.suppress(grpc.RpcError):
                found = stub.Describe(worker_pb2.DescribeRequest())
                assert found.phase != worker_pb2.WORKER_PHASE_FAILED, found.error.message
                if found.phase == worker_pb2.WORKER_PHASE_READY:
                    return found
            time.sleep(0.05)
        raise TimeoutError("the group did not become ready")

    def pid_of_rank(self, rank: int) -> int:
        """Of a rank that the first one started."""
        own = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(own[rank - 1])

    def describe(self) -> worker_pb2.DescribeResponse:
        return self.description

    def reset(self) -> None:
        """A new connection of the same leader, to every rank."""
        for plans in self._plans:
            plans.put(None)
        self._attempt += 1
        self._plans = [queue.SimpleQueue() for _ in self.stubs]
        self._calls = [
            stub.Execute(iter(plans.get, None)) for stub, plans in zip(self.stubs, self._plans, strict=True)
        ]

    def send(self, plan: worker_pb2.StepPlan, rank: int) -> None:
        plan.attempt = self._attempt
        self._plans[rank].put(worker_pb2.ExecuteRequest(plans=[plan]))

    def run(self, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
        for rank in range(len(self.stubs)):
            self.send(plan, rank)
        results = [self.result(call) for call in self._calls]
        return results[self.description.sampling_rank]

    @staticmethod
    def result(call: Iterator[worker_pb2.ExecuteResponse]) -> worker_pb2.StepResult:
        for response in call:
            if response.results:
                return response.results[0]
        raise EOFError


@contextlib.contextmanager
def group_of(folder: Path, model: Path, *flags: str, dtype: str = "float32") -> Iterator[RemoteGroup]:
    """``kvern-worker`` with ``flags``, its ranks started by it."""
    address = f"unix:{folder}/w.sock"
    process = start_worker(model, "--listen", address, *flags, dtype=dtype)
    try:
        yield RemoteGroup(address, process)
    finally:
        process.terminate()
        process.wait(30)


def start_worker(
    model: Path, *flags: str, dtype: str = "float32", within: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    """``within``: a command that runs another, such as ``ip netns exec NAME``."""
    words = ("--model", str(model), "--dtype", dtype, "--max-num-seqs", "8", "--threads", "1")
    words += ("--kv-cache-memory-bytes", "4000000", "--distributed-timeout-seconds", "60")
    return subprocess.Popen([*within, sys.executable, "-m", "kvern_worker.server", *words, *flags])
