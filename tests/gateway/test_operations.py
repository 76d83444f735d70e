"""Timelines, blocks and status through a gateway, in front of a scheduler that answers for all tenants."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import grpc.aio
import pytest
from gateway.conftest import Serve
from gateway.fake_scheduler import FakeScheduler

from kvern.errors import KvernError
from kvern.v1 import error_pb2, operations_pb2_grpc, sampling_pb2, session_pb2
from kvern.v1 import operations_pb2 as pb
from kvern_gateway.cli.explain import render
from kvern_gateway.keys import Keys
from kvern_gateway.timeline.picture import draw
from kvern_gateway.timeline.words import tell


def a_timeline() -> pb.Timeline:
    """One request that waited, was prefilled in two chunks, preempted, and ended."""
    queue = pb.Phase(kind=pb.PHASE_KIND_QUEUE, start=100.0, end=101.2, group_id="1", routed_cached_tokens=32)
    queue.waits.add(reason=pb.WAIT_REASON_BATCH_FULL, seconds=1.19)
    queue.waits.add(reason=pb.WAIT_REASON_STEP, seconds=0.01)
    prefill = pb.Phase(
        kind=pb.PHASE_KIND_PREFILL, start=101.2, end=101.5, group_id="1", cached_tokens=32, blocks=7
    )
    prefill.chunks.add(step=40, tokens=64, seconds=0.1)
    prefill.chunks.add(step=41, tokens=4, seconds=0.2, other_tokens=2000)
    decode = pb.Phase(kind=pb.PHASE_KIND_DECODE, start=101.5, end=102.0, group_id="1")
    decode.steps.CopyFrom(pb.StepSummary(steps=9, mean=0.055, p50=0.02, longest=0.31))
    decode.steps.slowest.CopyFrom(pb.StepTimeline(step=45, prefilled=2048))
    again = pb.Phase(
        kind=pb.PHASE_KIND_QUEUE, start=102.0, end=102.5, group_id="1", cause=pb.PHASE_CAUSE_PREEMPTED
    )
    again.waits.add(reason=pb.WAIT_REASON_KV_FULL, seconds=0.5)
    choice = pb.ChoiceTimeline(phases=[queue, prefill, decode, again], finished=True, output_tokens=10)
    choice.reason = sampling_pb2.FINISH_REASON_ABORT
    return pb.Timeline(
        request_id='a/<b>"', arrived=100.0, prompt_tokens=100, max_tokens=20, choices=[choice], now=200.0
    )


class Scheduler(FakeScheduler, operations_pb2_grpc.OperationsServiceServicer):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def register(self, server: grpc.aio.Server) -> None:
        operations_pb2_grpc.add_OperationsServiceServicer_to_server(self, server)

    async def GetTimeline(self, request: pb.GetTimelineRequest, context: Any) -> pb.GetTimelineResponse:
        self.asked.append(request)
        if request.request_id != 'a/<b>"':
            code = error_pb2.ERROR_CODE_REQUEST_NOT_FOUND
            raise KvernError(code, "no timeline of this request", field="request_id")
        return pb.GetTimelineResponse(timeline=a_timeline())

    async def ListTimelines(self, request: pb.ListTimelinesRequest, context: Any) -> pb.ListTimelinesResponse:
        self.asked.append(request)
        return pb.ListTimelinesResponse(timelines=[pb.TimelineHead(request_id="x", arrived=3.0)])

    async def GetBlocks(self, request: pb.GetBlocksRequest, context: Any) -> pb.GetBlocksResponse:
        return pb.GetBlocksResponse(groups=[pb.GroupBlocks(group_id="0", states=b"\0\1\3")])

    async def GetCellStatus(self, request: pb.GetCellStatusRequest, context: Any) -> pb.GetCellStatusResponse:
        group = session_pb2.GroupStatus(group_id="0", num_blocks=3, pending_prompt_tokens=2**40)
        return pb.GetCellStatusResponse(status=session_pb2.GetStatusResponse(cell="c", groups=[group]))


PATH = "/v1/requests/a%2F%3Cb%3E%22/timeline"


async def test_http_gives_the_timeline_as_json_words_and_picture(serve: Serve) -> None:
    served = await serve(Scheduler())
    body = (await served.http.get(PATH)).json()
    assert body["choices"][0]["phases"][1]["chunks"][1]["step"] == 41
    assert [line["kind"] for line in body["lines"]] == ["queue", "prefill", "decode", "queue"]
    assert body["lines"][0]["text"] == (
        "waited 1.2 s because the batch was full (--max-num-seqs); group 1 was chosen: 32 tokens cached there, "
        "0 tokens in its queue"
    )
    picture = await served.http.get(PATH + ".svg")
    assert picture.headers["content-type"] == "image/svg+xml"
    bars = ElementTree.fromstring(picture.text).findall("{http://www.w3.org/2000/svg}rect[@rx]")
    widths = [float(bar.get("width", 0)) for bar in bars]
    assert widths == pytest.approx([620 * share / 2.5 for share in (1.2, 0.3, 0.5, 0.5)], abs=0.1)
    missing = await served.http.get("/v1/requests/other/timeline")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")
    assert (await served.http.get("/v1/blocks")).json()["groups"][0]["states"] == "AAED"
    status = (await served.http.get("/v1/status")).json()
    assert status["groups"][0]["pending_prompt_tokens"] == 2**40 and status["gateway"]["open_requests"] == 0
    assert (await served.http.get("/v1/requests?limit=7")).json()["data"][0]["request_id"] == "x"
    assert served.scheduler.asked[-1].limit == 7 and not served.scheduler.asked[-1].HasField("tenant")  # type: ignore[attr-defined]
    assert (await served.http.get("/v1/requests?limit=-1")).status_code == 400


async def test_a_tenant_sees_its_own_requests_only(serve: Serve) -> None:
    served = await serve(Scheduler(), keys=Keys(["secret"]))
    assert (await served.http.get(PATH)).status_code == 401
    own = {"Authorization": "Bearer secret"}
    assert (await served.http.get(PATH, headers=own)).status_code == 200
    assert served.scheduler.asked[-1].tenant == "default"  # type: ignore[attr-defined]
    for path, body in (("/v1/logging", {"requests": True}), ("/v1/profile", {"seconds": 0.1})):
        refused_here = await served.http.post(path, json=body, headers=own)
        assert refused_here.json()["error"]["code"] == "unimplemented", "it would concern all tenants"
    stub = operations_pb2_grpc.OperationsServiceStub(served.channel)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.ListTimelines(pb.ListTimelinesRequest())
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    listing = pb.ListTimelinesRequest(tenant="another")
    await stub.ListTimelines(listing, metadata=(("authorization", "Bearer secret"),))
    assert served.scheduler.asked[-1].tenant == "default"  # type: ignore[attr-defined]


def test_words_say_what_made_it_slow() -> None:
    story = tell(a_timeline())
    assert story.title == (
        'a/<b>": 100 prompt tokens, at most 20 new tokens; ended after 2.5 s with 10 tokens (abort)'
    )
    _, prefill, decode, again = (line.text for line in story.lines)
    assert prefill == (
        "computed 68 tokens in 2 chunks (steps 40 to 41); 32 tokens came from the prefix cache; 7 KV blocks; its steps "
        "computed up to 2,000 tokens of other requests, too"
    )
    assert decode == (
        "9 steps of 20 ms each (median; mean 55 ms); the slowest, step 45, took 310 ms and computed 2,048 prompt tokens of "
        "other requests"
    )
    assert again == (
        "preempted, since KV blocks ran out: its tokens are kept and computed again. waited 500 ms because too few KV "
        "blocks were free (--kv-cache-memory-bytes)"
    )
    text = render(story)
    assert text.count("█") > 40 and "+1.200 s prefill: computed 68" in text
    assert "<b>" not in draw(story)
