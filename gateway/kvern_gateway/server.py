"""``kvern-gateway``: HTTP and gRPC in one process on one event loop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import logging
import os
import ssl
import sys
from collections.abc import Sequence
from email.utils import formatdate
from pathlib import Path
from typing import Any, cast

import uvicorn
import uvloop

from kvern.rpc import logs, spellings, tls, tracing
from kvern.rpc.channel import create_channel
from kvern.rpc.flags import endpoint, port, positive, seconds
from kvern.rpc.server import Server, stop_on_signals
from kvern.rpc.tls import Tls
from kvern.v1 import generation_pb2_grpc, operations_pb2_grpc
from kvern_gateway import operations
from kvern_gateway.gateway import Gateway
from kvern_gateway.generation import unavailable
from kvern_gateway.grpc_service import SERVICE_NAME, GenerationService, KeyInterceptor
from kvern_gateway.http.app import create_app
from kvern_gateway.http.protocol import Connection
from kvern_gateway.keys import API_KEY_VARIABLE, KeyFileError, Keys
from kvern_gateway.limits import Limits
from kvern_gateway.media import flags as media_flags
from kvern_gateway.media.flags import MAX_BODY_BYTES
from kvern_gateway.metrics import Metrics
from kvern_gateway.scheduler_client import SchedulerClient
from kvern_gateway.strict_decode import add_strictly
from kvern_gateway.text.tokenizer import ModelFilesError, load_text_model

log = logging.getLogger("kvern.gateway")

DEFAULT_GRACE_S = 30.0
RENEWAL_POLL_S = 1.0
# Of the grace, for telling clients whose answers did not finish.
LAST_WORDS_S = 0.3


def _schedulers(text: str) -> list[str]:
    return [endpoint(word) for word in text.split(",")]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "kvern-gateway", description="OpenAI HTTP and gRPC in front of a scheduler."
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--http-port", type=port, default=8000, help="0: any free port")
    parser.add_argument("--grpc-port", type=port, default=50051, help="0: any free port")
    parser.add_argument(
        "--scheduler",
        type=_schedulers,
        required=True,
        help="ADDR[,ADDR…] of one cell's scheduler and its standbys",
    )
    parser.add_argument(
        "--model", required=True, help="Hugging Face folder or .gguf file: tokenizer and chat template"
    )
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        help="names that requests may use besides the workers' own",
    )
    parser.add_argument(
        "--generation-config",
        choices=("auto", "vllm"),
        default="auto",
        help="auto: sampling defaults from the model's generation_config.json; vllm: neutral ones",
    )
    parser.add_argument(
        "--allow-runtime-lora-updating",
        action=argparse.BooleanOptionalAction,
        default=os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true"),
        help="let clients load and unload LoRA adapters, from any folder that workers can read",
    )
    parser.add_argument(
        "--max-body-bytes",
        type=positive,
        help=f"of an HTTP request (default: {Limits().max_body_bytes}, or {MAX_BODY_BYTES} where the model takes images)",
    )
    parser.add_argument(
        "--shutdown-grace", type=seconds, default=DEFAULT_GRACE_S, help="seconds for open streams"
    )
    logs.add_flags(parser)
    parser.add_argument(
        "--api-key",
        nargs="+",
        default=[],
        metavar="KEY",
        help=f"keys that clients may send; others see them in the process list, so prefer {API_KEY_VARIABLE}",
    )
    parser.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="YAML list of keys (name, sha256) with limits of each; read anew when it changes",
    )
    public = parser.add_argument_group("TLS on the HTTP and gRPC ports").add_argument
    public("--ssl-certfile", metavar="FILE", help="the gateway's certificate and its chain, PEM")
    public("--ssl-keyfile", metavar="FILE", help="its key, PEM, without a password")
    public(
        "--ssl-ca-certs", default="", metavar="FILE", help="clients must have a certificate that these sign"
    )
    media_flags.add_flags(parser)
    tls.add_flags(parser)
    tracing.add_flags(parser)
    return parser


def public_tls(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Tls | None:
    """Of ``--ssl-…``. Ends the process with 2 where they make no sense."""
    if not arguments.ssl_certfile and not arguments.ssl_keyfile:
        if arguments.ssl_ca_certs:
            parser.error("--ssl-ca-certs has no effect without --ssl-certfile and --ssl-keyfile")
        return None
    if not arguments.ssl_certfile or not arguments.ssl_keyfile:
        parser.error("TLS needs both --ssl-certfile and --ssl-keyfile")
    found = Tls(arguments.ssl_certfile, arguments.ssl_keyfile, arguments.ssl_ca_certs)
    try:
        found.check()
    except ValueError as error:
        parser.error(str(error))
    return found


class HttpServer:
    """uvicorn's protocol under our own life cycle: no signal handlers, no lifespan, no access log."""

    def __init__(self, gateway: Gateway, tls: Tls | None = None) -> None:
        self._tls = tls
        self._context = tls.context() if tls else None
        self._config = uvicorn.Config(
            create_app(gateway),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
        )
        self._config.load()
        self._state = uvicorn.server.ServerState()
        self._server: asyncio.Server | None = None
        self._clock: asyncio.Task[None] | None = None
        self._renewals: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Binds and returns the port. Raises OSError when it is taken."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self._config, self._state, {}), host, port, backlog=2048, ssl=self._context
        )
        self._clock = asyncio.create_task(self._date_header())
        if self._context is not None:
            self._renewals = asyncio.create_task(self._renew())
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def connections(self) -> list[Connection]:
        return list(cast(set[Connection], self._state.connections))

    async def _date_header(self) -> None:
        while True:
            self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
            await asyncio.sleep(1)

    async def _renew(self) -> None:
        """Connections after a renewed certificate get that one."""
        assert self._tls is not None and self._context is not None
        seen = self._tls.version()
        while True:
            await asyncio.sleep(RENEWAL_POLL_S)
            if (now := self._tls.version()) in (seen, None):
                continue
            with contextlib.suppress(OSError, ssl.SSLError):  # half written
                self._tls.reload(self._context)
                seen = now

    async def stop(self, grace_s: float) -> None:
        """Stops accepting, lets open answers finish within the grace, then cuts what is left."""
        if self._server is not None:
            self._server.close()
        for connection in self.connections:
            connection.shutdown()
        deadline = asyncio.get_running_loop().time() + grace_s
        while self._state.tasks and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        for connection in self.connections:
            connection.transport.abort()
        for task in filter(None, (self._clock, self._renewals)):
            task.cancel()


