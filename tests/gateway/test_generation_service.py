"""The gRPC surface, through a grpc.aio client."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import grpc
import pytest
from gateway.conftest import Serve, Served
from gateway.fake_scheduler import FakeScheduler, until
from gateway.test_openai_client import saying
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvern.rpc.errors import error_from_rpc
from kvern.rpc.packing import unpack_i32
from kvern.v1 import generation_pb2 as pb
from kvern.v1 import sampling_pb2
from kvern.v1.generation_pb2_grpc import GenerationServiceStub
from kvern_gateway.text.tokenizer import TextModel


async def generate(served: Served, **fields: Any) -> list[pb.GenerateResponse]:
    stub = GenerationServiceStub(served.channel)
    return [response async for response in stub.Generate(pb.GenerateRequest(**fields))]


def texts(responses: list[pb.GenerateResponse]) -> dict[int, str]:
    joined: dict[int, str] = {}
    for response in responses:
        if response.HasField("delta"):
            joined[response.delta.choice] = joined.get(response.delta.choice, "") + response.delta.text
    return joined


async def test_generate(serve: Serve, smollm2: TextModel) -> None:
    served = await serve(saying(smollm2, "Red 🎉", "Blue"))
    responses = await generate(served, prompt="Colours", n=2, request_id="mine")
    accepted = responses[0].accepted
    assert (accepted.request_id, accepted.model, accepted.num_prompt_tokens) == ("mine", "test-model", 2)
    assert texts(responses) == {0: "Red 🎉", 1: "Blue"}
    ends = {r.finished.choice: r.finished for r in responses if r.HasField("finished")}
    assert {end.reason for end in ends.values()} == {sampling_pb2.FINISH_REASON_STOP}
    assert ends[1].usage.num_output_tokens == 2
    assert (ends[1].usage.num_prompt_tokens, ends[1].usage.num_cached_tokens) == (2, 16)
    ids = [
        token for r in responses if r.HasField("delta") and r.delta.choice == 0 for token in r.delta.token_ids
    ]
    assert ids == [*smollm2.encode("Red 🎉", False), 2]
    [submit] = served.scheduler.submits
    assert submit.params.max_tokens == 2048 - 2
    assert submit.resumable and len(submit.body_digest) == 32


async def test_a_chat(serve: Serve, smollm2: TextModel) -> None:
    served = await serve(saying(smollm2, "Hello"))
    chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="Hi")])
    assert texts(await generate(served, chat=chat)) == {0: "Hello"}
    prompt = unpack_i32(served.scheduler.submits[0].prompt_token_ids).tolist()
    assert smollm2.decode(prompt, False).endswith("user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert not served.scheduler.submits[0].resumable
    answer = await GenerationServiceStub(served.channel).Tokenize(pb.TokenizeRequest(chat=chat))
    assert list(answer.token_ids) == prompt


async def test_a_stop_string(serve: Serve, smollm2: TextModel) -> None:
    # Long enough not to have ended before the stop string is seen.
    served = await serve(saying(smollm2, "one two three" + " and more" * 300))
    responses = await generate(served, prompt="x", stop=["wo th"])
    assert texts(responses) == {0: "one t"}
    assert responses[-1].finished.stop_string == "wo th"
    await until(lambda: served.scheduler.cancels)


async def test_logprobs(serve: Serve, smollm2: TextModel) -> None:
    served = await serve(saying(smollm2, "one two", end=[]))
    params = sampling_pb2.SamplingParams(logprobs=2, prompt_logprobs=0)
    responses = await generate(served, prompt="The mill", sampling=params)
    entries = [entry for r in responses for entry in r.delta.logprobs]
    assert [entry.token_id for entry in entries] == smollm2.encode("one two", False)
    assert len(entries[0].top_token_ids) == 2
    prompt = [entry.token_id for r in responses for entry in r.delta.prompt_logprobs]
    assert prompt == smollm2.encode("The mill", False)[1:]


async def test_a_lost_call_cancels_unless_the_client_named_it(serve: Serve) -> None:
    served = await serve(FakeScheduler(step_s=0.005))
    stub = GenerationServiceStub(served.channel)
    for request_id, cancelled in (("", True), ("kept", False)):
        served.scheduler.cancels.clear()
        call = stub.Generate(pb.GenerateRequest(prompt="x", request_id=request_id))
        await call.read()
        await call.read()
        call.cancel()
        if cancelled:
            await until(lambda: served.scheduler.cancels, 1)
        else:
            sent = served.scheduler.requests["kept"].sent
            before = sent[0]
            await until(lambda sent=sent, before=before: sent[0] > before + 5)
            assert served.scheduler.cancels == []


async def test_cancel_ends_the_stream_with_abort(serve: Serve) -> None:
    served = await serve(FakeScheduler(step_s=0.005))
    stub = GenerationServiceStub(served.channel)
    call = stub.Generate(pb.GenerateRequest(prompt="x", request_id="mine"))
    assert (await anext(aiter(call))).accepted.request_id == "mine"
    assert (await stub.Cancel(pb.CancelRequest(request_id="mine"))).cancelled
    responses = [response async for response in call]
    assert responses[-1].finished.reason == sampling_pb2.FINISH_REASON_ABORT
    assert not (await stub.Cancel(pb.CancelRequest(request_id="mine"))).cancelled
    await until(lambda: served.scheduler.cancels)


async def test_the_deadline_goes_with_the_request(serve: Serve) -> None:
    served = await serve(FakeScheduler(step_s=0.05))
    stub = GenerationServiceStub(served.channel)
    before = time.time()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in stub.Generate(pb.GenerateRequest(prompt="x"), timeout=0.3):
            pass
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    deadline = served.scheduler.submits[0].deadline_unix_ms / 1000
    assert before < deadline < before + 0.5
    await until(lambda: served.scheduler.cancels, 1)


async def test_a_slow_client_gets_larger_deltas_and_blocks_nobody(serve: Serve, smollm2: TextModel) -> None:
    served = await serve(FakeScheduler())
    stub = GenerationServiceStub(served.channel)
    slow = stub.Generate(pb.GenerateRequest(prompt="slow"))
    await anext(aiter(slow))
    fast = await generate(served, prompt="fast", sampling=sampling_pb2.SamplingParams(max_tokens=500))
    assert fast[-1].finished.usage.num_output_tokens == 500
    responses = [response async for response in slow]
    ids = [token for response in responses for token in response.delta.token_ids]
    assert ids == served.scheduler.requests[served.scheduler.submits[0].request_id].outputs[0]
    assert "".join(response.delta.text for response in responses) == smollm2.decode(ids, True)
    firsts = [(r.delta.first_index, len(r.delta.token_ids)) for r in responses if r.HasField("delta")]
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(firsts))


def collect(events: list[pb.GenerateResponse]) -> tuple[dict[int, str], dict[int, list[int]]]:
    ids: dict[int, list[int]] = {}
    for event in events:
        if event.HasField("delta"):
            ids.setdefault(event.delta.choice, []).extend(event.delta.token_ids)
    return texts(events), ids


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 8])
async def test_another_gateway_goes_on_from_any_index(serve: Serve, smollm2: TextModel, cut: int) -> None:
    text = "Naïve 🎉🎉 日本 mills grind. STO"
    scheduler = saying(smollm2, text + "P and more", "other 🎉 text STOP")
    scheduler.step_s = 0.01
    first, second = await serve(scheduler), await serve(scheduler)
    request = pb.GenerateRequest(prompt="x", n=2, stop=["STOP"], request_id="mine")
    call = GenerationServiceStub(first.channel).Generate(request)
    before: list[pb.GenerateResponse] = []
    async for event in call:
        before.append(event)
        if len(collect(before)[1].get(0, [])) >= cut:
            break
    await first.server.stop(0)
    shown, ids = collect(before)
    from_index = [len(ids.get(0, [])), len(ids.get(1, []))]
    stub = GenerationServiceStub(second.channel)
    after = [r.event async for r in stub.Stream(pb.StreamRequest(request_id="mine", from_index=from_index))]
    assert after[0].accepted.request_id == "mine" and after[0].accepted.num_prompt_tokens == 1
    rest, more = collect(after)
    assert shown.get(0, "") + rest.get(0, "") == text[: -len("STO")]
    assert shown.get(1, "") + rest.get(1, "") == "other 🎉 text "
    for choice in (0, 1):
        whole = ids.get(choice, []) + more.get(choice, [])
        assert whole == scheduler.requests["mine"].outputs[choice][: len(whole)]
    firsts = {r.delta.choice: r.delta.first_index for r in reversed(after) if r.HasField("delta")}
    assert firsts == {choice: from_index[choice] for choice in firsts}
    ends = [r.finished.stop_string for r in after if r.HasField("finished")]
    assert ends == ["STOP", "STOP"]


async def test_a_finished_request_can_be_read_again(serve: Serve, smollm2: TextModel) -> None:
    served = await serve(saying(smollm2, "one two"))
    once = await generate(served, prompt="x", request_id="mine")
    stub = GenerationServiceStub(served.channel)
    again = [r.event async for r in stub.Stream(pb.StreamRequest(request_id="mine"))]
    assert collect(again) == collect(once) == ({0: "one two"}, {0: [*smollm2.encode("one two", False), 2]})
    assert again[-1].finished.reason == sampling_pb2.FINISH_REASON_STOP
    assert len(served.gateway.client.requests) == 0


async def test_a_stream_goes_on_over_a_lost_session(serve: Serve, smollm2: TextModel) -> None:
    served = await serve(FakeScheduler(step_s=0.01))
    stub = GenerationServiceStub(served.channel)
    params = sampling_pb2.SamplingParams(max_tokens=60)
    call = stub.Generate(pb.GenerateRequest(prompt="x", request_id="mine", sampling=params))
    await anext(aiter(call))
    call.cancel()
    stream = stub.Stream(pb.StreamRequest(request_id="mine"))
    events = [(await anext(aiter(stream))).event]
    served.scheduler.drop_sessions()
    events += [r.event async for r in stream]
    assert collect(events)[1] == {0: served.scheduler.requests["mine"].outputs[0]}


async def test_wrong_stream_requests(served: Served) -> None:
    stub = GenerationServiceStub(served.channel)
    for request, code in (
        (pb.StreamRequest(request_id="unknown"), grpc.StatusCode.NOT_FOUND),
        (pb.StreamRequest(request_id=""), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.StreamRequest(request_id="x", from_index=[0] * 129), grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in stub.Stream(request):
                pass
        assert raised.value.code() is code
        assert len(served.gateway.client.requests) == 0


async def test_an_index_beyond_the_end_is_refused(serve: Serve, smollm2: TextModel) -> None:
    served = await serve(saying(smollm2, "one two", "three STOP and more"))
    whole = await generate(served, prompt="x", n=2, stop=["STOP"], request_id="mine")
    lengths = [r.finished.usage.num_output_tokens for r in whole if r.HasField("finished")]
    ids = collect(whole)[1]
    first, second = len(ids[0]), len(ids[1])
    assert sorted(lengths) == sorted([first, second])
    stub = GenerationServiceStub(served.channel)
    for from_index, message in (
        ([0, 0, 0], "from_index lists 3 choices; the request has 2"),
        ([100_000], "from_index says that 100000 tokens of choice 0 were received"),
        ([first + 1], f"choice 0 were received; there are no more than {first}"),
        ([first, second + 1], f"choice 1 were received; there are no more than {second}"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=message) as raised:
            async for _ in stub.Stream(pb.StreamRequest(request_id="mine", from_index=from_index)):
                pass
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    events = [r async for r in stub.Stream(pb.StreamRequest(request_id="mine", from_index=[first, second]))]
    assert sum(r.event.HasField("finished") for r in events) == 2


async def test_tokenize_and_detokenize(served: Served, smollm2: TextModel) -> None:
    stub = GenerationServiceStub(served.channel)
    tokens = await stub.Tokenize(pb.TokenizeRequest(text="Hello 42"))
    assert list(tokens.token_ids) == smollm2.encode("Hello 42", True)
    assert tokens.max_model_len == 2048
    ids = [1, *tokens.token_ids]
    text = await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))
    assert text.text == "Hello 42"
    text = await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids, keep_special_tokens=True))
    assert text.text == "<|im_start|>Hello 42"


async def test_list_models(served: Served) -> None:
    models = await GenerationServiceStub(served.channel).ListModels(pb.ListModelsRequest())
    assert [(model.name, model.vocab_size) for model in models.models] == [("test-model", 49152)]


async def test_a_broken_message_is_refused_and_does_no_harm(served: Served) -> None:
    for path in ("Generate", "Tokenize"):
        call: Any = served.channel.unary_unary(f"/kvern.v1.GenerationService/{path}")
        # Field 2, the prompt, holds bytes that are no UTF-8; then no message at all.
        for data in (b"\x12\x02\xff\xfe", b"\xff\xff"):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call(data, timeout=5)
            error = error_from_rpc(raised.value)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (error.field, error.limit) == ("request", "a protobuf message whose strings are UTF-8")
    assert texts(await generate(served, prompt="x", sampling=sampling_pb2.SamplingParams(max_tokens=1)))


async def test_health_follows_the_session(served: Served) -> None:
    health = health_pb2_grpc.HealthStub(served.channel)
    request = health_pb2.HealthCheckRequest(service="kvern.v1.GenerationService")

    async def status() -> int:
        return (await health.Check(request)).status

    async with asyncio.timeout(2):
        while await status() != health_pb2.HealthCheckResponse.SERVING:
            await asyncio.sleep(0.02)
    await served.scheduler.stop()
    async with asyncio.timeout(2):
        while await status() == health_pb2.HealthCheckResponse.SERVING:
            await asyncio.sleep(0.02)
    assert (await served.http.get("/health")).status_code == 503
    await served.scheduler.start(served.scheduler.address)
    async with asyncio.timeout(5):
        while (await served.http.get("/health")).status_code != 200:
            await asyncio.sleep(0.02)


async def test_reflection_lists_the_service(served: Served) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = await call.read()
    names = [service.name for service in listed.list_services_response.service]
    assert "kvern.v1.GenerationService" in names
    call.cancel()
