"""Which process is killed or frozen, and when. All of it follows from the seed; only the clock does not."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

from kvern_gateway.cli.chaos_load import Moments
from kvern_gateway.cli.chaos_stack import ChaosStack

KINDS = ("scheduler", "worker", "gateway", "store")
# Beside the kills of a kind: one freeze for so many of them.
KILLS_PER_FREEZE = 4
# Of the faults: come while the one before is being recovered from. They count for everything but the stalls.
OVERLAP_SHARE = 0.1
RECOVERY_TIMEOUT_S = 30.0
_MOMENT_TIMEOUT_S = 2.0
_MOMENTS = ("any", "any", "submit", "accepted", "token", "ended")
# Shorter and longer than the silences (1.25 s) and the lease (1 s) after which others act.
_FREEZE_S = (0.3, 2.5)


@dataclass(frozen=True)
class Fault:
    """``target`` picks among the kind's processes; a scheduler fault strikes the leader, or else the standby."""

    kind: str
    freeze_s: float
    moment: str
    delay_s: float
    target: int
    leader: bool
    overlap: bool

    @property
    def name(self) -> str:
        return f"{self.kind} {'freeze' if self.freeze_s else 'kill'}"


@dataclass(frozen=True)
class Strike:
    """A fault that happened. Times are seconds of ``perf_counter``."""

    fault: Fault
    process: str
    at: float
    # Others were up when it struck, and so it says how long recovery takes.
    alone: bool


def draw_faults(kinds: Sequence[str], kills: int, seed: int) -> list[Fault]:
    """``kills`` of each kind, and freezes beside them, in random order."""
    choices = random.Random(f"{seed}-faults")
    freezes = -(-kills // KILLS_PER_FREEZE)
    wanted = [(kind, freeze) for kind in kinds for freeze in [False] * kills + [True] * freezes]
    choices.shuffle(wanted)
    return [
        Fault(
            kind=kind,
            freeze_s=choices.uniform(*_FREEZE_S) if freeze else 0.0,
            moment=choices.choice(_MOMENTS),
            delay_s=choices.uniform(0.0, 0.4),
            target=choices.randrange(2**16),
            leader=choices.random() < 0.9,
            overlap=choices.random() < OVERLAP_SHARE,
        )
        for kind, freeze in wanted
    ]


class Faults:
    """Carries them out, one after the other. ``strikes`` are those that happened."""

    def __init__(self, chaos: ChaosStack, moments: Moments) -> None:
        self.strikes: list[Strike] = []
        self._chaos = chaos
        self._moments = moments
        self._thawing: set[asyncio.Task[None]] = set()

    async def run(self, faults: Sequence[Fault]) -> None:
        """Raises TimeoutError when the services do not recover."""
        try:
            for fault in faults:
                alone = not fault.overlap
                if alone:
                    await self._settle(fault)
                await asyncio.sleep(fault.delay_s)
                if fault.moment != "any":
                    await self._moments.wait(fault.moment, _MOMENT_TIMEOUT_S)
                await self._strike(fault, alone)
            await self._thaw()
            if not await self._chaos.until_steady(RECOVERY_TIMEOUT_S):
                raise TimeoutError(f"the services did not recover within {RECOVERY_TIMEOUT_S:g} s")
        finally:
            await self._thaw()

    async def _settle(self, fault: Fault) -> None:
        await self._thaw()
        if not await self._chaos.until_steady(RECOVERY_TIMEOUT_S):
            last = self.strikes[-1].fault.name if self.strikes else "the start"
            raise TimeoutError(f"no recovery within {RECOVERY_TIMEOUT_S:g} s of {last}")

    async def _thaw(self) -> None:
        await asyncio.gather(*self._thawing)

    async def _strike(self, fault: Fault, alone: bool) -> None:
        name = await self._target(fault)
        pid = self._chaos.supervisor.pid(name)
        if pid is None:
            return  # it is being restarted
        at = perf_counter()
        if not fault.freeze_s:
            os.kill(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGSTOP)
            task = asyncio.create_task(self._thaw_later(pid, fault.freeze_s))
            self._thawing.add(task)
            task.add_done_callback(self._thawing.discard)
        self.strikes.append(Strike(fault, name, at, alone))

    async def _thaw_later(self, pid: int, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def _target(self, fault: Fault) -> str:
        names = self._chaos.names[fault.kind]
        if fault.kind != "scheduler":
            return names[fault.target % len(names)]
        leader = await self._chaos.leader()
        if leader is None:
            return names[fault.target % len(names)]
        return leader if fault.leader else next(name for name in names if name != leader)
