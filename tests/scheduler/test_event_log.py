"""Records of requests and steps say what the worker was sent and the gateway was told; they switch at run time."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest
from scheduler.scheduler_harness import Cluster

from kvern.rpc import logs
from kvern.rpc.channel import create_channel
from kvern.rpc.packing import unpack_u32
from kvern.v1 import operations_pb2 as pb
from kvern.v1.operations_pb2_grpc import OperationsServiceStub

PROMPT = [901 + i % 90 for i in range(90)]


def events(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.getMessage() == name]  # type: ignore[attr-defined]


async def test_values_are_those_of_plans_and_answers(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvern_scheduler.events")
    cluster.flags = ["--enable-log-requests", "--enable-logging-iteration-details"]
    cluster.flags += ["--max-num-batched-tokens", "32"]
    await cluster.start()
    sent: list[Any] = []
    executor = cluster.workers[0].executor
    run = executor.run

    def spy(plan: Any) -> Any:
        sent.append(plan)
        return run(plan)

    executor.run = spy  # type: ignore[method-assign]
    gateway = await cluster.gateway()
    await gateway.submit(1, PROMPT, 9, tenant="a", request_id="first")
    await gateway.finish(1)
    await gateway.submit(2, PROMPT, 7, request_id="second")
    await gateway.finish(2)
    status = (await gateway.status()).groups[0]

    admitted = [
        (e["request_id"], e["prompt_tokens"], e["max_tokens"]) for e in events(caplog, "request admitted")
    ]
    assert admitted == [("first", 90, 9), ("second", 90, 7)]
    first, second = events(caplog, "request ended")
    prefills = [(plan.step, length) for plan in sent for length in unpack_u32(plan.prefill_lengths).tolist()]
    assert [tuple(chunk) for chunk in first["chunks"] + second["chunks"]] == prefills
    assert first["blocks"] == [len(unpack_u32(sent[0].new_sequences[0].block_ids))]
    for record, finished in ((first, gateway.finished[1]), (second, gateway.finished[2])):
        assert record["reason"] == "length" and record["output_tokens"] == finished.num_output_tokens
        assert record["cached_tokens"] == finished.num_cached_tokens
        assert record["queue_seconds"] == pytest.approx(finished.queue_seconds, abs=1e-5)
        assert record["prefill_seconds"] == pytest.approx(finished.prefill_seconds, abs=1e-5)
    assert (first["tenant"], first["cached_tokens"], second["cached_tokens"]) == ("a", 0, 88)

    steps = events(caplog, "step")
    assert [(s["step"], s["decoded"], s["prefilled"]) for s in steps] == [
        (p.step, len(p.decode_slots) // 4, int(unpack_u32(p.prefill_lengths).sum())) for p in sent
    ]
    assert steps[0]["running"] == 1 and steps[-1]["running"] == 0
    assert (steps[-1]["free_blocks"], steps[-1]["cached_blocks"]) == (
        *(status.num_free_blocks, status.num_cached_blocks),
    )
    # Nothing of a prompt: no list of its ids, and no text.
    said = json.dumps([vars(record).get("fields") for record in caplog.records])
    assert "901" not in said and "902" not in said


async def test_they_are_off_until_switched_on(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvern_scheduler.events")
    await cluster.start()
    gateway = await cluster.gateway()
    await gateway.submit(1, PROMPT, 3)
    await gateway.finish(1)
    assert not events(caplog, "request ended") and not events(caplog, "step")
    async with create_channel(cluster.address) as channel:
        stub = OperationsServiceStub(channel)
        state = await stub.SetLogging(pb.SetLoggingRequest(requests=True))
        assert (state.requests, state.steps) == (True, False)
        await gateway.submit(2, PROMPT, 3)
        await gateway.finish(2)
        assert len(events(caplog, "request ended")) == 1 and not events(caplog, "step")
        state = await stub.SetLogging(pb.SetLoggingRequest(requests=False, steps=True))
        assert (state.requests, state.steps) == (False, True)
    await gateway.submit(3, PROMPT, 3)
    await gateway.finish(3)
    assert len(events(caplog, "request ended")) == 1 and len(events(caplog, "step")) >= 3


@pytest.mark.parametrize("formatter", [logs.Json(), logs.Text()])
def test_a_record_is_one_line_whatever_is_in_it(formatter: logging.Formatter) -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    logger = logging.Logger("kvern.test")
    logger.addHandler(handler)
    logs.event(logger, "step", number=3, share=0.25, name='a "b"\nINFO forged', list=[1, 2])
    (line,) = out.getvalue().splitlines()
    if isinstance(formatter, logs.Json):
        value = json.loads(line)
        assert (value["message"], value["level"], value["number"], value["list"]) == (
            "step",
            "info",
            3,
            [1, 2],
        )
    else:
        assert line.endswith(
            'INFO kvern.test: step number=3 share=0.25 name="a \\"b\\"\\nINFO forged" list=[1,2]'
        )
