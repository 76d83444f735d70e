"""The same random calls to the memory store and to a real server give the same answers and the same state."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stores.conftest import SERVERS, StoreServer

from kvern.v1 import session_pb2
from kvern_scheduler.store import redis as redis_store
from kvern_scheduler.store.base import (
    CommitStatus,
    Delta,
    IndexEntries,
    Leadership,
    State,
    Store,
    StoredFinish,
    StoredRequest,
)
from kvern_scheduler.store.memory import MemoryStore
from kvern_scheduler.store.redis import RedisStore

# Shrinking against a server takes minutes; what fails is short anyway.
PHASES = (Phase.explicit, Phase.generate)
TOKEN = st.integers(0, 2**31 - 1)
SUBMIT = session_pb2.Submit(n=2).SerializeToString()


class StoreMachine(RuleBasedStateMachine):
    server: StoreServer

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.server.client().flushdb()
        self.stores: list[Store] = [
            MemoryStore(lease_s=1000),
            RedisStore(self.server.url, "machine", lease_s=1000),
        ]
        self.step = self.epoch = 0
        self.next_rid = 1
        self.unfinished: dict[int, set[int]] = {}

    def teardown(self) -> None:
        self.loop.run_until_complete(self.stores[1].close())
        self.loop.close()

    def both(self, call: Any) -> Any:
        answers = [self.loop.run_until_complete(self.ask(call(store))) for store in self.stores]
        assert answers[0] == answers[1]
        return answers[0]

    async def ask(self, answer: Coroutine[Any, Any, Any]) -> Any:
        return plain(await answer)

    @initialize()
    def lead(self) -> None:
        self.acquire("a", 0)

    @rule(owner=st.sampled_from("ab"), behind=st.sampled_from([0, 0, 1, None]))
    def acquire(self, owner: str, behind: int | None) -> None:
        steal = None if behind is None else self.epoch - behind
        answer = self.both(lambda store: store.acquire(owner, f"at-{owner}", steal=steal))
        if isinstance(answer, Leadership):
            self.epoch, self.step = answer.epoch, answer.step

    @rule(behind=st.integers(0, 1))
    def renew(self, behind: int) -> None:
        self.both(lambda store: store.renew(self.epoch - behind))

    @rule(behind=st.integers(0, 1))
    def resign(self, behind: int) -> None:
        self.both(lambda store: store.resign(self.epoch - behind))

    @rule(
        data=st.data(),
        ahead=st.sampled_from([1, 1, 1, 1, 0, 2]),
        behind=st.sampled_from([0, 0, 0, 1]),
        num_requests=st.integers(0, 2),
        retain_s=st.sampled_from([0, 500]),
        blocks=st.dictionaries(st.integers(0, 200), st.integers(1, 9), max_size=4),
        dropped=st.sampled_from([[], [], ["w0"], ["w1"]]),
    )
    def commit(
        self,
        data: st.DataObject,
        ahead: int,
        behind: int,
        num_requests: int,
        retain_s: int,
        blocks: dict[int, int],
        dropped: list[str],
    ) -> None:
        new = range(self.next_rid, self.next_rid + num_requests)
        alive = {**self.unfinished, **{rid: {0, 1} for rid in new}}
        sequences = [(rid, choice) for rid, choices in alive.items() for choice in sorted(choices)]
        some = st.lists(st.sampled_from(sequences), unique=True, max_size=4) if sequences else st.just([])
        log = {sequence: data.draw(st.lists(TOKEN, min_size=1, max_size=3)) for sequence in data.draw(some)}
        delta = Delta(
            next_rid=new.stop if new else 0,
            requests=[(rid, SUBMIT) for rid in new],
            seq_nos=np.array([rid << 7 | choice for rid, choice in log], np.int64),
            counts=np.array([len(ids) for ids in log.values()], np.uint32),
            tokens=np.array([token for ids in log.values() for token in ids], np.int32),
            indexed=[
                IndexEntries(
                    f"w{generation % 2}",
                    np.array([block], np.uint32),
                    np.array([generation], np.uint32),
                    bytes([generation]) * 32,
                )
                for block, generation in blocks.items()
            ],
            dropped=dropped,
        )
        for rid, choice in data.draw(some):
            alive[rid] = alive[rid] - {choice}
            last = not alive[rid]
            name = ("", f"r{rid % 5}")
            delta.finished.append(StoredFinish(rid << 7 | choice, b"end", last, retain_s, 2, name))
        step, epoch, digest = self.step + ahead, self.epoch - behind, delta.digest()
        answer = self.both(lambda store: store.commit(epoch, step, delta, digest))
        if answer is CommitStatus.OK:
            self.step = step
            self.next_rid = max(self.next_rid, new.stop)
            self.unfinished = {rid: choices for rid, choices in alive.items() if choices}

    @invariant()
    def states_are_equal(self) -> None:
        self.both(lambda store: store.load())
        self.both(lambda store: store.find([("", f"r{number}") for number in range(6)]))
        for instance in ("w0", "w1", "w2"):
            self.both(lambda store, instance=instance: store.load_index(instance))


def plain(answer: Any) -> Any:
    """The same for equal answers: arrays become lists, what depends on the clock is left out."""
    if isinstance(answer, State):
        requests = {rid: plain(stored) for rid, stored in answer.requests.items()}
        return answer.epoch, answer.step, answer.next_rid, requests, answer.instances, answer.retained_s > 0
    if isinstance(answer, list):
        return [plain(part) for part in answer]
    if isinstance(answer, StoredRequest):
        logs = {choice: log.tolist() for choice, log in answer.tokens.items() if log.size}
        return answer.rid, answer.record, logs, answer.finishes
    if isinstance(answer, IndexEntries):
        hashes = [answer.hashes[i : i + 32] for i in range(0, len(answer.hashes), 32)]
        return sorted(zip(answer.blocks.tolist(), answer.generations.tolist(), hashes, strict=True))
    if hasattr(answer, "expires_in"):
        return answer.epoch, answer.owner, answer.address
    return answer


def test_memory_and_server_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "FOLD_AFTER", 4)
    with TemporaryDirectory() as folder:
        server = StoreServer(SERVERS["valkey"], Path(folder), appendfsync="no")
        StoreMachine.server = server
        case = StoreMachine.TestCase
        case.settings = settings(
            max_examples=40, stateful_step_count=20, deadline=None, database=None, phases=PHASES
        )
        try:
            case().runTest()
        finally:
            server.kill()
