"""One request on one connection to one gateway, over OpenAI's server-sent events or gRPC.

Each surface turns what comes into :mod:`chaos_history` events and remembers from where another gateway has to go on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc.aio

from kvern.errors import KvernError
from kvern.rpc.channel import create_channel
from kvern.rpc.errors import error_from_rpc
from kvern.v1 import error_pb2, generation_pb2, generation_pb2_grpc, sampling_pb2
from kvern_gateway.cli.chaos_history import Ended, Event, Opened, Piece
from kvern_gateway.cli.chaos_stack import HOST, GatewayAddress

# A client that hears nothing for so long tries another gateway.
PATIENCE_S = 3.0
# Of refusals and of answers, after which the same request may be tried again.
_RETRYABLE = {429, 503}


@dataclass(frozen=True)
class Template:
    """A request that is repeated under many ids; its output is the same each time.

    ``surface``: completions, chat or grpc. One that is not ``named`` tells the server no id, so it cannot outlive its
    gateway; everything else it outlives.
    """

    name: str
    surface: str
    prompt: str
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    n: int = 1
    stop: str = ""
    named: bool = True


class Broken(Exception):
    """The connection is gone, or silent: go on at another gateway."""


class Refused(Exception):
    """An error of the request's own."""

    def __init__(self, message: str, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class Surface(Protocol):
    """One request's client side, kept over its connections."""

    def connect(self, gateway: GatewayAddress, replay: bool) -> AsyncGenerator[Event, None]:
        """Yields Opened once the server has accepted, then what it sends, until all choices have ended.

        ``replay`` asks for everything from the start instead of what is lacking. Raises Broken and Refused.
        """
        ...


@dataclass
class HttpSurface:
    """OpenAI's completions or chat, streamed; goes on by the same POST with Last-Event-ID."""

    template: Template
    request_id: str
    last_id: str | None = None
    due: list[int] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)

    def body(self) -> dict[str, Any]:
        template = self.template
        body: dict[str, Any] = {
            "max_tokens": template.max_tokens,
            "temperature": template.temperature,
            "seed": template.seed,
            "n": template.n,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        if template.surface == "chat":
            body["messages"] = [{"role": "user", "content": template.prompt}]
        else:
            body["prompt"] = template.prompt
        if template.stop:
            body["stop"] = [template.stop]
        if template.named:
            body["request_id"] = self.request_id
        return body

    async def connect(self, gateway: GatewayAddress, replay: bool) -> AsyncGenerator[Event, None]:
        if replay or self.last_id is None:
            # Also when this connection fails: the next one goes on from there.
            self.last_id, self.due, self.ended = None, [0] * self.template.n, set()
        headers = {} if self.last_id is None else {"Last-Event-ID": self.last_id}
        opened = False
        path = "/v1/chat/completions" if self.template.surface == "chat" else "/v1/completions"
        async with aclosing(post_events(gateway, path, self.body(), headers)) as received:
            async for event_id, data in received:
                if not opened:
                    opened = True
                    yield Opened(tuple(self.due), frozenset(self.ended))
                if data == b"[DONE]":
                    return
                events = self._read(json.loads(data)) if data else []
                if event_id is not None:
                    self.last_id = event_id
                    self._believe_id(event_id)
                for event in events:
                    yield event
        raise Broken("the stream ended without [DONE]")

    def _read(self, parsed: dict[str, Any]) -> list[Event]:
        if error := parsed.get("error"):
            raise Refused(str(error.get("message")), error.get("code") in ("unavailable", "cancelled"))
        events: list[Event] = []
        for choice in parsed["choices"]:
            index = choice["index"]
            tokens = tuple(choice.get("token_ids") or ())
            text = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            if tokens or text:
                events.append(Piece(index, self.due[index], tokens, text))
            self.due[index] += len(tokens)
            if choice["finish_reason"] is not None:
                self.ended.add(index)
                events.append(Ended(index, choice["finish_reason"]))
        return events

    def _believe_id(self, event_id: str) -> None:
        """Only the ids tell indexes. Where one contradicts the count, the next piece shows up as a gap or a repeat."""
        for index, word in enumerate(event_id.split(",")):
            told = word.rstrip("e")
            if told.isdigit():
                self.due[index] = int(told)


async def post_events(
    gateway: GatewayAddress, path: str, body: dict[str, Any], headers: dict[str, str]
) -> AsyncGenerator[tuple[str | None, bytes], None]:
    """Id and data of each server-sent event; first an empty one when the server has accepted."""
    content = json.dumps(body).encode()
    lines = {
        "Host": f"{HOST}:{gateway.http_port}",
        "Content-Type": "application/json",
        "Content-Length": len(content),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in {**lines, **headers}.items())
    writer: asyncio.StreamWriter | None = None
    try:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE_S) as patience:
            reader, writer = await asyncio.open_connection(HOST, gateway.http_port)
            writer.write(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content)
            answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            status = int(answer[9:12])
            if status != 200:
                raise Refused(f"HTTP {status}: {await _short_body(reader, answer)}", status in _RETRYABLE)
            patience.reschedule(loop.time() + PATIENCE_S)
            yield None, b""
            rest = b""
            while size := int(await reader.readline() or b"x", 16):
                rest += (await reader.readexactly(size + 2))[:-2]
                *events, rest = rest.split(b"\n\n")
                for event in events:
                    yield _parse(event)
                patience.reschedule(loop.time() + PATIENCE_S)
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        raise Broken(repr(error)) from error
    finally:
        if writer is not None:
            writer.transport.abort()


