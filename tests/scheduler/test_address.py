"""What a scheduler tells the others of its address."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from scheduler.scheduler_harness import Cluster

from kvern_scheduler.address import advertised, is_known, is_wildcard
from kvern_scheduler.recovery import acquire
from kvern_scheduler.server import parse_args
from kvern_scheduler.store.base import Held, Leadership
from kvern_scheduler.store.memory import MemoryStore


@pytest.mark.parametrize(
    ("found", "listen", "address"),
    [
        (["10.1.2.3"], "0.0.0.0:50060", "10.1.2.3:50060"),
        (["127.0.1.1", "10.1.2.3"], ":50060", "10.1.2.3:50060"),
        (["fd00::7"], "[::]:50060", "[fd00::7]:50060"),
        (["127.0.1.1"], "0.0.0.0:50060", "my-host:50060"),
        ([], "0.0.0.0:0", "my-host:4711"),
        (["10.1.2.3"], "192.168.0.5:0", "192.168.0.5:4711"),
        (["10.1.2.3"], "scheduler-0.cell:50060", "scheduler-0.cell:50060"),
        (["10.1.2.3"], "unix:/run/s:0", "unix:/run/s:0"),
    ],
)
def test_a_wildcard_is_advertised_as_the_machine(
    monkeypatch: pytest.MonkeyPatch, found: list[str], listen: str, address: str
) -> None:
    def resolve(name: str, *_: Any, **__: Any) -> Any:
        assert name == "my-host"
        if not found:
            raise socket.gaierror("unknown")
        return [(0, 0, 0, "", (ip, 0)) for ip in found]

    monkeypatch.setattr(socket, "gethostname", lambda: "my-host")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert advertised(listen, 4711) == address
    assert not is_wildcard(address)
    assert is_wildcard(listen) == (address.partition(":")[0] != listen.partition(":")[0])


async def test_the_leader_s_record_has_the_advertised_address(cluster: Cluster) -> None:
    store = cluster.store = MemoryStore(lease_s=30)
    await cluster.workers[0].start()
    for flags, expected in (
        ([], cluster.address),
        (["--advertise-address", "leader.cell:7"], "leader.cell:7"),
    ):
        cluster.flags = flags
        await cluster.start_scheduler()
        await cluster.gateway()
        held = await store.acquire("other", "elsewhere")
        assert isinstance(held, Held) and held.address == expected
        await cluster.stop_scheduler()


async def test_a_leader_whose_name_means_nothing_here_is_not_deposed() -> None:
    """It may be there for everybody else: its lease says how long to wait."""
    assert not await is_known("no-such-host.invalid:50060")
    store = MemoryStore(lease_s=0.4)
    assert isinstance(await store.acquire("a", "no-such-host.invalid:50060"), Leadership)
    for _ in range(4):
        held = await store.acquire("b", "b")
        assert isinstance(held, Held)
    leadership = await acquire(store, "b", "127.0.0.1:1")
    assert leadership.epoch == 2
    # It waited for the lease: a steal would have found it held.
    assert store._owner == "b"


@pytest.mark.parametrize("address", ["0.0.0.0:50060", "host", ":50060", "host:0", "host:x"])
def test_an_address_that_nobody_can_dial_is_refused(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        parse_args(["--listen", "0.0.0.0:50060", "--worker", "unix:w", "--advertise-address", address])
    assert refused.value.code == 2
    assert "--advertise-address" in capsys.readouterr().err
