"""Clients that keep requests going through all faults, and the record of what each of them saw."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import dataclass, field
from time import perf_counter

import grpc.aio

from kvern_gateway.cli.chaos_history import Ended, Event, Lost, Opened, Output, Piece, Violation, check
from kvern_gateway.cli.chaos_stack import GatewayAddress
from kvern_gateway.cli.chaos_surfaces import Broken, GrpcSurface, HttpSurface, Refused, Surface, Template

# A request that has not ended by then is lost.
REQUEST_TIMEOUT_S = 90.0
# Of the connections that go on with a request: asks for everything anew instead, to be compared once more.
REPLAY_SHARE = 0.2
# Of the requests that have ended: read once more, at any gateway.
REREAD_SHARE = 0.1
_BACKOFF_S = (0.01, 0.05)


@dataclass
class Record:
    """One request as its client saw it. Times are seconds of ``perf_counter``."""

    template: Template
    request_id: str
    started: float
    events: list[Event] = field(default_factory=list)
    # When tokens or ends came, and by which gateway's connection it was waiting at any time.
    progress: list[float] = field(default_factory=list)
    gateways: list[tuple[float, str]] = field(default_factory=list)
    num_tokens: int = 0
    accepted: bool = False

    @property
    def ended(self) -> float:
        return self.progress[-1] if self.progress else perf_counter()

    def gateway_at(self, moment: float) -> str | None:
        """Name of the gateway that the client was connected to, or waiting for."""
        return next((name for since, name in reversed(self.gateways) if since <= moment), None)

    def longest_gap(self, start: float, end: float, since: float) -> float:
        """Seconds of the longest wait between ``start`` and ``end``, or of the one that ``start`` fell into if that
        began after ``since``; 0 where there is none."""
        longest, last = 0.0, self.started
        for moment in self.progress:
            if moment > start and since <= last and (last <= start or moment <= end):
                longest = max(longest, moment - last)
            last = moment
        return longest


class Moments:
    """Lets faults wait for what happens to requests: "submit", "accepted", "token", "ended"."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[None]] = {}

    def happened(self, name: str) -> None:
        future = self._waiting.pop(name, None)
        if future is not None and not future.done():
            future.set_result(None)

    async def wait(self, name: str, timeout_s: float) -> None:
        """Returns when it happens next, or after the time."""
        future = self._waiting.setdefault(name, asyncio.get_running_loop().create_future())
        await asyncio.wait({future}, timeout=timeout_s)


class Load:
    """``expected`` holds the outputs of the templates without faults."""

    def __init__(
        self,
        gateways: list[GatewayAddress],
        templates: list[Template],
        expected: dict[str, list[Output]],
        seed: int,
    ) -> None:
        self.moments = Moments()
        self.records: list[Record] = []
        self.violations: list[tuple[Record, Violation]] = []
        self.num_connections = 0
        self.num_tokens = 0
        self._gateways = gateways
        self._templates = templates
        self._expected = expected
        self._seed = seed
        self._stopping = False
        self._open: list[Record] = []
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def run(self, clients: int) -> None:
        """Until ``stop``; then until the requests that are open have ended."""
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(clients):
                    group.create_task(self._client(number))
        finally:
            await self.close()

    async def close(self) -> None:
        await asyncio.gather(*(channel.close(None) for channel in self._channels.values()))
        self._channels.clear()

    def all_went_on(self, since: float) -> bool:
        """Whether each open request that was there at that time has got something after it."""
        waiting = (record for record in self._open if record.started < since)
        return all(record.progress and record.progress[-1] > since for record in waiting)

    def stop(self) -> None:
        """No new requests."""
        self._stopping = True

    async def _client(self, number: int) -> None:
        choices = random.Random(f"{self._seed}-client-{number}")
        count = 0
        while not self._stopping:
            template = choices.choice(self._templates)
            await self.request(template, f"chaos-{self._seed}-{number}-{count}", choices)
            count += 1

    async def request(self, template: Template, request_id: str, choices: random.Random) -> Record:
        """Runs one request to its end, whatever dies meanwhile, and checks what was seen."""
        surface: Surface = (
            GrpcSurface(template, request_id, self._channels)
            if template.surface == "grpc"
            else HttpSurface(template, request_id)
        )
        record = Record(template, request_id, perf_counter())
        expected = self._expected.get(template.name)
        self.records.append(record)
        self._open.append(record)
        self.moments.happened("submit")
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await self._until_ended(surface, record, choices)
                if expected is not None and template.named and choices.random() < REREAD_SHARE:
                    await self._read_again(surface, record, choices)
        except TimeoutError:
            record.events.append(Lost(f"no end within {REQUEST_TIMEOUT_S:g} s"))
        except Refused as error:
            record.events.append(Lost(str(error)))
        self._open.remove(record)
        self.moments.happened("ended")
        if expected is not None:
            found = check(record.events, expected)
            self.violations += [(record, violation) for violation in found]
            if not found:
                record.events.clear()
        return record

    async def _until_ended(self, surface: Surface, record: Record, choices: random.Random) -> None:
        index = choices.randrange(len(self._gateways))
        replay = False
        while True:
            gateway = self._gateways[index % len(self._gateways)]
            try:
                await self._connect(surface, record, gateway, replay)
                return
            except Broken as error:
                if not record.template.named and record.accepted:
                    raise Refused(f"the stream of an unnamed request broke: {error}", False) from error
            except Refused as error:
                if not error.retryable or (not record.template.named and record.accepted):
                    raise
            index += 1
            replay = choices.random() < REPLAY_SHARE
            await asyncio.sleep(choices.uniform(*_BACKOFF_S))

    async def _read_again(self, surface: Surface, record: Record, choices: random.Random) -> None:
        """An attempt: a fault may cut it short."""
        try:
            await self._connect(surface, record, choices.choice(self._gateways), replay=True)
        except Broken:
            pass
        except Refused as error:
            if not error.retryable:
                raise

    async def _connect(self, surface: Surface, record: Record, gateway: GatewayAddress, replay: bool) -> None:
        self.num_connections += 1
        record.gateways.append((perf_counter(), gateway.name))
        async with aclosing(surface.connect(gateway, replay)) as received:
            async for event in received:
                record.events.append(event)
                if isinstance(event, Opened):
                    record.accepted = True
                    self.moments.happened("accepted")
                elif isinstance(event, Piece | Ended):
                    record.progress.append(perf_counter())
                    if isinstance(event, Piece):
                        record.num_tokens += len(event.token_ids)
                        self.num_tokens += len(event.token_ids)
                        self.moments.happened("token")


def outputs_of(record: Record) -> list[Output]:
    """What a request got on its first connection: the measure of all others, when there were no faults."""
    n = record.template.n
    tokens: list[tuple[int, ...]] = [()] * n
    texts, reasons = [""] * n, [""] * n
    for event in record.events:
        if isinstance(event, Piece):
            tokens[event.choice] += event.token_ids
            texts[event.choice] += event.text
        elif isinstance(event, Ended):
            reasons[event.choice] = event.reason
    return [Output(*one) for one in zip(tokens, texts, reasons, strict=True)]
