"""Reading requests and writing answers: bodies, JSON, headers, errors."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec

from kvern.errors import KvernError, invalid
from kvern.v1 import error_pb2
from kvern_gateway.limits import Limits
from kvern_gateway.validation import check_request_id, render

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

encode_json = msgspec.json.Encoder().encode

_E = error_pb2
# HTTP status and the `type` that OpenAI's clients know.
_STATUS = {
    _E.ERROR_CODE_INVALID_ARGUMENT: (400, "invalid_request_error"),
    _E.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED: (400, "invalid_request_error"),
    _E.ERROR_CODE_OVERLOADED: (429, "rate_limit_error"),
    _E.ERROR_CODE_MODEL_NOT_FOUND: (404, "not_found_error"),
    _E.ERROR_CODE_REQUEST_NOT_FOUND: (404, "not_found_error"),
    _E.ERROR_CODE_REQUEST_ID_CONFLICT: (409, "conflict_error"),
    _E.ERROR_CODE_CANCELLED: (499, "cancelled"),
    _E.ERROR_CODE_DEADLINE_EXCEEDED: (504, "timeout_error"),
    _E.ERROR_CODE_UNAVAILABLE: (503, "service_unavailable_error"),
    # Not 501: clients retry 5xx, and retrying doesn't help.
    _E.ERROR_CODE_UNIMPLEMENTED: (400, "invalid_request_error"),
    _E.ERROR_CODE_UNAUTHENTICATED: (401, "authentication_error"),
}
_DRAIN_BODY_S = 1.0


class BodyTooLarge(KvernError):
    def __init__(self, size: int | str, limit: int) -> None:
        super().__init__(
            error_pb2.ERROR_CODE_INVALID_ARGUMENT,
            f"the body has {size} bytes; at most {limit} are allowed",
            field="body",
            value=size,
            limit=limit,
        )


class BodyTooSlow(KvernError):
    def __init__(self, message: str, limit: str) -> None:
        super().__init__(error_pb2.ERROR_CODE_INVALID_ARGUMENT, message, field="body", limit=limit)


def status_of(error: KvernError) -> int:
    if isinstance(error, BodyTooLarge):
        return 413
    return 408 if isinstance(error, BodyTooSlow) else _STATUS.get(error.code, (500, ""))[0]


def error_object(error: KvernError) -> dict[str, Any]:
    """OpenAI's ``{"error": {message, type, param, code}}``."""
    kind = _STATUS.get(error.code, (500, "server_error"))[1]
    code = error_pb2.ErrorCode.Name(error.code).removeprefix("ERROR_CODE_").lower()
    return {"error": {"message": error.message, "type": kind, "param": error.field or None, "code": code}}


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """Raises :class:`BodyTooLarge` before reading more than the limit, ConnectionError when the client left."""
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limits.max_body_bytes:
        raise BodyTooLarge(int(declared), limits.max_body_bytes)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await _read_all(receive, limits)
    except TimeoutError:
        limit = f"{limits.body_timeout_s:g} s"
        raise BodyTooSlow(f"the body took longer than {limit} to arrive", limit) from None


async def _read_all(receive: Receive, limits: Limits) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ConnectionError("the client left")
        part = message.get("body", b"")
        size += len(part)
        if size > limits.max_body_bytes:
            raise BodyTooLarge(f"more than {limits.max_body_bytes}", limits.max_body_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _refuse_non_finite(body: bytes) -> None:
    """Many JSON writers put NaN and Infinity where JSON knows no such thing: the field that holds one is named.
    Raises KvernError, or nothing where that is not what is wrong."""
    try:
        pending = [("", json.loads(body))]
    except (ValueError, RecursionError):
        return
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{path}.{name}" if path else name, part) for name, part in value.items()]
        elif isinstance(value, list):
            pending += [(f"{path}[{index}]", part) for index, part in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            name = render(path)
            raise invalid(
                path[:100],
                f"{name} is {render(value)}; it must be a finite number",
                value=render(value),
                limit="finite",
            )


def parse_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object."""
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(
            "body", f"the body is not valid UTF-8 at byte {error.start}", limit="UTF-8 JSON"
        ) from None
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        _refuse_non_finite(body)
        raise invalid("body", f"the body is not valid JSON: {error}", limit="UTF-8 JSON") from None
    except RecursionError:
        raise invalid("body", "the body is nested too deeply", limit="UTF-8 JSON") from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise invalid(
            "body", f"the body is a JSON {kind}; it must be an object", value=kind, limit="an object"
        )
    return value


def header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


def echo_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """X-Request-Id comes back when it is one; a strange one is dropped, since it only serves tracing."""
    value = header(scope, b"x-request-id")
    if value is None:
        return []
    try:
        check_request_id("x-request-id", value)
    except KvernError:
        return []
    return [(b"x-request-id", value.encode())]


def body_digest(path: str, body: bytes) -> bytes:
    """SHA-256 of the request as the client sent it."""
    return hashlib.sha256(path.encode() + b"\0" + body).digest()


async def send_json(
    scope: Scope,
    send: Send,
    value: Any,
    status: int = 200,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    await send_bytes(scope, send, encode_json(value), b"application/json", status, headers)


async def send_bytes(
    scope: Scope,
    send: Send,
    data: bytes,
    content_type: bytes,
    status: int = 200,
    headers: Iterable[tuple[bytes, bytes]] = (),
    *,
    complete: bool = True,
) -> None:
    fixed = [
        (b"content-type", content_type),
        (b"content-length", b"%d" % len(data)),
        *echo_headers(scope),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": fixed})
    await send({"type": "http.response.body", "body": data, "more_body": not complete})


async def send_error(scope: Scope, receive: Receive, send: Send, error: KvernError) -> None:
    status = status_of(error)
    headers: list[tuple[bytes, bytes]] = []
    if status in (429, 503):
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_ms / 1000))))
    too_large = isinstance(error, BodyTooLarge)
    if too_large or isinstance(error, BodyTooSlow):
        headers.append((b"connection", b"close"))
    data = encode_json(error_object(error))
    await send_bytes(scope, send, data, b"application/json", status, headers, complete=not too_large)
    if too_large:
        # Closing with unread bytes resets the connection, and the client may never see why.
        try:
            async with asyncio.timeout(_DRAIN_BODY_S):
                while (message := await receive())["type"] == "http.request" and message.get("more_body"):
                    pass
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})
