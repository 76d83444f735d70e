"""The two generation routes as plain ASGI: read, check, submit, stream or collect."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from kvern_gateway.gateway import Gateway, admit
from kvern_gateway.generation import ORPHAN_GRACE_S, Generation, unavailable
from kvern_gateway.http.parse import Job
from kvern_gateway.http.protocol import Connection
from kvern_gateway.http.results import Collector
from kvern_gateway.http.route import BoundRoute
from kvern_gateway.http.streaming import EventStream
from kvern_gateway.http.wire import (
    Receive,
    Scope,
    Send,
    echo_headers,
    parse_object,
    read_body,
    send_json,
)
from kvern_gateway.metrics import RequestClock
from kvern_gateway.room import overloaded
from kvern_gateway.traces import traced

log = logging.getLogger(__name__)

Parser = Callable[[Gateway, Scope, bytes, dict[str, Any]], Awaitable[Job]]

_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class GenerateRoute(BoundRoute):
    """One of the two generation routes."""

    def __init__(self, gateway: Gateway, parse: Parser) -> None:
        super().__init__(gateway)
        self._parse = parse

    async def _answer(self, scope: Scope, receive: Receive, send: Send, connection: Connection) -> None:
        gateway = self._gateway
        start = time.monotonic()
        body = await read_body(scope, receive, gateway.limits)
        if gateway.draining:
            raise unavailable("this gateway is shutting down; another one will answer", 100)
        # A named request may be one that was admitted before: only the scheduler knows.
        if gateway.client.requests.room.full and b'"request_id"' not in body:
            raise overloaded()
        job = await self._parse(gateway, scope, body, parse_object(body))
        clock = RequestClock(gateway.metrics, start, job.num_choices)
        with traced(gateway.tracing, f"POST {scope['path']}", job.identity, clock):
            await self._generate(scope, send, connection, job, clock)

    async def _generate(
        self, scope: Scope, send: Send, connection: Connection, job: Job, clock: RequestClock
    ) -> None:
        gateway = self._gateway
        generations = self._submit(job)
        try:
            await admit(generations)
            self._count(job)
            ended = asyncio.Event()
            if job.stream:
                headers = [*_EVENT_STREAM, *echo_headers(scope)]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                EventStream(gateway, job, generations, connection, clock, ended.set).start()
                await ended.wait()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            collector = Collector(gateway, job, generations, clock, ended.set)
            collector.start()
            await ended.wait()
        except asyncio.CancelledError:
            open_choices = sum(not choice.done for g in generations for choice in g.choices)
            gateway.metrics.finished["abort"] += open_choices
            raise
        finally:
            # What is still open after the answer, or instead of it.
            for generation in generations:
                generation.abandon(ORPHAN_GRACE_S)
        if collector.error is not None:
            raise collector.error
        await send_json(scope, send, collector.result())

    def _submit(self, job: Job) -> list[Generation]:
        generations: list[Generation] = []
        try:
            for index, prompt in enumerate(job.prompts):
                identity = job.identity
                if len(job.prompts) > 1:
                    identity = replace(identity, request_id=f"{identity.request_id}-{index}")
                generations.append(
                    self._gateway.submit(
                        *(prompt.token_ids, prompt.params, job.options, identity, job.routing, prompt.media)
                    )
                )
        except BaseException:
            for generation in generations:
                generation.cancel()
            raise
        return generations

    def _count(self, job: Job) -> None:
        metrics = self._gateway.metrics
        metrics.request_n.observe(job.routing.n)
        for prompt in job.prompts:
            metrics.prompt_tokens += len(prompt.token_ids)
            metrics.request_prompt_tokens.observe(len(prompt.token_ids))
            metrics.request_max_tokens.observe(prompt.params.max_tokens)
