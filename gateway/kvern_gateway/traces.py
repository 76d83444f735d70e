"""A call as a span: the scheduler's spans of its sequences lie under it, and it under the client's own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvern.errors import KvernError
from kvern.rpc.tracing import Tracing
from kvern.v1 import error_pb2
from kvern_gateway.gateway import Identity
from kvern_gateway.metrics import RequestClock


@contextmanager
def traced(tracing: Tracing | None, name: str, identity: Identity, clock: RequestClock) -> Iterator[None]:
    """Around the answer to one call; ``identity`` is told what to go on under."""
    if tracing is None:
        yield
        return
    began_ns = time.time_ns() - int((time.monotonic() - clock.start) * 1e9)
    attributes = {"gen_ai.request.id": identity.request_id}
    span = tracing.start(name, identity.traceparent, attributes, began_ns)
    identity.traceparent = tracing.traceparent(span)
    try:
        yield
    except KvernError as error:
        span.set_attribute("error.type", error_pb2.ErrorCode.Name(error.code))
        raise
    finally:
        if clock.first is not None:
            span.set_attribute("gen_ai.latency.time_to_first_token", clock.first - clock.start)
        span.end()
