"""``kvern-health ADDRESS``: asks a service for its health, for container health checks. Exit 0 when it serves."""

from __future__ import annotations

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvern.rpc import tls
from kvern.rpc.tls import Tls

LIVENESS = "liveness"
"""A name that the health service knows: SERVING as long as the process answers, also while it loads, stands by or drains."""


def check(address: str, service: str, timeout_s: float, tls: Tls | None = None) -> str:
    """The status of ``service`` at ``address`` ("SERVING", "NOT_SERVING"), or why there is none ("UNAVAILABLE: …")."""
    with _channel(address, tls) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _channel(address: str, tls: Tls | None) -> grpc.Channel:
    if tls is None or address.startswith("unix:"):
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, tls.channel_credentials(), options=tls.channel_options)


def main() -> None:
    parser = argparse.ArgumentParser(prog="kvern-health", description=__doc__)
    parser.add_argument("address", metavar="ADDR", help="host:port or unix:/path")
    parser.add_argument(
        "--service", default="", help="default: the server as a whole, which is ready for work"
    )
    parser.add_argument(
        "--alive",
        dest="service",
        action="store_const",
        const=LIVENESS,
        help="whether it runs; a standby and a draining service do",
    )
    parser.add_argument("--timeout", type=float, default=2.0, metavar="S")
    tls.add_flags(parser)
    args = parser.parse_args()
    status = check(args.address, args.service, args.timeout, tls.from_flags(parser, args))
    print(status)
    sys.exit(status != "SERVING")


if __name__ == "__main__":
    main()
