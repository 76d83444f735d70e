"""The OpenAI SDK against the running gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import openai
import pytest
from gateway.conftest import Serve, Served
from gateway.fake_scheduler import FakeScheduler, until

from kvern.errors import KvernError
from kvern.rpc.packing import unpack_i32
from kvern.v1 import error_pb2, session_pb2
from kvern_gateway.text.tokenizer import TextModel

MESSAGES = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with served.openai() as sdk:
        yield sdk


def saying(model: TextModel, *texts: str, end: Sequence[int] = (2,)) -> FakeScheduler:
    """A scheduler whose choices say the texts in turn, then an end token."""

    def script(submit: session_pb2.Submit, choice: int) -> list[int]:
        ids = [*model.encode(texts[choice % len(texts)], False), *end]
        return ids[: submit.params.max_tokens]

    return FakeScheduler(script)


async def test_chat(serve: Serve, smollm2: TextModel) -> None:
    served = await serve(saying(smollm2, "Red, blue 🎉 and green."))
    async with served.openai() as client:
        answer = await client.chat.completions.create(model="test-model", messages=MESSAGES)
    assert answer.choices[0].message.content == "Red, blue 🎉 and green."
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    [submit] = served.scheduler.submits
    prompt = smollm2.decode(unpack_i32(submit.prompt_token_ids).tolist(), skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(submit.prompt_token_ids) // 4
    assert answer.usage.completion_tokens == len(smollm2.encode("Red, blue 🎉 and green.", False)) + 1
    assert submit.params.max_tokens == 2048 - answer.usage.prompt_tokens
    assert len(submit.block_hashes) == 32 * (answer.usage.prompt_tokens // 16)


async def test_chat_streams_one_event_per_token(serve: Serve, smollm2: TextModel) -> None:
    text = "Naïve 日本語 🎉 text"
    served = await serve(saying(smollm2, text))
    async with served.openai() as client:
        stream = await client.chat.completions.create(
            model="test-model", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    usage = chunks[-1].usage
    assert usage is not None and not chunks[-1].choices
    deltas = [chunk.choices[0].delta.content for chunk in chunks[1:-1]]
    assert len(deltas) == usage.completion_tokens == len(smollm2.encode(text, False)) + 1
    assert "".join(delta or "" for delta in deltas) == text
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]


async def test_tokens_that_come_together_are_still_events_of_their_own(
    serve: Serve, smollm2: TextModel
) -> None:
    scheduler = saying(smollm2, "one two three four five")
    scheduler.tokens_per_step = 4
    served = await serve(scheduler)
    async with served.openai() as client:
        stream = await client.completions.create(model="test-model", prompt="x", max_tokens=50, stream=True)
        texts = [chunk.choices[0].text async for chunk in stream]
    assert texts == ["one", " two", " three", " four", " five", ""]


async def test_n_choices(serve: Serve, smollm2: TextModel) -> None:
    served = await serve(saying(smollm2, "first", "second one"))
    async with served.openai() as client:
        answer = await client.chat.completions.create(model="test-model", messages=MESSAGES, n=2)
        assert [choice.message.content for choice in answer.choices] == ["first", "second one"]
        texts = {0: "", 1: ""}
        stream = await client.completions.create(
            model="test-model", prompt="x", n=2, max_tokens=9, stream=True
        )
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "first", 1: "second one"}
    assert served.scheduler.submits[0].n == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_over_several_tokens(serve: Serve, smollm2: TextModel, stream: bool) -> None:
    # Long enough not to have ended before the stop string is seen.
    served = await serve(saying(smollm2, "A mill. It grinds.\n\nUser: more" + " and more" * 300))
    async with served.openai() as client:
        answer = await client.completions.create(
            model="test-model", prompt="x", max_tokens=600, stop=["ds.\n\nUs", "never"], stream=stream
        )
        if isinstance(answer, openai.AsyncStream):
            chunks = [chunk async for chunk in answer]
            text = "".join(chunk.choices[0].text for chunk in chunks)
            last = chunks[-1].choices[0]
        else:
            last, text = answer.choices[0], answer.choices[0].text
    assert text == "A mill. It grin"
    assert last.finish_reason == "stop"
    assert last.model_dump()["stop_reason"] == "ds.\n\nUs"
    await until(lambda: served.scheduler.cancels)
    [cancel] = served.scheduler.cancels
    assert cancel.stopped


async def test_include_stop_str_in_output(serve: Serve, smollm2: TextModel) -> None:
    served = await serve(saying(smollm2, "one two three"))
    async with served.openai() as client:
        answer = await client.completions.create(
            model="test-model",
            prompt="x",
            max_tokens=99,
            stop="two",
            extra_body={"include_stop_str_in_output": True},
        )
    assert answer.choices[0].text == "one two"


async def test_a_stop_token_is_named_and_not_shown(serve: Serve, smollm2: TextModel) -> None:
    [dot] = smollm2.encode(".", False)
    served = await serve(saying(smollm2, "Done", end=[dot]))
    async with served.openai() as client:
        options = {"model": "test-model", "prompt": "x", "max_tokens": 99}
        answer = await client.completions.create(**options, extra_body={"stop_token_ids": [dot]})
        assert answer.choices[0].text == "Done"
        assert answer.choices[0].model_dump()["stop_reason"] == dot
        shown = {"stop_token_ids": [dot], "include_stop_str_in_output": True}
        answer = await client.completions.create(**options, extra_body=shown)
        assert answer.choices[0].text == "Done."


async def test_special_tokens_on_demand(serve: Serve, smollm2: TextModel) -> None:
    served = await serve(saying(smollm2, "a<|im_start|>b"))
    async with served.openai() as client:
        options = {"model": "test-model", "prompt": "x", "max_tokens": 99}
        answer = await client.completions.create(**options)
        assert answer.choices[0].text == "ab"
        answer = await client.completions.create(**options, extra_body={"skip_special_tokens": False})
        assert answer.choices[0].text == "a<|im_start|>b"


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(serve: Serve, smollm2: TextModel, stream: bool) -> None:
    served = await serve(saying(smollm2, "é 🎉", end=[]))
    async with served.openai() as client:
        answer = await client.chat.completions.create(
            model="test-model", messages=MESSAGES, logprobs=True, top_logprobs=2, stream=stream
        )
        if isinstance(answer, openai.AsyncStream):
            parts = [chunk.choices[0].logprobs async for chunk in answer]
            content = [entry for part in parts if part for entry in part.content or ()]
        else:
            assert answer.choices[0].logprobs is not None
            content = answer.choices[0].logprobs.content or []
    assert b"".join(bytes(entry.bytes or ()) for entry in content).decode() == "é 🎉"
    assert {entry.logprob for entry in content} == {-0.5}
    assert [top.logprob for top in content[0].top_logprobs] == [-0.5, -1.5]
    assert content[0].top_logprobs[0].token == content[0].token


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs_with_echo(serve: Serve, smollm2: TextModel, stream: bool) -> None:
    served = await serve(saying(smollm2, " grinds slowly", end=[]))
    async with served.openai() as client:
        answer = await client.completions.create(
            model="test-model", prompt="The mill", max_tokens=9, logprobs=1, echo=True, stream=stream
        )
        if isinstance(answer, openai.AsyncStream):
            chunks = [chunk.choices[0] async for chunk in answer]
        else:
            chunks = answer.choices
    text = "".join(chunk.text for chunk in chunks)
    assert text == "The mill grinds slowly"
    tokens, offsets, values = [], [], []
    for chunk in chunks:
        assert chunk.logprobs is not None
        tokens += chunk.logprobs.tokens or []
        offsets += chunk.logprobs.text_offset or []
        values += chunk.logprobs.token_logprobs or []
    assert "".join(tokens) == text
    assert [
        text[offset : offset + len(token)] for offset, token in zip(offsets, tokens, strict=True)
    ] == tokens
    assert values[0] is None
    assert set(values[1:]) == {-0.5}
    assert served.scheduler.submits[0].params.prompt_logprobs == 1


async def test_echo_alone_scores_the_prompt(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="test-model", prompt="The mill", max_tokens=0, logprobs=0, echo=True
    )
    choice = answer.choices[0]
    assert choice.text == "The mill"
    assert choice.logprobs is not None and choice.logprobs.tokens == ["The", " mill"]
    assert answer.usage is not None and answer.usage.completion_tokens == 0


async def test_prompts_in_every_form(served: Served, client: openai.AsyncOpenAI, smollm2: TextModel) -> None:
    ids = smollm2.encode("Two mills", False)
    for prompt, count in (("Two mills", 1), (ids, 1), (["Two mills", "One"], 2), ([ids, [5]], 2)):
        served.scheduler.submits.clear()
        answer = await client.completions.create(model="test-model", prompt=prompt, max_tokens=2)
        assert [choice.index for choice in answer.choices] == list(range(count))
        assert unpack_i32(served.scheduler.submits[0].prompt_token_ids).tolist() == ids
        assert len({submit.request_id for submit in served.scheduler.submits}) == count


async def test_several_prompts_stream_under_consecutive_indexes(serve: Serve, smollm2: TextModel) -> None:
    served = await serve(saying(smollm2, "first", "second"))
    texts = dict.fromkeys(range(4), "")
    async with served.openai() as client:
        stream = await client.completions.create(
            model="test-model", prompt=["x", "y y"], n=2, max_tokens=9, stream=True, echo=True
        )
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "xfirst", 1: "xsecond", 2: "y yfirst", 3: "y ysecond"}


async def test_a_token_above_the_models_vocabulary_is_refused(serve: Serve) -> None:
    served = await serve(FakeScheduler(vocab_size=49_150))
    async with served.openai() as client:
        assert await client.completions.create(model="test-model", prompt="Hi", max_tokens=1)
        last = served.gateway.text.token_text(49_151)
        with pytest.raises(openai.BadRequestError, match="a token id from 0 to 49149"):
            await client.completions.create(model="test-model", prompt=last, max_tokens=1)


async def test_vllm_extensions_reach_the_scheduler(served: Served, client: openai.AsyncOpenAI) -> None:
    await client.completions.create(
        model="test-model",
        prompt="x",
        max_tokens=20,
        seed=-7,
        presence_penalty=0.5,
        logit_bias={"5": 2},
        extra_body={
            "top_k": -1,
            "min_p": 0.25,
            "repetition_penalty": 1.5,
            "min_tokens": 3,
            "ignore_eos": True,
            "stop_token_ids": [9],
            "allowed_token_ids": [1, 2, 3],
            "bad_words": ["mill"],
            "cache_salt": "s",
            "priority": -2,
            "request_id": "mine-1",
        },
    )
    [submit] = served.scheduler.submits
    params = submit.params
    assert (params.top_k, params.min_p, params.repetition_penalty, params.min_tokens) == (0, 0.25, 1.5, 3)
    assert params.ignore_eos and list(params.stop_token_ids) == [9]
    assert list(params.allowed_token_ids) == [1, 2, 3]
    assert len(params.bad_token_ids) >= 1
    assert dict(params.logit_bias) == {5: 2.0}
    assert params.seed == 2**64 - 7
    assert (submit.cache_salt, submit.priority, submit.request_id, submit.resumable) == (
        "s",
        -2,
        "mine-1",
        True,
    )


async def test_defaults_are_all_resolved(served: Served, client: openai.AsyncOpenAI) -> None:
    await client.completions.create(model="test-model", prompt="x")
    await client.completions.create(model="test-model", prompt="x")
    first, second = (submit.params for submit in served.scheduler.submits)
    assert (first.temperature, first.top_p, first.top_k, first.min_p) == (1, 1, 0, 0)
    assert first.repetition_penalty == 1 and first.max_tokens == 16
    resolved = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "seed")
    assert all(first.HasField(name) for name in (*resolved, "frequency_penalty", "max_tokens"))
    assert not first.HasField("logprobs")
    assert first.seed != second.seed


async def test_a_small_kv_pool_bounds_the_default_and_nothing_else(serve: Serve) -> None:
    scheduler = FakeScheduler()
    scheduler.welcome.kv_capacity_tokens = 64
    served = await serve(scheduler)
    async with served.openai() as client:
        await client.chat.completions.create(model="test-model", messages=MESSAGES)
        await client.chat.completions.create(model="test-model", messages=MESSAGES, max_tokens=100)
    first, second = scheduler.submits
    assert first.params.max_tokens == 64 - len(first.prompt_token_ids) // 4
    assert second.params.max_tokens == 100


async def test_token_ids_on_demand(serve: Serve, smollm2: TextModel) -> None:
    served = await serve(saying(smollm2, "one two", end=[]))
    async with served.openai() as client:
        answer = await client.completions.create(
            model="test-model", prompt="x y", max_tokens=9, extra_body={"return_token_ids": True}
        )
        stream = await client.completions.create(
            model="test-model", prompt="x y", max_tokens=9, stream=True, extra_body={"return_token_ids": True}
        )
        chunks = [chunk.choices[0].model_dump() async for chunk in stream]
    choice = answer.choices[0].model_dump()
    assert choice["token_ids"] == smollm2.encode("one two", False)
    assert choice["prompt_token_ids"] == smollm2.encode("x y", False)
    assert chunks[0]["prompt_token_ids"] == smollm2.encode("x y", False)
    assert [i for chunk in chunks for i in chunk.get("token_ids") or ()] == smollm2.encode("one two", False)


async def test_prompt_logprobs(served: Served, client: openai.AsyncOpenAI, smollm2: TextModel) -> None:
    answer = await client.completions.create(
        model="test-model", prompt="The mill", max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    first, second = answer.choices[0].model_dump()["prompt_logprobs"]
    [_, mill] = smollm2.encode("The mill", False)
    assert first is None
    assert second[str(mill)] == {"logprob": -0.5, "rank": 1, "decoded_token": " mill"}


async def test_continuous_usage(served: Served, client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="test-model",
        prompt="x",
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
    )
    counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage]
    assert counts == [1, 2, 3, 3]


async def test_models(served: Served, client: openai.AsyncOpenAI) -> None:
    listed = await client.models.list()
    assert [model.id for model in listed.data] == ["test-model"]
    assert (await client.models.retrieve("test-model")).model_dump()["max_model_len"] == 2048
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (error_pb2.ERROR_CODE_OVERLOADED, openai.RateLimitError),
        (error_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, openai.BadRequestError),
        (error_pb2.ERROR_CODE_UNAVAILABLE, openai.InternalServerError),
        (error_pb2.ERROR_CODE_REQUEST_ID_CONFLICT, openai.ConflictError),
    ],
)
async def test_what_the_scheduler_refuses(
    served: Served,
    client: openai.AsyncOpenAI,
    code: error_pb2.ErrorCode.ValueType,
    error: type[openai.APIStatusError],
) -> None:
    served.scheduler.refuse = KvernError(code, "so many words", field="f", retry_after_ms=1500)
    for stream in (False, True):
        with pytest.raises(error, match="so many words") as raised:
            await client.completions.create(model="test-model", prompt="x", stream=stream)
        if raised.value.status_code in (429, 503):
            assert raised.value.response.headers["retry-after"] == "2"
        assert raised.value.param == "f"
