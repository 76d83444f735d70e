"""Which process is killed, frozen or restarted, and when. All of it follows from the seed; only the clock does not."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

from kvern_gateway.cli.chaos_load import Load
from kvern_gateway.cli.chaos_stack import ChaosStack

KINDS = ("scheduler", "worker", "gateway", "store")
# Beside the kills of a kind: one freeze for so many of them.
KILLS_PER_FREEZE = 4
# Of the faults: come while the one before is being recovered from. They count for everything but the stalls.
OVERLAP_SHARE = 0.1
RECOVERY_TIMEOUT_S = 30.0
_MOMENT_TIMEOUT_S = 2.0
# What comes so shortly after a fault had been sent before it.
_ON_THE_WAY_S = 0.1
_SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "restart": signal.SIGTERM}
_MOMENTS = ("any", "any", "submit", "accepted", "token", "ended")
# Shorter and longer than the silences (1.25 s) and the lease (1 s) after which others act.
_FREEZE_S = (0.3, 2.5)


@dataclass(frozen=True)
class Fault:
    """``action``: kill, freeze (for ``freeze_s``) or restart (SIGTERM). ``target`` picks among the kind's processes; of
    the schedulers it is the leader, or else the standby."""

    kind: str
    action: str
    freeze_s: float
    moment: str
    delay_s: float
    target: int
    leader: bool
    overlap: bool

    @property
    def name(self) -> str:
        return f"{self.kind} {self.action}"


@dataclass(frozen=True)
class Strike:
    """A fault that happened. Times are seconds of ``perf_counter``."""

    fault: Fault
    process: str
    at: float
    # Others were up when it struck, and so it says how long recovery takes.
    alone: bool

    @property
    def over(self) -> float:
        """When a frozen process thaws."""
        return self.at + (self.fault.freeze_s if self.fault.action == "freeze" else 0.0)


def draw_faults(kinds: Sequence[str], kills: int, restarts: int, seed: int) -> list[Fault]:
    """``kills`` of each kind and freezes beside them, then ``restarts``; all in random order."""
    choices = random.Random(f"{seed}-faults")
    counts = {"kill": kills, "freeze": -(-kills // KILLS_PER_FREEZE), "restart": restarts}
    wanted = [(kind, action) for kind in kinds for action, count in counts.items() for _ in range(count)]
    choices.shuffle(wanted)
    return [
        Fault(
            kind=kind,
            action=action,
            freeze_s=choices.uniform(*_FREEZE_S),
            moment=choices.choice(_MOMENTS),
            delay_s=choices.uniform(0.0, 0.4),
            target=choices.randrange(2**16),
            leader=choices.random() < 0.9,
            overlap=choices.random() < OVERLAP_SHARE,
        )
        for kind, action in wanted
    ]


class Faults:
    """Carries them out, one after the other. ``strikes`` are those that happened."""

    def __init__(self, chaos: ChaosStack, load: Load) -> None:
        self.strikes: list[Strike] = []
        self._chaos = chaos
        self._load = load
        self._pending: set[asyncio.Task[None]] = set()

    async def run(self, faults: Sequence[Fault]) -> None:
        """Raises TimeoutError when the services do not recover."""
        try:
            for fault in faults:
                alone = not fault.overlap
                if alone:
                    await self._settle(fault)
                await asyncio.sleep(fault.delay_s)
                if fault.moment != "any":
                    await self._load.moments.wait(fault.moment, _MOMENT_TIMEOUT_S)
                await self._strike(fault, alone)
            await self._finish()
            if not await self._chaos.until_steady(RECOVERY_TIMEOUT_S):
                raise TimeoutError(f"the services did not recover within {RECOVERY_TIMEOUT_S:g} s")
        finally:
            await self._finish()

    async def _settle(self, fault: Fault) -> None:
        await self._finish()
        if not await self._chaos.until_steady(RECOVERY_TIMEOUT_S):
            last = self.strikes[-1].fault.name if self.strikes else "the start"
            raise TimeoutError(f"no recovery within {RECOVERY_TIMEOUT_S:g} s of {last}")
        since = max((strike.over + _ON_THE_WAY_S for strike in self.strikes), default=0.0)
        deadline = perf_counter() + RECOVERY_TIMEOUT_S
        while not self._load.all_went_on(since) and perf_counter() < deadline:
            await asyncio.sleep(0.01)

    async def _finish(self) -> None:
        """What is frozen thaws, what is told to stop has stopped."""
        await asyncio.gather(*self._pending)

    async def _strike(self, fault: Fault, alone: bool) -> None:
        name = await self._target(fault)
        pid = self._chaos.supervisor.pid(name)
        if pid is None:
            return  # it is being restarted
        at = perf_counter()
        os.kill(pid, _SIGNALS[fault.action])
        if fault.action == "freeze":
            task = asyncio.create_task(self._thaw_later(pid, fault.freeze_s))
        else:
            task = asyncio.create_task(self._until_gone(name, pid))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
        self.strikes.append(Strike(fault, name, at, alone))

    async def _thaw_later(self, pid: int, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def _until_gone(self, name: str, pid: int) -> None:
        """A restarted process may drain for a while."""
        deadline = perf_counter() + RECOVERY_TIMEOUT_S
        while self._chaos.supervisor.pid(name) == pid and perf_counter() < deadline:
            await asyncio.sleep(0.01)

    async def _target(self, fault: Fault) -> str:
        names = self._chaos.names[fault.kind]
        if fault.kind != "scheduler":
            return names[fault.target % len(names)]
        leader = await self._chaos.leader()
        if leader is None:
            return names[fault.target % len(names)]
        return leader if fault.leader else next(name for name in names if name != leader)
