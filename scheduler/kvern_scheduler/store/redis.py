"""The contract in Redis 7.0+ or Valkey: one function call per commit, on a connection of its own.

The commands go through a bare connection, not a client: no retries (a commit must never be repeated without our
knowing), no pool, one second of patience.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np
from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from kvern.v1 import session_pb2
from kvern_scheduler.store.base import (
    CommitStatus,
    Delta,
    Held,
    IndexEntries,
    Leadership,
    State,
    StoredRequest,
    StoreUnavailable,
    split_seq_no,
)
from kvern_scheduler.store.keys import Keys

TIMEOUT_S = 1.0
_TRANSITIONS = ("acquire", "renew", "commit")
_PIPELINE = 512
_ENTRY = np.dtype([("generation", "<u4"), ("hash", "V32")])


def library() -> tuple[str, str]:
    """The source of the function library, and the suffix of its functions' names. The suffix is a hash of the source,
    so that schedulers of different versions share one Redis."""
    folder = files("kvern_scheduler") / "lua"
    body = "".join((folder / f"{name}.lua").read_text() for name in _TRANSITIONS)
    version = "_" + hashlib.sha256(body.encode()).hexdigest()[:8]
    clock = "local function now_ms()\n  local t = redis.call('TIME')\n  return t[1] * 1000 + math.floor(t[2] / 1000)\nend\n"
    return f"#!lua name=kvern{version}\nlocal VERSION = '{version}'\n{clock}{body}", version


class RedisStore:
    """``url``: redis://host:port/db, rediss://…, or unix:///path."""

    name = "redis"
    inline = False

    def __init__(self, url: str, cell: str, lease_s: float = 1.0) -> None:
        self.keys = Keys(cell)
        self._lease_ms = int(lease_s * 1000)
        self._source, self._version = library()
        self._connection: Any = ConnectionPool.from_url(
            url,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            decode_responses=False,
        ).make_connection()  # type: ignore[no-untyped-call]
        self._lock = asyncio.Lock()
        self._loaded = False
        keys = self.keys
        self._commit_keys = (
            keys.leader,
            keys.live,
            keys.finished,
            keys.instances,
            keys.request,
            keys.tokens,
            keys.index,
            keys.logprobs,
        )

    async def acquire(self, owner: str, address: str, *, steal: int | None = None) -> Leadership | Held:
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
        answer = await self._function(
            "commit", self._commit_keys, epoch, step, digest, self._lease_ms, *_pack(delta)
        )
        return CommitStatus(answer)

    def commit_now(self, epoch: int, step: int, delta: Delta, digest: bytes) -> CommitStatus:
        raise NotImplementedError("a commit to Redis is never inline")

    async def load(self) -> State:
        keys = self.keys
        leader = _to_dict(await self._call("HGETALL", keys.leader))
        state = State(
            int(leader.get(b"epoch", 0)), int(leader.get(b"step", 0)), int(leader.get(b"next_rid", 1))
        )
        live = await self._call("SMEMBERS", keys.live)
        kept = await self._call("ZRANGEBYSCORE", keys.finished, int(time.time() * 1000), "+inf")
        rids = [int(rid) for rid in (*live, *kept)]
        for rid, fields in zip(
            rids, await self._pipeline([("HGETALL", f"{keys.request}{rid}") for rid in rids]), strict=True
        ):
            fields = _to_dict(fields)
            if b"submit" in fields:  # else it expired meanwhile
                record = fields.pop(b"submit")
                state.requests[rid] = StoredRequest(
                    rid, record, finishes={int(field[1:]): end for field, end in fields.items()}
                )
        await self._load_tokens(state)
        await self._load_index(state)
        return state

    async def _load_tokens(self, state: State) -> None:
        logs = []
        for stored in state.requests.values():
            submit = session_pb2.Submit.FromString(stored.record)
            asked = submit.params.HasField("logprobs") or submit.params.HasField("prompt_logprobs")
            for choice in range(submit.n):
                logs.append((self.keys.tokens, stored, choice))
                if asked:
                    logs.append((self.keys.logprobs, stored, choice))
        answers = await self._pipeline(
            [("GET", f"{prefix}{stored.rid}.{choice}") for prefix, stored, choice in logs]
        )
        for (prefix, stored, choice), packed in zip(logs, answers, strict=True):
            if packed and prefix == self.keys.tokens:
                stored.tokens[choice] = np.frombuffer(packed, "<i4")
            elif packed:
                stored.logprobs[choice] = packed

    async def _load_index(self, state: State) -> None:
        for instance, highest in _to_dict(await self._call("HGETALL", self.keys.instances)).items():
            name = instance.decode()
            buckets = await self._pipeline(
                [("HGETALL", f"{self.keys.index}{name}:{bucket}") for bucket in range(int(highest) + 1)]
            )
            blocks: list[int] = []
            packed: list[bytes] = []
            for bucket in buckets:
                for block, entry in _to_dict(bucket).items():
                    blocks.append(int(block))
                    packed.append(entry)
            entries = np.frombuffer(b"".join(packed), _ENTRY)
            state.index[name] = IndexEntries(
                name,
                np.array(blocks, np.uint32),
                entries["generation"].copy(),
                entries["hash"].tobytes(),
            )

    async def close(self) -> None:
        await self._connection.disconnect()

    async def _function(self, name: str, keys: Sequence[str], *arguments: Any) -> Any:
        if not self._loaded:
            await self._call("FUNCTION", "LOAD", "REPLACE", self._source)
            self._loaded = True
        return await self._call("FCALL", f"kvern_{name}{self._version}", len(keys), *keys, *arguments)

    async def _call(self, *command: Any) -> Any:
        return (await self._pipeline([command]))[0]

    async def _pipeline(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Sends the commands together, a few hundred at a time, and reads their answers. Raises StoreUnavailable; the
        connection is then a new one next time, so that a late answer is never taken for another's."""
        answers: list[Any] = []
        async with self._lock:
            try:
                if not self._connection.is_connected:
                    await self._connection.connect()
                for start in range(0, len(commands), _PIPELINE):
                    batch = commands[start : start + _PIPELINE]
                    packed = (
                        self._connection.pack_command(*batch[0])
                        if len(batch) == 1
                        else self._connection.pack_commands(batch)
                    )
                    await self._connection.send_packed_command(packed)
                    answers += [await self._connection.read_response() for _ in batch]
            except ResponseError as error:
                await self._connection.disconnect()
                if "not found" in str(error):
                    self._loaded = False
                    raise StoreUnavailable("the function library is missing; loading it again") from error
                raise StoreUnavailable(f"Redis refused: {error}") from error
            except (RedisError, OSError, TimeoutError) as error:
                await self._connection.disconnect()
                raise StoreUnavailable(f"{type(error).__name__}: {error}") from error
            except BaseException:
                await self._connection.disconnect()
                raise
        return answers


def _pack(delta: Delta) -> list[Any]:
    arguments: list[Any] = [
        delta.next_rid,
        delta.seq_nos.astype("<u8", copy=False).tobytes(),
        delta.counts.tobytes(),
        delta.tokens.tobytes(),
        len(delta.requests),
    ]
    for request in delta.requests:
        arguments += request
    arguments.append(len(delta.logprobs))
    for seq_no, packed in delta.logprobs:
        arguments += (*split_seq_no(seq_no), packed)
    arguments.append(len(delta.finished))
    for finish in delta.finished:
        rid, choice = split_seq_no(finish.seq_no)
        arguments += (rid, choice, finish.record, finish.num_choices if finish.last else 0, finish.retain_s)
    arguments += (len(delta.dropped), *delta.dropped)
    arguments.append(len(delta.indexed))
    for entries in delta.indexed:
        arguments += (
            entries.instance,
            entries.blocks.tobytes(),
            entries.generations.tobytes(),
            entries.hashes,
        )
    return arguments


def _to_dict(answer: Any) -> dict[bytes, bytes]:
    """RESP3 answers with a map, RESP2 with a list."""
    return answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=True))
