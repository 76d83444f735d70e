"""Between :class:`kvern.errors.KvernError` and gRPC statuses.

Services raise :class:`KvernError`; :class:`ErrorInterceptor` is the only place that turns exceptions into status
codes, and :func:`error_from_rpc` the only one that reads them back.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from kvern.errors import KvernError
from kvern.v1 import error_pb2

ERROR_TRAILER = "kvern-error-bin"
PUSHBACK_TRAILER = "grpc-retry-pushback-ms"

_STATUS = {
    error_pb2.ERROR_CODE_INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    error_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED: grpc.StatusCode.INVALID_ARGUMENT,
    error_pb2.ERROR_CODE_OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    error_pb2.ERROR_CODE_MODEL_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    error_pb2.ERROR_CODE_REQUEST_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    error_pb2.ERROR_CODE_REQUEST_ID_CONFLICT: grpc.StatusCode.ALREADY_EXISTS,
    error_pb2.ERROR_CODE_CANCELLED: grpc.StatusCode.CANCELLED,
    error_pb2.ERROR_CODE_DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    error_pb2.ERROR_CODE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    error_pb2.ERROR_CODE_UNIMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    error_pb2.ERROR_CODE_UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    error_pb2.ERROR_CODE_FENCED: grpc.StatusCode.FAILED_PRECONDITION,
}

log = logging.getLogger(__name__)


def status_of(error: KvernError) -> grpc.StatusCode:
    return _STATUS.get(error.code, grpc.StatusCode.INTERNAL)


def error_from_rpc(error: grpc.aio.AioRpcError) -> KvernError:
    """The KvernError that a peer sent, or one made of the bare status of a peer that is away."""
    trailer: Any = error.trailing_metadata()
    for key, value in trailer or ():
        if key == ERROR_TRAILER and isinstance(value, bytes):
            return KvernError.from_pb(error_pb2.Error.FromString(value))
    by_status = {status: code for code, status in reversed(_STATUS.items())}
    code = by_status.get(error.code(), error_pb2.ERROR_CODE_INTERNAL)
    return KvernError(code, error.details() or error.code().name)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns exceptions of handlers into statuses. Unforeseen ones become INTERNAL, logged with a stack."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        try:
            handler = await continuation(handler_call_details)
        except KvernError as error:
            return _refusal(error)
        if handler is None or not handler_call_details.method.startswith("/kvern."):
            return handler
        kwargs = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.response_streaming:
            wrap: Any = _streaming(handler.stream_stream or handler.unary_stream)
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
        else:
            wrap = _unary(handler.stream_unary or handler.unary_unary)
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
        return make(wrap, **kwargs)


def _refusal(error: KvernError) -> grpc.RpcMethodHandler:
    """Of any call: an inner interceptor will not have it."""

    async def refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
        await _abort(context, error)

    return grpc.unary_unary_rpc_method_handler(refuse)


def _unary(behaviour: Any) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await behaviour(request, context)
        except Exception as error:
            await _abort(context, error)

    return call


def _streaming(behaviour: Any) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async for response in behaviour(request, context):
                yield response
        except Exception as error:
            await _abort(context, error)

    return call


async def _abort(context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError | grpc.aio.BaseError):
        raise error
    if not isinstance(error, KvernError):
        log.exception("unforeseen error in a handler")
        error = KvernError(error_pb2.ERROR_CODE_INTERNAL, "internal error; the service's log has the stack")
    trailers: list[tuple[str, str | bytes]] = [(ERROR_TRAILER, error.to_pb().SerializeToString())]
    if error.retry_after_ms:
        # What gRPC's own retries go by, where a client's service config has them.
        trailers.append((PUSHBACK_TRAILER, str(error.retry_after_ms)))
    await context.abort(status_of(error), error.message, trailing_metadata=tuple(trailers))
    raise AssertionError("abort returned")
