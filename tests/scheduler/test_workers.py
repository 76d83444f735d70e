"""The scheduler gives a worker up that answers heartbeats only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from scheduler.scheduler_harness import SIM, Cluster, SimWorker

from kvern.v1 import worker_pb2
from kvern_scheduler import workers
from kvern_worker.service import WorkerServicer, _Stream
from kvern_worker.sim import continue_greedily

PROMPT = list(range(30, 60))


class DeafServicer(WorkerServicer):
    """Reads nothing on its first stream, and beats on it as if all were well."""

    num_streams = 0

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.ExecuteRequest], context: Any
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        self.num_streams += 1
        if self.num_streams == 1:
            await _Stream(context).heartbeat()
        async for response in super().Execute(request_iterator, context):
            yield response


class DeafWorker(SimWorker):
    servicer_class = DeafServicer


@pytest.mark.timeout(60)
async def test_a_claim_without_an_answer_is_given_up_like_a_step(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "STEP_TIMEOUT_S", 0.6)
    worker = DeafWorker(cluster.workers[0].address)
    cluster.workers = [worker]
    await cluster.start()
    gateway = await cluster.gateway()
    await gateway.submit(1, PROMPT)
    await gateway.finish(1)
    assert gateway.tokens[1] == continue_greedily(PROMPT, 8, SIM)
    assert isinstance(worker.servicer, DeafServicer) and worker.servicer.num_streams == 2
