"""What operators read over HTTP: timelines of requests, the block map, the cell's status. JSON is that of the messages in
operations.proto, under their field names."""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from typing import Any

from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]

from kvern.errors import KvernError, invalid
from kvern.v1 import operations_pb2 as pb
from kvern_gateway import operations
from kvern_gateway.gateway import Gateway
from kvern_gateway.http.wire import Receive, Scope, Send, send_bytes, send_error, send_json
from kvern_gateway.timeline.picture import draw
from kvern_gateway.timeline.words import Line, tell
from kvern_gateway.validation import Fields

SVG = b"image/svg+xml"


class _Route(ABC):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @abstractmethod
    async def answer(self, scope: Scope, send: Send) -> None:
        """Raises KvernError."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.answer(scope, send)
        except KvernError as error:
            await send_error(scope, receive, send, error)
        except ConnectionError:
            return


class TimelineJson(_Route):
    """With the same in words: a ``title``, and ``lines``."""

    async def answer(self, scope: Scope, send: Send) -> None:
        timeline = await operations.get_timeline(self._gateway, scope["path_params"]["name"])
        story = tell(timeline)
        value = {**as_json(timeline), "title": story.title, "lines": [_line(line) for line in story.lines]}
        await send_json(scope, send, value)


class TimelineSvg(_Route):
    async def answer(self, scope: Scope, send: Send) -> None:
        timeline = await operations.get_timeline(self._gateway, scope["path_params"]["name"])
        await send_bytes(scope, send, draw(tell(timeline)).encode(), SVG)


class Timelines(_Route):
    """``?limit=N``."""

    async def answer(self, scope: Scope, send: Send) -> None:
        _, _, limit = scope["query_string"].decode("latin-1").partition("limit=")
        if limit and not (limit.isdigit() and len(limit) < 6):
            raise invalid("limit", f"limit is {limit[:20]!r}; it must be a whole number", value=limit[:20])
        heads = await operations.list_timelines(self._gateway, int(limit or 0))
        await send_json(scope, send, {"data": as_json(heads).get("timelines", [])})


class Blocks(_Route):
    """``states`` is base64, a byte a block."""

    async def answer(self, scope: Scope, send: Send) -> None:
        found: pb.GetBlocksResponse = await self._gateway.client.operate("GetBlocks", pb.GetBlocksRequest())
        groups = [
            {
                "group_id": group.group_id,
                "block_size": group.block_size,
                "states": base64.b64encode(group.states).decode(),
            }
            for group in found.groups
        ]
        await send_json(scope, send, {"groups": groups})


class Status(_Route):
    async def answer(self, scope: Scope, send: Send) -> None:
        found = await self._gateway.client.operate("GetCellStatus", pb.GetCellStatusRequest())
        status = as_json(found.status)
        for group in status["groups"]:
            group["model"] = group["model"]["name"] if "model" in group else ""
        metrics = self._gateway.metrics
        counters = {
            "open_requests": metrics.running,
            "prompt_tokens": metrics.prompt_tokens,
            "generation_tokens": metrics.generation_tokens,
            "refused": sum(metrics.refused.values()),
            "time_to_first_token": metrics.time_to_first_token.totals,
            "inter_token": metrics.inter_token.totals,
        }
        await send_json(scope, send, {**status, "gateway": counters})


async def profile(gateway: Gateway, values: dict[str, Any]) -> dict[str, Any]:
    """``{"seconds": 5}``. The trace is gzipped, in base64."""
    seconds = Fields(values).number("seconds", 0.1, 60.0, 5.0)
    request = pb.ProfileCellRequest(milliseconds=int(1000 * seconds))
    return as_json(await operations.profile(gateway, request))


async def set_logging(gateway: Gateway, values: dict[str, Any]) -> dict[str, Any]:
    """``{"requests": true, "steps": false}``; what is absent stays."""
    fields = Fields(values)
    wanted = {name: fields.boolean(name) for name in ("requests", "steps") if name in values}
    return as_json(await operations.set_logging(gateway, pb.SetLoggingRequest(**wanted)))


def as_json(message: Any) -> dict[str, Any]:
    """64-bit integers stay numbers: they count steps and tokens, and fit a double."""
    value: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _numbers(value)


def _numbers(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _numbers(part, key) for key, part in value.items()}
    if isinstance(value, list):
        return [_numbers(part, name) for part in value]
    return int(value) if name in _WIDE and isinstance(value, str) else value


_WIDE = {"count", "calls", "step", "steps", "epoch", "tokens_ahead", "pending_prompt_tokens"}


def _line(line: Line) -> dict[str, Any]:
    return {
        "choice": line.choice,
        "kind": line.kind,
        "start": round(line.start, 6),
        "seconds": round(line.seconds, 6),
        "text": line.text,
    }
