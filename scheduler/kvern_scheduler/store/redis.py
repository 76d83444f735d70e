"""The contract in Redis 7.0+ or Valkey: one function call per commit, on a connection of its own.

A commit of new tokens appends them to one string, ``recent``, whatever the number of sequences. This store remembers
what is in it, and has it sorted into the token logs of the sequences every FOLD_AFTER commits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from kvern.v1 import session_pb2
from kvern_scheduler.core.requests import CHOICE_BITS
from kvern_scheduler.store.base import (
    CommitStatus,
    Delta,
    Held,
    IndexEntries,
    Leadership,
    Name,
    State,
    StoredRequest,
    split_seq_no,
)
from kvern_scheduler.store.connection import Connection, LibraryMissing
from kvern_scheduler.store.keys import BLOCKS_PER_BUCKET, INDEXED, RECENT, Keys, spell

FOLD_AFTER = 128
_TRANSITIONS = ("acquire", "renew", "commit")
_BUCKETS_AT_ONCE = 16


def library() -> tuple[str, str]:
    """The source of the function library, and the suffix of its functions' names. The suffix is a hash of the source,
    so that schedulers of different versions share one Redis."""
    folder = files("kvern_scheduler") / "lua"
    body = "".join((folder / f"{name}.lua").read_text() for name in _TRANSITIONS)
    version = "_" + hashlib.sha256(body.encode()).hexdigest()[:8]
    clock = "local function now_ms()\n  local t = redis.call('TIME')\n  return t[1] * 1000 + math.floor(t[2] / 1000)\nend\n"
    return f"#!lua name=kvern{version}\nlocal VERSION = '{version}'\n{clock}{body}", version


async def check_server(url: str) -> None:
    """Raises StoreUnavailable, with what to do, where no scheduler could begin there now; ValueError for a wrong url."""
    connection = Connection(url)
    try:
        await connection.call("FUNCTION", "LOAD", "REPLACE", library()[0])
    finally:
        await connection.close()


class RedisStore:
    """``url``: redis://host:port/db, rediss://…, or unix:///path. ``functions``: another version's ``library``."""

    name = "redis"
    inline = False

    def __init__(
        self, url: str, cell: str, lease_s: float = 1.0, functions: tuple[str, str] | None = None
    ) -> None:
        self.keys = keys = Keys(cell)
        self._lease_ms = int(lease_s * 1000)
        self._source, self._version = functions or library()
        self._connection = Connection(url)
        # So that what is read beside commits does not hold them up.
        self._reading = Connection(url, reading=True)
        self._loaded = False
        # What ``recent`` holds, one array a commit; None: not known yet.
        self._recent: list[npt.NDArray[Any]] | None = None
        self._commit_keys = (
            *(keys.leader, keys.live, keys.recent, keys.instances),
            *(keys.request, keys.tokens, keys.index, keys.logprobs, keys.names, keys.adapters),
        )

    async def acquire(self, owner: str, address: str, *, steal: int | None = None) -> Leadership | Held:
        self._recent = None
        answer = await self._function(
            "acquire",
            [self.keys.leader],
            owner,
            address,
            self._lease_ms,
            -1 if steal is None else steal,
        )
        if answer[0] == 1:
            return Leadership(epoch=answer[1], step=answer[2], next_rid=answer[3])
        return Held(answer[1], answer[2].decode(), answer[3].decode(), answer[4] / 1000)

    async def renew(self, epoch: int) -> bool:
        answer = await self._function("renew", [self.keys.leader], epoch, self._lease_ms)
        return bool(answer == 1)

    async def resign(self, epoch: int) -> None:
        await self._function("renew", [self.keys.leader], epoch, 0)

    async def commit(self, epoch: int, step: int, delta: Delta, digest: bytes) -> CommitStatus:
        if self._recent is None:
            # Whatever another leader had under way has been applied, or is fenced.
            self._recent = [_recent(await self._connection.call("GET", self.keys.recent))]
        new = np.empty(delta.tokens.size, RECENT)
        new["sequence"] = np.repeat(delta.seq_nos, delta.counts)
        new["token"] = delta.tokens
        folds = len(self._recent) >= FOLD_AFTER
        answer = await self._function(
            "commit",
            self._commit_keys,
            *(epoch, step, digest, self._lease_ms, delta.next_rid),
            *(b"" if folds else new.tobytes(), int(folds)),
            *(_sort([*self._recent, new]) if folds else (b"", b"", b"")),
            *_pack(delta),
        )
        status = CommitStatus(answer)
        if status is not CommitStatus.OK:
            self._recent = None  # an earlier attempt's doing, or another leader's
        elif folds:
            self._recent.clear()
        elif new.size:
            self._recent.append(new)
        return status

    def commit_now(self, epoch: int, step: int, delta: Delta, digest: bytes) -> CommitStatus:
        raise NotImplementedError("a commit to Redis is never inline")

    async def load(self) -> State:
        keys = self.keys
        answers = await self._connection.pipeline(
            [
                ("HGETALL", keys.leader),
                ("TIME",),
                ("SMEMBERS", keys.live),
                ("HKEYS", keys.instances),
                ("GET", keys.recent),
                ("GET", keys.adapters),
            ]
        )
        leader, (seconds, micros), live, instances, packed, adapters = _to_dict(answers[0]), *answers[1:]
        state = State(
            int(leader.get(b"epoch", 0)), int(leader.get(b"step", 0)), int(leader.get(b"next_rid", 1))
        )
        retained_ms = int(leader.get(b"retained_ms", 0))
        state.retained_s = max(0.0, retained_ms / 1000 - int(seconds) - int(micros) / 1e6)
        state.instances = {instance.decode() for instance in instances}
        state.adapters = adapters or b""
        recent = _recent(packed)
        self._recent = [recent]
        for stored in await self._read(self._connection, [int(rid) for rid in live], recent):
            state.requests[stored.rid] = stored
        return state

    async def find(self, names: Sequence[Name]) -> list[StoredRequest]:
        keys, reading = self.keys, self._reading
        found = await reading.call("MGET", *(f"{keys.names}{spell(*name)}" for name in names))
        rids = [int(rid) for rid in found if rid is not None]
        return await self._read(reading, rids) if rids else []

    async def _read(
        self, connection: Connection, rids: Sequence[int], recent: npt.NDArray[Any] | None = None
    ) -> list[StoredRequest]:
        """Those of the requests that are there. ``recent``: what that key holds, where no commit can come between."""
        keys = self.keys
        answers = await connection.pipeline([("HGETALL", f"{keys.request}{rid}") for rid in rids])
        requests, logs = [], []
        for rid, answer in zip(rids, answers, strict=True):
            fields = _to_dict(answer)
            if b"submit" not in fields:
                continue  # it expired meanwhile
            record = fields.pop(b"submit")
            stored = StoredRequest(
                rid, record, finishes={int(field[1:]): end for field, end in fields.items()}
            )
            requests.append(stored)
            submit = session_pb2.Submit.FromString(record)
            asked = submit.params.HasField("logprobs") or submit.params.HasField("prompt_logprobs")
            for choice in range(submit.n or 1):
                logs.append((keys.tokens, stored, choice))
                if asked:
                    logs.append((keys.logprobs, stored, choice))
        wanted = [f"{prefix}{stored.rid}.{choice}" for prefix, stored, choice in logs]
        if recent is None:
            # In one command: a commit in between could move tokens from one to the other.
            packed, *answers = await connection.call("MGET", keys.recent, *wanted)
            recent = _recent(packed)
        else:
            answers = await connection.pipeline([("GET", key) for key in wanted])
        newest = _by_sequence(recent)
        for (prefix, stored, choice), packed in zip(logs, answers, strict=True):
            if prefix == keys.tokens:
                tokens = np.frombuffer(packed or b"", "<i4")
                more = newest.get(stored.rid << CHOICE_BITS | choice)
                if more is not None:
                    tokens = np.concatenate([tokens, more])
                if tokens.size:
                    stored.tokens[choice] = tokens
            elif packed:
                stored.logprobs[choice] = packed
        return requests

    async def load_index(self, instance: str) -> IndexEntries:
        keys, reading = self.keys, self._reading
        highest = int(await reading.call("HGET", keys.instances, instance) or -1)
        blocks: list[npt.NDArray[np.uint32]] = []
        entries: list[npt.NDArray[Any]] = []
        for start in range(0, highest + 1, _BUCKETS_AT_ONCE):
            buckets = range(start, min(start + _BUCKETS_AT_ONCE, highest + 1))
            packed = await reading.call("MGET", *(f"{keys.index}{instance}:{bucket}" for bucket in buckets))
            for bucket, records in zip(buckets, packed, strict=True):
                held = np.frombuffer(records or b"", INDEXED)
                taken = np.flatnonzero(held["generation"])
                blocks.append((taken + bucket * BLOCKS_PER_BUCKET).astype(np.uint32))
                entries.append(held[taken])
        if not blocks:
            return IndexEntries(instance, np.empty(0, np.uint32), np.empty(0, np.uint32), b"")
        joined = np.concatenate(entries)
        return IndexEntries(
            instance, np.concatenate(blocks), joined["generation"].copy(), joined["hash"].tobytes()
        )

    async def concerns(self) -> list[str]:
        answer = await self._reading.call(
            "CONFIG", "GET", "appendonly", "appendfsync", "maxmemory", "maxmemory-policy"
        )
        said = {name.decode(): value.decode() for name, value in _to_dict(answer).items()}
        concerns = []
        if said.get("appendonly") == "no":
            concerns.append("appendonly is no: whatever restarts the store loses requests; set it to yes")
        elif said.get("appendfsync", "always") != "always":
            concerns.append(
                f"appendfsync is {said['appendfsync']}: the store's machine may lose the last commits when it dies; "
                "set it to always, or accept that"
            )
        if said.get("maxmemory", "0") != "0" and said.get("maxmemory-policy", "noeviction") != "noeviction":
            concerns.append(
                f"maxmemory-policy is {said['maxmemory-policy']}: a full store throws requests away; set it to "
                "noeviction"
            )
        return concerns

    async def close(self) -> None:
        await self._connection.close()
        await self._reading.close()

    async def _function(self, name: str, keys: Sequence[str], *arguments: Any) -> Any:
        if not self._loaded:
            await self._connection.call("FUNCTION", "LOAD", "REPLACE", self._source)
            self._loaded = True
        try:
            return await self._connection.call(
                "FCALL", f"kvern_{name}{self._version}", len(keys), *keys, *arguments
            )
        except LibraryMissing:
            self._loaded = False
            raise


