"""Requests that can't be decoded get the same typed error as other wrong ones.

gRPC itself answers INTERNAL, as if the fault were the server's, and prints a stack for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from kvern.errors import invalid


class Undecodable:
    """Stands in for the request."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def add_strictly(add: Callable[[Any, Any], None], servicer: object, server: grpc.aio.Server) -> None:
    """Like ``add(servicer, server)`` of the generated code, for methods that take one message."""
    add(servicer, _Recorder(server))


class _Recorder:
    """What generated code registers with; passes it on with the decoders wrapped."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """The registered handlers say the same; a server takes either."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        wrapped = {name: _wrap(handler) for name, handler in handlers.items()}
        generic = grpc.method_handlers_generic_handler(service, wrapped)
        self._server.add_generic_rpc_handlers((generic,))


def _wrap(handler: Any) -> Any:
    decode = handler.request_deserializer

    def decode_or_tell(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError as error:
            return Undecodable(str(error))

    if handler.unary_stream is not None:
        make, behaviour = grpc.unary_stream_rpc_method_handler, handler.unary_stream

        async def stream(request: Any, context: Any) -> Any:
            _check(request)
            async for response in behaviour(request, context):
                yield response

        return make(stream, decode_or_tell, handler.response_serializer)
    make, behaviour = grpc.unary_unary_rpc_method_handler, handler.unary_unary

    async def unary(request: Any, context: Any) -> Any:
        _check(request)
        return await behaviour(request, context)

    return make(unary, decode_or_tell, handler.response_serializer)


def _check(request: object) -> None:
    if isinstance(request, Undecodable):
        message = f"the request can't be decoded: {request.reason[:200]}"
        raise invalid("request", message, limit="a protobuf message whose strings are UTF-8")
