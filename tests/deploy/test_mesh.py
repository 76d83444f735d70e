"""All services over TCP with mutual TLS, behind a real Envoy, restarted one after the other under load."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import envoy._bin
import grpc
import httpx
import pytest
import trustme
import yaml
from e2e.running import BIN, free_port, until

from kvern.rpc.health import LIVENESS, check
from kvern.rpc.tls import Tls
from kvern.v1 import generation_pb2, generation_pb2_grpc, sampling_pb2
from kvern_gateway.cli.stack import DEFAULT_MODEL_VOCAB_SIZE, find_default_model, find_store_server

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "mesh" / "envoy.yaml"
ENVOY = Path(envoy._bin.__file__).parent / "envoy"
NAME = "kvern-gateway"  # the one that the configuration expects
MAX_TOKENS = 150


@dataclass
class Mesh:
    """Processes by name, each with the address that tells its health."""

    folder: Path
    tls: Tls
    port: int
    argv: dict[str, list[str]] = field(default_factory=dict)
    health: dict[str, str] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(self.argv[name], stdout=log, stderr=log)

    def status(self, name: str, service: str = "") -> str:
        return check(self.health[name], service, 2.0, self.tls)

    def restart(self, name: str) -> None:
        """SIGTERM, and the next life is there and, were it not a standby, serving."""
        self.processes[name].terminate()
        assert self.processes[name].wait(30) == 0, (self.folder / f"{name}.log").read_text()[-2000:]
        self.start(name)
        service = LIVENESS if name.startswith("scheduler") else ""
        until(lambda: self.status(name, service) == "SERVING", f"{name} is back")

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()


def certificates(folder: Path) -> Tls:
    authority = trustme.CA()
    leaf = authority.issue_cert(NAME)
    tls = Tls(*(str(folder / name) for name in ("tls.crt", "tls.key", "ca.crt")), peer_name=NAME)
    leaf.private_key_pem.write_to_path(tls.key)
    authority.cert_pem.write_to_path(tls.authorities)
    Path(tls.certificate).write_bytes(b"".join(pem.bytes() for pem in leaf.cert_chain_pems))
    return tls


def envoy_configuration(folder: Path, port: int, gateways: Sequence[tuple[int, int]]) -> Path:
    """The one in deploy/mesh, with the test's files and ports."""
    text = CONFIGURATION.read_text().replace("/etc/kvern/tls", str(folder)).replace("0.0.0.0", "127.0.0.1")
    configuration = yaml.safe_load(text)
    resources = configuration["static_resources"]
    resources["listeners"][0]["address"]["socket_address"]["port_value"] = port
    configuration["admin"]["address"]["socket_address"]["port_value"] = free_port()
    for index, cluster in enumerate(resources["clusters"]):
        endpoints = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        for endpoint, ports in zip(endpoints, gateways, strict=True):
            address = endpoint["endpoint"]["address"]["socket_address"]
            address["address"], address["port_value"] = "127.0.0.1", ports[index]
    path = folder / "envoy.yaml"
    path.write_text(yaml.safe_dump(configuration))
    return path


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    tmp_path = tmp_path_factory.mktemp("mesh")
    tls = certificates(tmp_path)
    mesh = Mesh(tmp_path, tls, free_port())
    store = f"{tmp_path}/store.sock"
    worker, *schedulers = (f"127.0.0.1:{free_port()}" for _ in range(3))
    gateways = [(free_port(), free_port()) for _ in range(2)]
    files = [tls.certificate, tls.key, tls.authorities]
    mutual = [
        word for pair in zip(("--tls-cert", "--tls-key", "--tls-ca"), files, strict=True) for word in pair
    ]
    mutual += ["--tls-peer-name", NAME]
    public = ["--ssl-certfile", files[0], "--ssl-keyfile", files[1], "--ssl-ca-certs", files[2]]
    model = str(find_default_model())
    mesh.argv["store"] = [
        *(find_store_server(), "--port", "0", "--unixsocket", store, "--dir", str(tmp_path)),
        *("--appendonly", "yes", "--save", ""),
    ]
    mesh.argv["worker"] = [
        *(str(BIN / "kvern-worker"), "--listen", worker, "--device", "sim", "--sim-step-us", "4000"),
        *("--sim-vocab-size", str(DEFAULT_MODEL_VOCAB_SIZE), "--served-model-name", "m", *mutual),
    ]
    for index, address in enumerate(schedulers):
        mesh.argv[f"scheduler-{index}"] = [
            *(str(BIN / "kvern-scheduler"), "--listen", address, "--worker", worker),
            *("--redis-url", f"unix://{store}", *mutual),
        ]
        mesh.health[f"scheduler-{index}"] = address
    for index, (http_port, grpc_port) in enumerate(gateways):
        mesh.argv[f"gateway-{index}"] = [
            *(str(BIN / "kvern-gateway"), "--http-port", str(http_port), "--grpc-port", str(grpc_port)),
            *("--scheduler", ",".join(schedulers), "--model", model, *public, *mutual),
        ]
        mesh.health[f"gateway-{index}"] = f"127.0.0.1:{grpc_port}"
    mesh.health["worker"] = worker
    configuration = envoy_configuration(tmp_path, mesh.port, gateways)
    mesh.argv["envoy"] = [str(ENVOY), "-c", str(configuration), "--log-level", "error", "--concurrency", "1",
                          "--base-id", str(os.getpid() % 2**20)]  # fmt: skip
    try:
        for name in mesh.argv:
            mesh.start(name)
        for name in ("gateway-0", "gateway-1"):
            until(lambda name=name: mesh.status(name) == "SERVING", f"{name} serves", 60)
        until(lambda: through_http(mesh.port, seed=0) and through_grpc(mesh.port, seed=0), "Envoy serves")
        yield mesh
    finally:
        mesh.stop()


