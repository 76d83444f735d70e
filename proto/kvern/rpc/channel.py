"""Client channels with the options that make a dead or frozen peer visible quickly."""

from __future__ import annotations

from collections.abc import Callable

import grpc.aio

from kvern.rpc.tls import Tls

Dial = Callable[[str], grpc.aio.Channel]

MAX_MESSAGE_BYTES = 64 * 2**20

# A frozen peer is unnoticed for 60 s without ping_timeout_ms; reconnecting takes 2 s with the default backoff.
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 1_000),
    ("grpc.http2.ping_timeout_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Also the patience with one attempt: a busy peer may take a while to shake hands.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


def create_channel(target: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """A channel to ``host:port`` or ``unix:/path``. Connects lazily. Raises OSError where a TLS file is gone."""
    if tls is None or target.startswith("unix:"):
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    options = [*CHANNEL_OPTIONS, *tls.channel_options]
    return grpc.aio.secure_channel(target, tls.channel_credentials(), options=options)
