"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: vLLM's bodies and answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from kvern.errors import KvernError, invalid
from kvern.v1 import adapter_pb2
from kvern_gateway.gateway import Gateway
from kvern_gateway.http.parse import log_unknown
from kvern_gateway.http.wire import Receive, Scope, Send, parse_object, read_body, send_bytes, send_error
from kvern_gateway.validation import Fields

# vLLM's, without effect here: numbers are the scheduler's to give, and layouts are read from the files.
_IGNORED = {"lora_int_id", "is_3d_lora_weight", "base_model_name"}

Handler = Callable[[Gateway, Fields], Awaitable[str]]


class AdapterRoute:
    """Answers with a line of text, or with an error as all routes do."""

    def __init__(self, gateway: Gateway, handler: Handler) -> None:
        self._gateway = gateway
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            values = parse_object(await read_body(scope, receive, self._gateway.limits))
            said = await self._handler(self._gateway, Fields(values))
            await send_bytes(scope, send, said.encode(), b"text/plain; charset=utf-8")
        except KvernError as error:
            await send_error(scope, receive, send, error)
        except ConnectionError:
            return


async def load(gateway: Gateway, fields: Fields) -> str:
    _check_known(fields, {"lora_name", "lora_path", "load_inplace"})
    name, path = _text(fields, "lora_name"), _text(fields, "lora_path")
    await gateway.load_adapter(
        adapter_pb2.LoadAdapterRequest(name=name, path=path, replace=fields.boolean("load_inplace"))
    )
    return f"Success: LoRA adapter '{name}' added successfully."


async def unload(gateway: Gateway, fields: Fields) -> str:
    _check_known(fields, {"lora_name"})
    name = _text(fields, "lora_name")
    await gateway.unload_adapter(adapter_pb2.UnloadAdapterRequest(name=name))
    return f"Success: LoRA adapter '{name}' removed successfully."


def _check_known(fields: Fields, known: set[str]) -> None:
    log_unknown(set(fields.values) - known - _IGNORED)


def _text(fields: Fields, field: str) -> str:
    value: Any = fields.get(field)
    if value is None or value == "":
        raise invalid(field, f"{field} is missing", limit="text")
    if not isinstance(value, str):
        raise fields.error(field, value, "text")
    return value