def through_http(port: int, seed: int) -> list[int] | None:
    """Token ids of a streamed completion; None where it is refused. Raises where the stream breaks."""
    body = {"prompt": "Once upon a time", "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True,
            "temperature": 1.0, "seed": seed, "return_token_ids": True}  # fmt: skip
    tokens: list[int] = []
    with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30) as answer:
        if answer.status_code != 200:
            return None
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = yaml.safe_load(line[6:])
                assert "error" not in event, event
                tokens += event["choices"][0].get("token_ids") or [] if event.get("choices") else []
    return tokens


def through_grpc(port: int, seed: int) -> list[int] | None:
    request = generation_pb2.GenerateRequest(
        prompt="Once upon a time",
        sampling=sampling_pb2.SamplingParams(
            temperature=1.0, seed=seed, max_tokens=MAX_TOKENS, ignore_eos=True
        ),
        n=1,
    )
    tokens: list[int] = []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            for event in generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=30):
                tokens += event.delta.token_ids
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and not tokens:
                return None
            raise
    return tokens


def test_a_rolling_restart_behind_envoy_is_nobodys_error(mesh: Mesh) -> None:
    expected = {seed: through_http(mesh.port, seed) for seed in (1, 2, 3)}
    assert all(tokens and len(tokens) == MAX_TOKENS for tokens in expected.values())
    stop = threading.Event()

    def client(seed: int) -> int:
        ask = through_http if seed % 2 else through_grpc
        for done in range(10_000):
            if stop.is_set():
                return done
            tokens = ask(mesh.port, seed)
            assert tokens == expected[seed], f"request {done} of client {seed}: {tokens}"
        raise AssertionError("the restarts took too long")

    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(client, seed) for seed in expected]
        try:
            for name in ("gateway-0", "scheduler-0", "gateway-1", "scheduler-1", "worker"):
                mesh.restart(name)
                time.sleep(1.5)  # Envoy looks once a second who serves
        finally:
            stop.set()
        assert all(one.result() > 0 for one in clients)


def test_nobody_without_a_certificate_is_let_in(mesh: Mesh) -> None:
    for address in mesh.health.values():
        assert check(address, "", 2.0).startswith("UNAVAILABLE")
    http_port = mesh.argv["gateway-0"][mesh.argv["gateway-0"].index("--http-port") + 1]
    with pytest.raises(httpx.TransportError):
        httpx.get(f"https://127.0.0.1:{http_port}/health", verify=False)
    with contextlib.suppress(httpx.TransportError):
        assert httpx.get(f"http://127.0.0.1:{http_port}/health").status_code != 200
