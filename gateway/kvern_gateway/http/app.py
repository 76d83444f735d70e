"""All HTTP routes. The two generation routes are plain ASGI apps, the others Starlette endpoints."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kvern.errors import KvernError, invalid
from kvern.v1 import error_pb2
from kvern_gateway.gateway import Gateway
from kvern_gateway.http import adapters
from kvern_gateway.http.chat import chat_prompt, parse_chat
from kvern_gateway.http.completions import parse_completion
from kvern_gateway.http.embeddings import EmbeddingsRoute
from kvern_gateway.http.generate import GenerateRoute
from kvern_gateway.http.operations import (
    Blocks,
    Status,
    TimelineJson,
    Timelines,
    TimelineSvg,
    profile,
    set_logging,
)
from kvern_gateway.http.ui import UI_FILES, Ui
from kvern_gateway.http.wire import (
    Receive,
    Scope,
    Send,
    encode_json,
    error_object,
    header,
    parse_object,
    read_body,
    send_bytes,
    send_error,
    send_json,
)
from kvern_gateway.validation import Fields, check_model, check_token_ids

VERSION = importlib.metadata.version("kvern")
# The page is public; what it shows is not.
PUBLIC = {"/", "/ui", *(f"/ui/{name}" for name in UI_FILES), "/health", "/ping", "/metrics", "/version"}
METRICS_TYPE = b"text/plain; version=1.0.0; charset=utf-8"

JsonHandler = Callable[[Gateway, dict[str, Any]], Awaitable[dict[str, Any]]]


def create_app(gateway: Gateway) -> ASGIApp:
    """The ASGI app; it must be served by :class:`~kvern_gateway.http.protocol.Connection`."""
    post, get = ["POST"], ["GET"]
    cold = functools.partial(_JsonRoute, gateway)
    ui = Ui()
    routes = [
        Route("/v1/chat/completions", GenerateRoute(gateway, parse_chat), methods=post),
        Route("/v1/completions", GenerateRoute(gateway, parse_completion), methods=post),
        Route("/v1/embeddings", EmbeddingsRoute(gateway), methods=post),
        Route("/v1/load_lora_adapter", adapters.AdapterRoute(gateway, adapters.load), methods=post),
        Route("/v1/unload_lora_adapter", adapters.AdapterRoute(gateway, adapters.unload), methods=post),
        Route("/tokenize", cold(_tokenize), methods=post),
        Route("/detokenize", cold(_detokenize), methods=post),
        Route("/v1/models", cold(_models, body=False), methods=get),
        Route("/v1/models/{name:path}", _ModelRoute(gateway), methods=get),
        Route("/version", cold(_version, body=False), methods=get),
        Route("/load", cold(_load, body=False), methods=get),
        Route("/v1/requests", Timelines(gateway), methods=get),
        Route("/v1/requests/{name:path}/timeline", TimelineJson(gateway), methods=get),
        Route("/v1/requests/{name:path}/timeline.svg", TimelineSvg(gateway), methods=get),
        Route("/v1/blocks", Blocks(gateway), methods=get),
        Route("/v1/status", Status(gateway), methods=get),
        Route("/", ui, methods=get),
        Route("/ui", ui, methods=get),
        Route("/ui/{name}", ui, methods=get),
        Route("/v1/profile", cold(profile), methods=post),
        Route("/v1/logging", cold(set_logging), methods=post),
        Route("/health", _Health(gateway), methods=get),
        Route("/ping", _Health(gateway), methods=[*get, *post]),
        Route("/metrics", _MetricsRoute(gateway), methods=get),
    ]
    handlers: Any = {404: _not_found, 405: _wrong_method, 500: _internal}
    app = Starlette(routes=routes, exception_handlers=handlers)
    return _Guarded(app, gateway) if gateway.keys.required else app


class _Guarded:
    """Lets in who has a key. Who watches the service needs none."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in PUBLIC:
            try:
                self._gateway.keys.enter(header(scope, b"authorization"))
            except KvernError as error:
                self._gateway.metrics.count_refusal(error)
                await send_error(scope, receive, send, error)
                return
        await self._app(scope, receive, send)


