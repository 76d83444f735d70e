"""What the services' metrics share: the labels and histogram bounds of vLLM's, so that its dashboards and alerts work
unchanged, and the HTTP endpoint of a service that has no other.

A name is exported by one service only: what a client sees by the gateway, what happens inside by the scheduler.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app

LABELS = ("model_name", "engine")

# fmt: off
TIME_TO_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)
INTER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)
# fmt: on
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> None:
    """Answers GET on ``host:port`` from a thread, for as long as the process lives. Raises OSError where it is taken.

    Always in the plain text format: in OpenMetrics, which Prometheus prefers, prometheus_client writes ``vllm_…`` for
    ``vllm:…`` unless the scraper is new enough to ask otherwise.
    """
    answer = make_wsgi_app(registry)

    def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        environ.pop("HTTP_ACCEPT", None)
        return answer(environ, start_response)

    try:
        server = make_server(host, port, application, ThreadingWSGIServer, handler_class=_Silent)
    except OSError as error:
        raise OSError(
            f"cannot serve metrics on {host}:{port} ({error.strerror}); choose another --metrics-port"
        ) from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are no news."""
