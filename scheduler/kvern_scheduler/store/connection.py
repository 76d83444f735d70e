"""One connection to Redis or Valkey: no pool, one second of patience, and no retries but of reads (a commit must never
be repeated without our knowing)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from kvern_scheduler.store.base import StoreRefused, StoreUnavailable

TIMEOUT_S = 1.0
_BATCH = 512
# What a handshake is answered with, where the client library makes a mere connection error of it.
_AUTHENTICATION = ("username-password", "HELLO must be called with the client already authenticated")


class LibraryMissing(StoreUnavailable):
    """The server has no such function: it was flushed, or another server has taken over."""


class Connection:
    """Commands of several tasks go one after another. ``reading``: all of them may be sent again, and are, once, where
    the store has closed the connection since the last: a server that was restarted in between is there, not away."""

    def __init__(self, url: str, reading: bool = False) -> None:
        self._reading = reading
        self._connection: Any = ConnectionPool.from_url(
            url,
            retry=Retry(NoBackoff(), 0),
            # Ours: the library's are a task for each write, which waits for whatever else is ready.
            socket_timeout=None,
            socket_connect_timeout=None,
            decode_responses=False,
        ).make_connection()  # type: ignore[no-untyped-call]
        self._lock = asyncio.Lock()

    async def call(self, *command: Any) -> Any:
        """The answer. Raises as ``pipeline`` does."""
        return (await self.pipeline([command]))[0]

    async def pipeline(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Sends the commands together, a few hundred at a time, and reads their answers. Raises StoreUnavailable; the
        connection is then a new one next time, so that a late answer is never taken for another's."""
        async with self._lock:
            if self._reading and self._connection.is_connected:
                try:
                    return await self._send(commands)
                except StoreUnavailable as error:
                    if not isinstance(
                        error.__cause__, ConnectionError | BrokenPipeError | ConnectionResetError
                    ):
                        raise
            return await self._send(commands)

    async def _send(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        connection, answers = self._connection, []
        now = asyncio.get_running_loop().time
        try:
            # For each answer.
            async with asyncio.timeout(TIMEOUT_S) as limit:
                if not connection.is_connected:
                    await connection.connect()
                    limit.reschedule(now() + TIMEOUT_S)
                for start in range(0, len(commands), _BATCH):
                    batch = commands[start : start + _BATCH]
                    packed = (
                        connection.pack_command(*batch[0])
                        if len(batch) == 1
                        else connection.pack_commands(batch)
                    )
                    await connection.send_packed_command(packed)
                    for _ in batch:
                        answers.append(await connection.read_response())
                        limit.reschedule(now() + TIMEOUT_S)
        except (RedisError, OSError, TimeoutError) as error:
            await connection.disconnect()
            raise explain(error) from error
        except BaseException:
            await connection.disconnect()
            raise
        return answers

    async def close(self) -> None:
        await self._connection.disconnect()


def _wrong_password(said: str) -> StoreRefused:
    if "HELLO must" in said:
        return StoreRefused("it wants a password; give it in --redis-url: redis://:PASSWORD@host:port")
    return StoreRefused(f"it refuses our user or password ({said.rstrip('.')}); correct --redis-url")


def explain(error: Exception) -> StoreUnavailable:
    """What went wrong, and what to do about it."""
    said = str(error)
    match error:
        case BusyLoadingError():
            return StoreUnavailable(f"it is still loading its data set ({said})")
        case NoPermissionError():
            return StoreRefused(
                f"its user may not do what Kvern needs ({said.rstrip('.')}); grant it, or correct --redis-url"
            )
        case AuthenticationError():
            return _wrong_password(said)
        case ConnectionError() if any(word in said for word in _AUTHENTICATION):
            return _wrong_password(said)
        case ReadOnlyError():
            return StoreUnavailable(
                f"it is a read-only replica ({said}); give the primary's address in --redis-url"
            )
        case OutOfMemoryError():
            return StoreUnavailable(f"it is full ({said}); raise its maxmemory")
        case ResponseError() if "MISCONF" in said:
            return StoreUnavailable(f"it cannot write to its disk ({said}); make room there")
        case ResponseError() if "WRONGTYPE" in said:
            return StoreRefused(
                f"a key of this cell is not of the type that Kvern gave it ({said}); nothing else may write "
                "keys that begin with kvern: — delete the key, or give another --cell"
            )
        case ResponseError() if "unknown command" in said.lower():
            return StoreRefused(f"it is too old ({said}); Redis 7.0 or newer, or Valkey, is needed")
        case ResponseError() if "DB index" in said:
            return StoreRefused(f"it has no such database ({said}); correct --redis-url")
        case ResponseError() if "not found" in said:
            return LibraryMissing("its function library is missing; loading it again")
        case ResponseError():
            return StoreUnavailable(f"it refused a command ({said})")
        case TimeoutError():
            return StoreUnavailable(
                f"no answer within {TIMEOUT_S:g} s (TimeoutError); see that it runs there"
            )
        case ConnectionError() | OSError():
            return StoreUnavailable(f"no connection ({said.rstrip('.')}); start it, or correct --redis-url")
    return StoreUnavailable(f"{type(error).__name__}: {said}")
