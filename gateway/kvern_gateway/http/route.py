"""A request that ends with its connection: whoever waits for the answer, and what refusals count."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from kvern.errors import KvernError
from kvern_gateway.gateway import Gateway
from kvern_gateway.http.protocol import SCOPE_KEY, Connection
from kvern_gateway.http.wire import Receive, Scope, Send, send_error
from kvern_gateway.keys import current


class BoundRoute(ABC):
    """An ASGI app for one path. A lost connection cancels at once."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @abstractmethod
    async def _answer(self, scope: Scope, receive: Receive, send: Send, connection: Connection) -> None:
        """Raises KvernError before anything is sent; cancelled when the client is gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        connection: Connection = scope[SCOPE_KEY]
        task = asyncio.current_task()
        assert task is not None
        lost = False

        def on_lost() -> None:
            nonlocal lost
            lost = True
            task.cancel()

        connection.on_lost = on_lost
        gateway.metrics.running += 1
        try:
            with current().asking():
                await self._answer(scope, receive, send, connection)
        except KvernError as error:
            connection.on_lost = None
            gateway.metrics.count_refusal(error)
            await send_error(scope, receive, send, error)
        except (ConnectionError, asyncio.CancelledError):
            if not lost:
                raise
        finally:
            gateway.metrics.running -= 1
            connection.on_lost = connection.on_writable = None
