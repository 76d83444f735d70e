"""Named requests go on at any gateway, on real processes: text, tokens and ends as if nothing had happened."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import grpc.aio
import pytest

from kvern_gateway.cli import chaos_stack
from kvern_gateway.cli.chaos_history import Ended, Event, Opened, Output, Piece, check
from kvern_gateway.cli.chaos_load import Load, outputs_of
from kvern_gateway.cli.chaos_surfaces import GrpcSurface, HttpSurface, Refused, Surface, Template

FLAGS = {"sim_step_us": 10_000, "sim_num_blocks": 2048, "max_model_len": 1024, "max_num_seqs": 64}
COMMON = {"prompt": "Once upon a time", "max_tokens": 80, "temperature": 1.0, "seed": 5, "n": 2}
TEMPLATES = [Template(name, name, **COMMON) for name in ("completions", "chat", "grpc")]


@asynccontextmanager
async def clients() -> AsyncIterator[dict[str, grpc.aio.Channel]]:
    channels: dict[str, grpc.aio.Channel] = {}
    try:
        yield channels
    finally:
        await asyncio.gather(*(channel.close(None) for channel in channels.values()))


def surface_of(
    template: Template, request_id: str, channels: dict[str, grpc.aio.Channel]
) -> HttpSurface | GrpcSurface:
    if template.surface == "grpc":
        return GrpcSurface(template, request_id, channels)
    return HttpSurface(template, request_id)


async def read(surface: Surface, gateway: chaos_stack.GatewayAddress, pieces: int = 10**9) -> list[Event]:
    """The events of one connection, until that many pieces came."""
    events: list[Event] = []
    async with aclosing(surface.connect(gateway, replay=False)) as received:
        async for event in received:
            events.append(event)
            pieces -= isinstance(event, Piece)
            if not pieces:
                break
    return events


@pytest.mark.slow
async def test_named_requests_go_on_at_another_gateway() -> None:
    async with chaos_stack.running(None, 1, FLAGS, chaos_stack.Kept()) as chaos, clients() as channels:
        first, second = chaos.gateways
        load = Load([first], TEMPLATES, {}, seed=0)
        expected: dict[str, list[Output]] = {}
        for template in TEMPLATES:
            record = await load.request(template, f"whole-{template.name}", random.Random(0))
            expected[template.name] = outputs_of(record)
        await load.close()
        surfaces = [surface_of(template, f"cut-{template.name}", channels) for template in TEMPLATES]
        halves = await asyncio.gather(*(read(surface, first, 30) for surface in surfaces))
        pid = chaos.supervisor.pid(first.name)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for template, surface, half in zip(TEMPLATES, surfaces, halves, strict=True):
            rest = await read(surface, second)
            assert isinstance(rest[0], Opened) and sum(rest[0].from_index) >= 30
            assert check([*half, *rest], expected[template.name]) == []
            # A finished request stays readable, from any index.
            again = await read(surface, second)
            tokens = sum(len(event.token_ids) for event in again if isinstance(event, Piece))
            assert tokens == 0
            assert {event.choice for event in again if isinstance(event, Ended)} <= {0, 1}

        # What nobody has submitted cannot be gone on with, and is not begun instead.
        for template in TEMPLATES:
            stranger = surface_of(template, f"unknown-{template.name}", channels)
            stranger.due = [5, 5]
            if isinstance(stranger, HttpSurface):
                stranger.last_id = "5,5"
            else:
                stranger.accepted = True
            with pytest.raises(Refused, match=r"404|NOT_FOUND"):
                await read(stranger, second)

        # A client that names no request and leaves takes it along, a named one does not.
        plain = Template("plain", "completions", "x", max_tokens=900, named=False)
        await read(surface_of(plain, "", channels), second, 5)
        assert await chaos.until_idle(3.0)
        named = Template("named", "completions", "x", max_tokens=200)
        surface = surface_of(named, "named-and-left", channels)
        await read(surface, second, 5)
        assert not await chaos.until_idle(0.5)
        events = await read(surface, second)
        assert isinstance(events[-1], Ended)