def _parse(event: bytes) -> tuple[str | None, bytes]:
    event_id, data = None, b""
    for line in event.split(b"\n"):
        if line.startswith(b"id: "):
            event_id = line[4:].decode()
        elif line.startswith(b"data: "):
            data = line[6:]
    return event_id, data


async def _short_body(reader: asyncio.StreamReader, head: str) -> str:
    length = head.partition("content-length:")[2].partition("\r\n")[0].strip()
    return (await reader.readexactly(int(length) if length.isdigit() else 0)).decode("utf-8", "replace")[:300]


@dataclass
class GrpcSurface:
    """GenerationService.Generate; goes on by Stream from the indexes that are lacking."""

    template: Template
    request_id: str
    channels: dict[str, grpc.aio.Channel]
    accepted: bool = False
    due: list[int] = field(default_factory=list)

    def request(self) -> generation_pb2.GenerateRequest:
        template = self.template
        return generation_pb2.GenerateRequest(
            prompt=template.prompt,
            sampling=sampling_pb2.SamplingParams(
                temperature=template.temperature,
                seed=template.seed,
                max_tokens=template.max_tokens,
                ignore_eos=True,
            ),
            stop=[template.stop] if template.stop else [],
            n=template.n,
            request_id=self.request_id if template.named else "",
        )

    async def connect(self, gateway: GatewayAddress, replay: bool) -> AsyncGenerator[Event, None]:
        channel = self.channels.get(gateway.grpc) or create_channel(gateway.grpc)
        self.channels[gateway.grpc] = channel
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        if replay or not self.accepted:
            self.due = [0] * self.template.n
        call: Any
        if self.accepted and not replay:
            call = stub.Stream(generation_pb2.StreamRequest(request_id=self.request_id, from_index=self.due))
        else:
            call = stub.Generate(self.request())
        left = self.template.n
        try:
            async with asyncio.timeout(PATIENCE_S) as patience:
                loop = asyncio.get_running_loop()
                async for message in call:
                    patience.reschedule(loop.time() + PATIENCE_S)
                    response = (
                        message.event if isinstance(message, generation_pb2.StreamResponse) else message
                    )
                    kind = response.WhichOneof("event")
                    if kind == "accepted":
                        self.accepted = True
                        yield Opened(tuple(self.due))
                    elif kind == "delta":
                        delta = response.delta
                        self.due[delta.choice] = delta.first_index + len(delta.token_ids)
                        yield Piece(delta.choice, delta.first_index, tuple(delta.token_ids), delta.text)
                    else:
                        left -= 1
                        yield _ended(response.finished)
            if left:
                raise Broken("the call ended before all choices")
        except grpc.aio.AioRpcError as error:
            raise _broken_or_refused(error) from None
        except TimeoutError as error:
            raise Broken("silence") from error
        finally:
            call.cancel()


def _ended(finished: generation_pb2.ChoiceFinished) -> Ended:
    reason = sampling_pb2.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()
    return Ended(finished.choice, reason)


def _broken_or_refused(error: grpc.aio.AioRpcError) -> Exception:
    told: KvernError = error_from_rpc(error)
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return Broken(told.message)
    return Refused(f"{error.code().name}: {told.message}", told.code == error_pb2.ERROR_CODE_OVERLOADED)
