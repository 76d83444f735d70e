"""kvern.v1.GenerationService: the gRPC surface. Converts, checks with the same validator, streams."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import grpc.aio

from kvern.errors import KvernError, invalid
from kvern.v1 import adapter_pb2, generation_pb2_grpc, media_pb2, session_pb2
from kvern.v1 import generation_pb2 as pb
from kvern.v1.model_pb2 import ModelInfo
from kvern_gateway import operations
from kvern_gateway.embedding import check_dimensions, check_length, embed
from kvern_gateway.gateway import Gateway, Identity, Routing, admit, mint_id
from kvern_gateway.generation import ORPHAN_GRACE_S, unavailable
from kvern_gateway.http.chat import chat_prompt
from kvern_gateway.http.parse import ParsedPrompt
from kvern_gateway.http.resume import beyond_the_end
from kvern_gateway.keys import Keys, current
from kvern_gateway.media.images import Source
from kvern_gateway.metrics import RequestClock
from kvern_gateway.outbox import Outbox
from kvern_gateway.room import overloaded
from kvern_gateway.traces import traced
from kvern_gateway.validation import (
    Fields,
    check_generates,
    check_model,
    check_prompt_length,
    check_request_id,
    check_token_ids,
    sampling_params,
)

SERVICE_NAME = "kvern.v1.GenerationService"
KEYED = (f"/{SERVICE_NAME}/", f"/{operations.SERVICE_NAME}/")

_SAMPLING_OPTIONAL = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
)
_SAMPLING_PLAIN = (
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "bad_token_ids",
    "allowed_token_ids",
    "logit_bias",
)
_SAMPLING = frozenset((*_SAMPLING_OPTIONAL, *_SAMPLING_PLAIN))
_SPELLED = {
    "include_stop_str_in_output": "include_stop_in_output",
    "skip_special_tokens": "keep_special_tokens",
    "messages": "chat.messages",
    "chat_template_kwargs": "chat.template_kwargs_json",
}


def _spell(name: str) -> str:
    return f"sampling.{name}" if name in _SAMPLING else _SPELLED.get(name, name)


def to_fields(request: pb.GenerateRequest) -> Fields:
    """The request's values under canonical names; what it left out is left out."""
    sampling: Any = request.sampling
    values: dict[str, Any] = {"model": request.model, "request_id": request.request_id or None}
    values |= {name: getattr(sampling, name) for name in _SAMPLING_OPTIONAL if sampling.HasField(name)}
    for name in _SAMPLING_PLAIN:
        value = getattr(sampling, name)
        if not value:
            continue
        if name == "logit_bias":
            value = dict(value)
        elif not isinstance(value, bool | int):
            value = list(value)
        values[name] = value
    if request.n:
        values["n"] = request.n
    if request.stop:
        values["stop"] = list(request.stop)
    values["include_stop_str_in_output"] = request.include_stop_in_output
    values["skip_special_tokens"] = not request.keep_special_tokens
    values["cache_salt"] = request.cache_salt
    values["priority"] = request.priority
    return Fields(values, _spell)


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Lets in who has a key, in the metadata ``authorization: Bearer KEY``. Health and reflection are for all."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        if handler_call_details.method.startswith(KEYED):
            metadata = dict(handler_call_details.invocation_metadata or ())
            self._keys.enter(metadata.get("authorization"))
        return await continuation(handler_call_details)


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Servicer over one :class:`Gateway`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        gateway = self._gateway
        with gateway.metrics.counting_refusals(), current().asking():
            start = time.monotonic()
            if gateway.draining:
                raise unavailable("this gateway is shutting down; another one will answer", 100)
            # A named request may be one that was admitted before: only the scheduler knows.
            if gateway.client.requests.room.full and not request.request_id:
                raise overloaded()
            fields = to_fields(request)
            gateway.adapter(request.model, named=bool(request.request_id))
            model = gateway.facts()
            check_generates(model)
            name, prompt_ids, media = await self._prompt(request, fields)
            check_prompt_length(name, len(prompt_ids), model)
            most = gateway.limits.max_logprobs
            params = sampling_params(
                fields,
                model,
                gateway.limits,
                len(prompt_ids),
                logprobs=fields.integer("logprobs", 0, most, None),
                prompt_logprobs=fields.integer("prompt_logprobs", 0, most, None),
            )
            options = gateway.text_options(fields, params)
            routing = gateway.routing(fields)
            identity = _identity(request, context)
            clock = RequestClock(gateway.metrics, start, routing.n)
            with traced(gateway.tracing, "kvern.v1.GenerationService/Generate", identity, clock):
                generation = gateway.submit(prompt_ids, params, options, identity, routing, media)
                outbox = Outbox(generation, options, clock, gateway.limits.max_unread_bytes)
                # The call is over, however it ended.
                cast(Any, context).add_done_callback(lambda _: generation.abandon(ORPHAN_GRACE_S))
                gateway.metrics.running += 1
                try:
                    try:
                        await admit([generation])
                    except KvernError as error:
                        error.field = _spell(error.field)
                        raise
                    gateway.metrics.prompt_tokens += len(prompt_ids)
                    gateway.metrics.request_prompt_tokens.observe(len(prompt_ids))
                    accepted = pb.Accepted(
                        request_id=identity.request_id,
                        model=request.model or gateway.names()[0],
                        num_prompt_tokens=len(prompt_ids),
                    )
                    yield pb.GenerateResponse(accepted=accepted)
                    generation.attach_sink(outbox)
                    async for response in outbox:
                        yield response
                finally:
                    gateway.metrics.running -= 1

    async def Embed(
        self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.EmbedResponse:
        gateway = self._gateway
        with gateway.metrics.counting_refusals(), current().asking():
            if gateway.draining:
                raise unavailable("this gateway is shutting down; another one will answer", 100)
            if gateway.client.requests.room.full:
                raise overloaded()
            adapter = gateway.adapter(request.model)
            model = gateway.facts()
            dimensions = check_dimensions(Fields({"dimensions": request.dimensions or None}), model)
            most = gateway.limits.max_embedding_inputs
            inputs = []
            for index, item in enumerate(Fields({"inputs": list(request.inputs)}).sequence("inputs", most)):
                name = f"inputs[{index}]"
                if item.WhichOneof("input") == "token_ids":
                    ids = check_token_ids(f"{name}.token_ids", list(item.token_ids.ids), model.vocab_size)
                else:
                    ids = await gateway.tokenize(f"{name}.text", item.text, True) if item.text else []
                check_length(name, len(ids), model)
                inputs.append(ids)
            if not inputs:
                raise invalid("inputs", "inputs is empty; give at least one", value=0, limit="≥ 1 input")
            identity = Identity(current().tenant.name, mint_id("embd"), deadline_unix_ms=_deadline(context))
            gateway.metrics.running += 1
            try:
                routing = Routing(
                    cache_salt=current().salted(""),
                    priority=current().prioritized(request.priority),
                    adapter=adapter,
                )
                vectors = await embed(gateway, inputs, identity, routing, dimensions)
            finally:
                gateway.metrics.running -= 1
            return pb.EmbedResponse(
                model=request.model or gateway.names()[0],
                embeddings=[pb.Embedding(values=vector) for vector in vectors],
                num_prompt_tokens=sum(map(len, inputs)),
            )

    async def Stream(
        self, request: pb.StreamRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.StreamResponse]:
        gateway = self._gateway
        start = time.monotonic()
        check_request_id("request_id", request.request_id)
        Fields({"from_index": list(request.from_index)}).sequence("from_index", gateway.limits.max_n)
        gateway.facts()
        generation = gateway.client.attach(request.request_id, current().tenant.name)
        # The call is over, however it ended.
        cast(Any, context).add_done_callback(lambda _: generation.abandon(ORPHAN_GRACE_S))
        gateway.metrics.running += 1
        try:
            await admit([generation])
            submit = generation.submit
            _check_from_index(request, submit)
            accepted = pb.Accepted(
                request_id=request.request_id,
                model=gateway.attached_model(submit),
                num_prompt_tokens=len(submit.prompt_token_ids) // 4,
            )
            yield pb.StreamResponse(event=pb.GenerateResponse(accepted=accepted))
            clock = RequestClock(gateway.metrics, start, submit.n)
            outbox = Outbox(
                generation,
                gateway.attached_options(submit),
                clock,
                gateway.limits.max_unread_bytes,
                list(request.from_index),
            )
            generation.attach_sink(outbox)
            async for event in outbox:
                yield pb.StreamResponse(event=event)
        finally:
            gateway.metrics.running -= 1

    async def Cancel(
        self, request: pb.CancelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.CancelResponse:
        check_request_id("request_id", request.request_id)
        return pb.CancelResponse(
            cancelled=self._gateway.client.requests.cancel_request(request.request_id, current().tenant.name)
        )

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.TokenizeResponse:
        gateway = self._gateway
        check_model(request.model, gateway.names())
        if request.WhichOneof("input") == "chat":
            ids = (await self._chat(request.chat, "chat")).token_ids
        else:
            ids = await gateway.tokenize("text", request.text, not request.skip_special_token_prefix)
        return pb.TokenizeResponse(token_ids=ids, max_model_len=gateway.facts().max_model_len)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DetokenizeResponse:
        gateway = self._gateway
        check_model(request.model, gateway.names())
        fields = Fields({"token_ids": list(request.token_ids)})
        ids = fields.token_ids("token_ids", gateway.limits.max_detokenize_ids, gateway.facts().vocab_size)
        text = gateway.text.decode(ids, skip_special_tokens=not request.keep_special_tokens)
        return pb.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListModelsResponse:
        gateway = self._gateway
        names = gateway.model_names()
        assert gateway.client.welcome is not None
        models = []
        for name in names:
            info = ModelInfo()
            info.CopyFrom(gateway.client.welcome.model)
            info.name = name
            models.append(info)
        return pb.ListModelsResponse(models=models)

    async def LoadAdapter(
        self, request: adapter_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> adapter_pb2.LoadAdapterResponse:
        return await self._gateway.load_adapter(request)

    async def UnloadAdapter(
        self, request: adapter_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> adapter_pb2.UnloadAdapterResponse:
        return await self._gateway.unload_adapter(request)

    async def ListAdapters(
        self, request: adapter_pb2.ListAdaptersRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> adapter_pb2.ListAdaptersResponse:
        self._gateway.facts()
        return adapter_pb2.ListAdaptersResponse(adapters=self._gateway.client.adapters.served)

    async def _prompt(
        self, request: pb.GenerateRequest, fields: Fields
    ) -> tuple[str, list[int], Sequence[media_pb2.MediaItem]]:
        gateway = self._gateway
        kind = request.WhichOneof("input")
        if kind == "prompt":
            add_special_tokens = not request.skip_special_token_prefix
            return "prompt", await gateway.tokenize("prompt", request.prompt, add_special_tokens), ()
        if kind == "prompt_token_ids":
            ids = list(request.prompt_token_ids.ids)
            return (
                "prompt_token_ids",
                check_token_ids("prompt_token_ids", ids, gateway.facts().vocab_size),
                (),
            )
        if kind == "chat":
            chat = await self._chat(request.chat, "chat")
            return "chat.messages", chat.token_ids, chat.media
        raise invalid(
            "input", "there is no input; set prompt, prompt_token_ids or chat", limit="one of three"
        )

    async def _chat(self, chat: pb.ChatInput, name: str) -> ParsedPrompt:
        messages = [
            {"role": message.role, "content": _content(f"chat.messages[{index}]", message)}
            for index, message in enumerate(chat.messages)
        ]
        kwargs: Any = {}
        if chat.template_kwargs_json:
            try:
                kwargs = json.loads(chat.template_kwargs_json)
            except (ValueError, RecursionError) as error:
                spelled = f"{name}.template_kwargs_json"
                raise invalid(
                    spelled, f"{spelled} is not valid JSON: {error}", limit="a JSON object"
                ) from None
        return await chat_prompt(
            self._gateway, Fields({"messages": messages, "chat_template_kwargs": kwargs}, _spell)
        )


def _content(name: str, message: pb.ChatMessage) -> str | list[dict[str, Any]]:
    """As a chat over HTTP has it."""
    if not message.parts:
        return message.content
    if message.content:
        raise invalid(f"{name}.parts", f"{name} has content and parts; set one of them", limit="one of two")
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(message.parts):
        if part.WhichOneof("part") == "image":
            source = Source(f"{name}.parts[{index}].image", data=part.image)
            parts.append({"type": "image_url", "image_url": source})
        elif part.WhichOneof("part") == "image_url":
            parts.append({"type": "image_url", "image_url": part.image_url})
        else:
            parts.append({"type": "text", "text": part.text})
    return parts


def _check_from_index(request: pb.StreamRequest, submit: session_pb2.Submit) -> None:
    """Of each choice of what was submitted."""
    if len(request.from_index) > submit.n:
        count = len(request.from_index)
        message = f"from_index lists {count} choices; the request has {submit.n}"
        raise invalid("from_index", message, value=count, limit=submit.n)
    for choice, index in enumerate(request.from_index):
        if index > submit.params.max_tokens:
            raise beyond_the_end("from_index", choice, index, submit.params.max_tokens)


def _identity(request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> Identity:
    named = bool(request.request_id)
    metadata = dict(context.invocation_metadata() or ())
    traceparent = metadata.get("traceparent", "")
    return Identity(
        current().tenant.name,
        check_request_id("request_id", request.request_id) if named else mint_id("gen"),
        resumable=named,
        body_digest=hashlib.sha256(request.SerializeToString(deterministic=True)).digest(),
        deadline_unix_ms=_deadline(context),
        traceparent=traceparent[:256] if isinstance(traceparent, str) else "",
    )


def _deadline(context: grpc.aio.ServicerContext[Any, Any]) -> int:
    """Unix milliseconds; 0: none. A call without a deadline reports the largest one there is."""
    remaining = context.time_remaining()
    return 0 if remaining is None or remaining > 10**8 else int((time.time() + remaining) * 1000)
