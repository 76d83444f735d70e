"""Spans of one request from gateway and scheduler, as a collector receives them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from e2e.running import Running, run_kvern, until
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvern.v1 import generation_pb2, generation_pb2_grpc

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class Collector:
    """An OTLP endpoint that keeps what it gets: (service, span)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Not of interest."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            (service,) = [
                a.value.string_value for a in resource.resource.attributes if a.key == "service.name"
            ]
            self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]

    def named(self, trace: str, name: str) -> list[tuple[str, Any]]:
        return [(s, span) for s, span in self.spans if span.trace_id.hex() == trace and span.name == name]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


@pytest.fixture(scope="module")
def traced(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    flags = ("--device", "sim", "--sim-step-us", "5000", "--otlp-traces-endpoint", collector.url)
    with run_kvern(tmp_path_factory.mktemp("traced"), *flags) as running:
        yield running


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def check(collector: Collector, call: str, trace: str, parent: str) -> None:
    until(lambda: collector.named(trace, "sequence") and collector.named(trace, call), "spans arrive", 20)
    ((service, outer),) = collector.named(trace, call)
    assert (service, outer.parent_span_id.hex()) == ("kvern-gateway", parent)
    assert 0 < attributes(outer)["gen_ai.latency.time_to_first_token"] < 10
    sequences = collector.named(trace, "sequence")
    assert {attributes(span)["kvern.choice"] for _, span in sequences} == {0, 1}
    for service, span in sequences:
        assert (service, span.parent_span_id) == ("kvern-scheduler", outer.span_id)
        assert attributes(span)["gen_ai.usage.completion_tokens"] == 20
        assert attributes(span)["gen_ai.response.finish_reasons"] == "length"
        phases = {p.name: p for _, p in collector.spans if p.parent_span_id == span.span_id}
        assert {"prefill", "decode"} <= phases.keys()
        assert phases["prefill"].end_time_unix_nano == phases["decode"].start_time_unix_nano
        # 19 steps of 5 ms follow the first token.
        assert phases["decode"].end_time_unix_nano - phases["decode"].start_time_unix_nano > 19 * 4_500_000
        assert outer.start_time_unix_nano <= span.start_time_unix_nano + 50_000_000
    # The worker: one span for each of about 20 steps, though two choices decode in them.
    until(lambda: len(collector.named(trace, "step")) >= 20, "the worker's spans arrive", 20)
    steps = collector.named(trace, "step")
    numbers = [attributes(span)["kvern.step"] for _, span in steps]
    assert len(set(numbers)) == len(numbers) <= 26
    for service, span in steps:
        assert (service, span.parent_span_id) == ("kvern-worker", outer.span_id)
        assert attributes(span)["kvern.forward_us"] > 4_500
        assert span.end_time_unix_nano - span.start_time_unix_nano > 4_500_000
    assert sum(attributes(span)["kvern.num_decoded"] for _, span in steps) == 2 * 19
    assert "secret" not in "".join(map(str, collector.spans))


def test_a_clients_trace_goes_on_through_gateway_and_scheduler(traced: Running, collector: Collector) -> None:
    body = {"prompt": "a secret", "max_tokens": 20, "n": 2, "ignore_eos": True}
    assert traced.client.post("/v1/completions", json=body, headers=HEADERS).status_code == 200
    check(collector, "POST /v1/completions", TRACE, PARENT)


def test_over_grpc_too(traced: Running, collector: Collector) -> None:
    trace = TRACE[::-1]
    request = generation_pb2.GenerateRequest(prompt="a secret", n=2)
    request.sampling.max_tokens, request.sampling.ignore_eos = 20, True
    with grpc.insecure_channel(traced.grpc_address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        metadata = (("traceparent", f"00-{trace}-{PARENT}-01"),)
        assert len(list(stub.Generate(request, metadata=metadata, timeout=30))) > 2
    check(collector, "kvern.v1.GenerationService/Generate", trace, PARENT)


def test_a_client_may_say_that_it_wants_none(traced: Running, collector: Collector) -> None:
    trace = "1" * 32
    headers = {"traceparent": f"00-{trace}-{PARENT}-00"}
    body = {"prompt": "x", "max_tokens": 1}
    for sent in (headers, HEADERS | {"traceparent": f"00-{'2' * 32}-{PARENT}-01"}):
        assert traced.client.post("/v1/completions", json=body, headers=sent).status_code == 200
    until(lambda: collector.named("2" * 32, "sequence"), "the later one's spans arrive", 20)
    assert not [span for _, span in collector.spans if span.trace_id.hex() == trace]


def test_a_collector_that_is_away_costs_no_request_anything(tmp_path: Path) -> None:
    flags = ("--device", "sim", "--store", "memory", "--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces")
    with run_kvern(tmp_path, *flags) as running:
        assert running.complete("x", max_tokens=5)["usage"]["completion_tokens"] == 5