def _recent(packed: bytes | None) -> npt.NDArray[Any]:
    return np.frombuffer(packed or b"", RECENT)


def _sort(recent: Sequence[npt.NDArray[Any]]) -> tuple[bytes, bytes, bytes]:
    """Sequence numbers, tokens of each, and the tokens, sequence by sequence in the order in which they came."""
    numbers, counts, tokens = _group(np.concatenate(recent))
    return numbers.tobytes(), counts.astype("<u4").tobytes(), tokens.tobytes()


def _group(recent: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    order = np.argsort(recent["sequence"], kind="stable")
    numbers, counts = np.unique(recent["sequence"][order], return_counts=True)
    return numbers, counts, recent["token"][order]


def _by_sequence(recent: npt.NDArray[Any]) -> dict[int, npt.NDArray[Any]]:
    numbers, counts, tokens = _group(recent)
    return dict(zip(numbers.tolist(), np.split(tokens, np.cumsum(counts)[:-1]), strict=False))


def _pack(delta: Delta) -> Iterator[Any]:
    """The lists that come last in the commit's arguments, each after its length."""
    yield len(delta.requests)
    for request in delta.requests:
        yield from request
    yield len(delta.logprobs)
    for seq_no, packed in delta.logprobs:
        yield from (*split_seq_no(seq_no), packed)
    yield len(delta.finished)
    for finish in delta.finished:
        yield from split_seq_no(finish.seq_no)
        yield from (finish.record, finish.num_choices if finish.last else 0, finish.retain_s)
        yield spell(*finish.name)
    yield from (len(delta.dropped), *delta.dropped)
    yield len(delta.indexed)
    for entries in delta.indexed:
        yield from (
            entries.instance,
            entries.blocks.tobytes(),
            entries.generations.tobytes(),
            entries.hashes,
        )
    yield from (0,) if delta.adapters is None else (1, delta.adapters)


def _to_dict(answer: Any) -> dict[bytes, bytes]:
    """RESP3 answers with a map, RESP2 with a list."""
    return answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=True))
