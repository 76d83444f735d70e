"""Server bootstrap: health, reflection, the error interceptor, options, signals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from kvern.rpc.channel import MAX_MESSAGE_BYTES
from kvern.rpc.errors import ErrorInterceptor
from kvern.rpc.health import LIVENESS
from kvern.rpc.tls import Tls

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.so_reuseport", 0),
    # Clients ping every few seconds through idle streams; the default answers them with GOAWAY.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]


class Server:
    """A gRPC server that answers health and reflection for the services added to ``self.grpc``.

    ``service_names`` are full names ("kvern.v1.WorkerService"). All start NOT_SERVING. ``tls`` is for TCP.
    ``interceptors`` may raise KvernError.
    """

    def __init__(
        self,
        service_names: Sequence[str],
        options: Sequence[tuple[str, int]] = (),
        tls: Tls | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self._tls = tls
        self.grpc = grpc.aio.server(
            interceptors=[ErrorInterceptor(), *interceptors], options=[*SERVER_OPTIONS, *options]
        )
        self._names = ["", *service_names]
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection(
            [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], self.grpc
        )

    async def start(self, address: str) -> int:
        """Binds ``host:port`` (port 0: any free one) and returns the port. Raises OSError when it is taken."""
        await self.set_serving(False)
        await self._health.set(LIVENESS, SERVING)
        try:
            if self._tls is None or address.startswith("unix:"):
                port = self.grpc.add_insecure_port(address)
            else:
                port = self.grpc.add_secure_port(address, self._tls.server_credentials())
        except RuntimeError as error:
            why = (
                "its folder is missing, or closed to us"
                if address.startswith("unix:")
                else ("the port is in use, or the address is none of this machine's")
            )
            raise OSError(f"cannot listen on {address}: {why}; choose another") from error
        await self.grpc.start()
        return port

    async def set_serving(self, serving: bool) -> None:
        for name in self._names:
            await self._health.set(name, SERVING if serving else NOT_SERVING)

    async def drain(self, grace_s: float) -> None:
        """NOT_SERVING at once, then stop, giving open calls ``grace_s`` seconds."""
        await self.set_serving(False)
        await self.grpc.stop(grace_s)


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets. Call inside the running loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