class GatewayServer:
    """The whole process, for ``main`` and for tests."""

    def __init__(self, gateway: Gateway, tls: Tls | None = None) -> None:
        self.gateway = gateway
        self._http = HttpServer(gateway, tls)
        names = [SERVICE_NAME, operations.SERVICE_NAME]
        self._grpc = Server(names, tls=tls, interceptors=[KeyInterceptor(gateway.keys)])
        self._tasks: list[asyncio.Task[None]] = []
        self.failed: asyncio.Future[None]

    async def start(self, host: str, http_port: int, grpc_port: int) -> tuple[int, int]:
        """Ports of HTTP and gRPC. Raises OSError when one is taken."""
        service = GenerationService(self.gateway)
        add_strictly(generation_pb2_grpc.add_GenerationServiceServicer_to_server, service, self._grpc.grpc)
        operating = operations.OperationsService(self.gateway)
        add_operations = operations_pb2_grpc.add_OperationsServiceServicer_to_server
        add_strictly(add_operations, operating, self._grpc.grpc)
        self.failed = asyncio.get_running_loop().create_future()
        ports = await self._http.start(host, http_port), await self._grpc.start(f"{host}:{grpc_port}")
        self._tasks = [
            asyncio.create_task(self.gateway.client.run()),
            asyncio.create_task(self._follow_session()),
            asyncio.create_task(self.gateway.renderer.start()),
            *([asyncio.create_task(self.gateway.images.start())] if self.gateway.images else []),
            asyncio.create_task(self._follow_keys()),
        ]
        return ports

    @property
    def http_connections(self) -> list[Connection]:
        return self._http.connections

    async def _follow_session(self) -> None:
        """Readiness follows the session; the first welcome, and each later one, is checked against the tokenizer."""
        ready, seen = False, None
        while True:
            welcome = self.gateway.client.welcome
            if welcome is not None and welcome is not seen:
                seen = welcome
                try:
                    self.gateway.check_compatible()
                except ValueError as error:
                    if not self.failed.done():
                        self.failed.set_exception(error)
                    return
            if self.gateway.ready != ready:
                ready = self.gateway.ready
                await self._grpc.set_serving(ready)
                log.info("ready" if ready else "not ready")
            await asyncio.sleep(0.02)

    async def _follow_keys(self) -> None:
        """Keys that were added or withdrawn hold from the next request on."""
        keys = self.gateway.keys
        while True:
            await asyncio.sleep(RENEWAL_POLL_S)
            if keys.changed():
                try:
                    keys.reload()
                except KeyFileError as error:
                    log.error("the keys stay as they were: %s", error)

    async def stop(self, grace_s: float) -> None:
        """What is open may finish within the grace; the rest is told, not cut."""
        self.gateway.draining = True
        telling = asyncio.create_task(self._tell_open(max(grace_s - LAST_WORDS_S, 0.0)))
        await asyncio.gather(self._http.stop(grace_s), self._grpc.drain(grace_s))
        telling.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.gateway.renderer.close()
        if self.gateway.images is not None:
            await self.gateway.images.close()
        if self.gateway.tracing is not None:
            await asyncio.to_thread(self.gateway.tracing.close)

    async def _tell_open(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self.gateway.client.requests.leave(
            unavailable(
                "this gateway is stopping; send the request again, or go on with it by its id elsewhere", 100
            )
        )


def _given_keys(parser: argparse.ArgumentParser, flags: Sequence[str]) -> list[str]:
    """Of flags and the variable. Ends the process with 2 where one is empty: a secret that did not arrive opens no door."""
    variable = os.environ.get(API_KEY_VARIABLE)
    if variable is not None and not variable.split():
        parser.error(f"{API_KEY_VARIABLE} is set and empty; put a key into it, or unset it to let anybody in")
    keys = [*flags, *(variable or "").split()]
    if "" in keys:
        parser.error("--api-key is empty; give a key, or leave it out to let anybody in")
    return keys


async def serve(arguments: argparse.Namespace) -> int:
    stop = stop_on_signals()
    text = load_text_model(arguments.model)
    if arguments.generation_config == "vllm":
        text.sampling_defaults = {}
    images = media_flags.from_flags(arguments, text)
    gateway = Gateway(
        text,
        SchedulerClient(arguments.scheduler, dial=functools.partial(create_channel, tls=arguments.tls)),
        Limits(
            max_body_bytes=arguments.max_body_bytes or (MAX_BODY_BYTES if images else Limits().max_body_bytes)
        ),
        arguments.served_model_name,
        Metrics(),
        Keys(arguments.api_key, arguments.api_keys),
        arguments.tracing,
        arguments.allow_runtime_lora_updating,
        images,
    )
    server = GatewayServer(gateway, arguments.ssl)
    http_port, grpc_port = await server.start(arguments.host, arguments.http_port, arguments.grpc_port)
    # What has been built by now stays: the collector need not walk the vocabulary again and again.
    gc.collect()
    gc.freeze()
    scheme = "https" if arguments.ssl else "http"
    log.info(
        "HTTP on %s://%s:%d, gRPC on %s:%d", scheme, arguments.host, http_port, arguments.host, grpc_port
    )
    stopping = asyncio.ensure_future(stop.wait())
    waited: list[asyncio.Future[Any]] = [stopping, server.failed]
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if server.failed.done():
        log.error("%s", server.failed.exception())
        await server.stop(0)
        return 1
    log.info("stopping: open answers have %.0f s to finish", arguments.shutdown_grace)
    await server.stop(arguments.shutdown_grace)
    return 0


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    arguments = spellings.parse(parser, argv)
    arguments.api_key = _given_keys(parser, arguments.api_key)
    arguments.tracing = tracing.from_flags(parser, arguments, "kvern-gateway")
    arguments.tls, arguments.ssl = tls.from_flags(parser, arguments), public_tls(parser, arguments)
    logs.configure(arguments)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            sys.exit(uvloop.run(serve(arguments)))
        except (ModelFilesError, KeyFileError) as error:
            # 2, as for wrong flags: trying again does not help.
            print(f"kvern-gateway: {error}", file=sys.stderr)
            sys.exit(2)
        except OSError as error:
            sys.exit(f"kvern-gateway: {error}")


if __name__ == "__main__":
    main()