class _JsonRoute:
    """Reads a JSON object where ``body``, answers with one."""

    def __init__(self, gateway: Gateway, handler: JsonHandler, body: bool = True) -> None:
        self._gateway = gateway
        self._handler = handler
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            values = {}
            if self._body:
                values = parse_object(await read_body(scope, receive, self._gateway.limits))
            await send_json(scope, send, await self._handler(self._gateway, values))
        except KvernError as error:
            await send_error(scope, receive, send, error)
        except ConnectionError:
            return


async def _models(gateway: Gateway, _: dict[str, Any]) -> dict[str, Any]:
    return {"object": "list", "data": [_model_card(gateway, name) for name in gateway.names()]}


def _model_card(gateway: Gateway, name: str) -> dict[str, Any]:
    """An adapter has its folder for a root and the model for a parent, as in vLLM."""
    models = gateway.model_names()
    adapter = None if name in models else gateway.client.adapters.find(name)
    return {
        "id": name,
        "object": "model",
        "created": int(gateway.started_at),
        "owned_by": "kvern",
        "root": gateway.facts().name if adapter is None else adapter.path,
        "parent": None if adapter is None else models[0],
        "max_model_len": gateway.facts().max_model_len,
        "permission": [],
    }


class _ModelRoute:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            name = scope["path_params"]["name"]
            check_model(name, self._gateway.names())
            await send_json(scope, send, _model_card(self._gateway, name))
        except KvernError as error:
            await send_error(scope, receive, send, error)


async def _version(_: Gateway, __: dict[str, Any]) -> dict[str, Any]:
    return {"version": VERSION}


async def _load(gateway: Gateway, _: dict[str, Any]) -> dict[str, Any]:
    return {"server_load": gateway.metrics.running}


async def _tokenize(gateway: Gateway, values: dict[str, Any]) -> dict[str, Any]:
    """vLLM's: either ``prompt`` or ``messages``."""
    fields = Fields(values)
    check_model(fields.get("model"), gateway.names())
    if fields.get("messages") is not None:
        ids = (await chat_prompt(gateway, fields)).token_ids
    else:
        prompt = fields.get("prompt")
        if not isinstance(prompt, str):
            raise fields.error("prompt", prompt, "a string (or give messages)")
        ids = await gateway.tokenize("prompt", prompt, fields.boolean("add_special_tokens", True))
    strings = None
    if fields.boolean("return_token_strs"):
        strings = [gateway.text.tokenizer.id_to_token(token_id) for token_id in ids]
    return {
        "count": len(ids),
        "max_model_len": gateway.facts().max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }


async def _detokenize(gateway: Gateway, values: dict[str, Any]) -> dict[str, Any]:
    fields = Fields(values)
    check_model(fields.get("model"), gateway.names())
    if not isinstance(fields.get("tokens"), list):
        raise fields.error("tokens", fields.get("tokens"), "a list of token ids")
    tokens = fields.sequence("tokens", gateway.limits.max_detokenize_ids)
    ids = check_token_ids("tokens", tokens, gateway.facts().vocab_size)
    return {"prompt": gateway.text.decode(ids, skip_special_tokens=False)}


class _Health:
    """200 while a scheduler session is up and the gateway isn't draining, else 503."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(scope, send, b"", b"text/plain", 200 if self._gateway.ready else 503)


class _MetricsRoute:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(scope, send, self._gateway.metrics.render(), METRICS_TYPE)


def _error_response(error: KvernError, status: int) -> Response:
    return Response(encode_json(error_object(error)), status, media_type="application/json")


async def _not_found(request: Request, _: Exception) -> Response:
    return _error_response(invalid("path", f"there is nothing at {request.url.path[:200]}"), 404)


async def _wrong_method(request: Request, _: Exception) -> Response:
    return _error_response(invalid("method", f"{request.method} is not allowed here"), 405)


async def _internal(_: Request, __: Exception) -> Response:
    error = KvernError(error_pb2.ERROR_CODE_INTERNAL, "internal error; the gateway's log has the stack")
    return _error_response(error, 500)
