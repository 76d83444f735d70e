"""A session's buffer: merged while the gateway is slow, bounded when it does not read at all."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kvern.errors import KvernError
from kvern.v1 import session_pb2
from kvern_scheduler.sessions import MAX_BUFFERED, Session


class SlowStream:
    """The writing half of a call whose peer reads when it is let."""

    def __init__(self) -> None:
        self.written: list[session_pb2.SessionResponse] = []
        self.reads = asyncio.Semaphore(0)

    async def write(self, message: session_pb2.SessionResponse) -> None:
        await self.reads.acquire()
        self.written.append(message)


def push(session: Session, first: int, count: int) -> None:
    indexes = np.arange(first, first + count, dtype=np.uint32)
    session.tokens(np.full(count, 7, np.uint32), indexes, indexes.astype(np.int32))


async def test_what_comes_while_a_write_is_slow_is_one_message() -> None:
    stream: Any = SlowStream()
    session = Session(0, stream)
    sender = asyncio.create_task(session.send())
    push(session, 0, 1)
    await asyncio.sleep(0)
    for index in range(1, 50):
        push(session, index, 1)
    session.finished(session_pb2.Finished(handle=7))
    for _ in range(2):
        stream.reads.release()
        await asyncio.sleep(0.01)
    assert [len(message.token_ids) // 4 for message in stream.written] == [1, 49]
    assert stream.written[1].finished[0].handle == 7
    sender.cancel()


async def test_a_gateway_that_does_not_read_is_dropped_and_sees_no_gap() -> None:
    stream: Any = SlowStream()
    session = Session(0, stream)
    sender = asyncio.create_task(session.send())
    push(session, 0, 1)
    await asyncio.sleep(0)
    for start in range(1, MAX_BUFFERED + 5000, 5000):
        push(session, start, 5000)
    assert session.overflowed
    assert sum(array.nbytes for array in session._token_ids) <= 4 * MAX_BUFFERED
    stream.reads.release()
    with pytest.raises(KvernError):
        await asyncio.wait_for(sender, 1)
    assert len(stream.written) == 1
