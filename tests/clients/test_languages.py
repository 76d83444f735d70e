"""Clients in six languages, each built with its own gRPC library, against a live gateway: README.md says what they do."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from e2e.running import BIN, Running, free_port, until
from google.protobuf.descriptor import FileDescriptor

from kvern.rpc.health import check
from kvern.rpc.tls import Tls
from kvern.v1 import generation_pb2
from kvern_gateway.keys import API_KEY_VARIABLE

FOLDER = Path(__file__).parent
PROTO = FOLDER.parents[1] / "proto"
KEY = "sesame"
LANGUAGES = ["cpp", "go", "java", "node", "python", "ruby"]


@dataclass
class Secured:
    """One more gateway of the same stack, with TLS and a key."""

    address: str
    authority: str


def certificates(folder: Path) -> Tls:
    """A leaf for 127.0.0.1, its key and its authority."""
    authority, names = trustme.CA(), ("tls.crt", "tls.key", "ca.crt")
    leaf = authority.issue_cert("127.0.0.1")
    tls = Tls(*(str(folder / name) for name in names))
    leaf.private_key_pem.write_to_path(tls.key)
    authority.cert_pem.write_to_path(tls.authorities)
    Path(tls.certificate).write_bytes(b"".join(pem.bytes() for pem in leaf.cert_chain_pems))
    return tls


@pytest.fixture(scope="module")
def secured(served: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    tls = certificates(folder)
    command = Path(f"/proc/{served.children()['gateway']}/cmdline").read_text().rstrip("\0").split("\0")
    port = free_port()
    argv = [str(BIN / "kvern-gateway"), "--http-port", "0", "--grpc-port", str(port)]
    argv += ["--ssl-certfile", tls.certificate, "--ssl-keyfile", tls.key]
    for flag in ("--scheduler", "--model", "--served-model-name"):
        argv += [flag, command[command.index(flag) + 1]]
    environment = {**os.environ, API_KEY_VARIABLE: KEY}
    with (folder / "gateway.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=environment)
    address = f"127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        stack.callback(process.wait, 20)
        stack.callback(process.terminate)
        until(lambda: check(address, "", 1.0, tls) == "SERVING", "the gateway with TLS serves")
        yield Secured(address, tls.authorities)


def files(service: FileDescriptor) -> set[str]:
    """A protocol file and those it imports."""
    return {service.name}.union(*(files(imported) for imported in service.dependencies))


def build(language: str, folder: Path) -> list[str]:
    """How to start the client. Fails the test where its compiler is not installed."""
    if language == "python":
        return [sys.executable, str(FOLDER / "python" / "client.py")]
    if language == "node":
        (folder / "proto").symlink_to(PROTO)
        (folder / "client.js").write_text((FOLDER / "node" / "client.js").read_text())
        argv = ["npm", "install", "--no-save", "@grpc/grpc-js", "@grpc/proto-loader"]
    else:
        argv = [
            "sh",
            str(FOLDER / language / "build.sh"),
            str(PROTO),
            str(folder),
            *files(generation_pb2.DESCRIPTOR),
        ]
    built = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, f"{built.stdout}{built.stderr}\nthe packages it needs: .ci/run"
    return ["node", "client.js"] if language == "node" else [str(folder / "client")]


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_client(language: str, served: Running, secured: Secured, tmp_path: Path) -> None:
    body = {
        "messages": [{"role": "user", "content": "Name three colors."}],
        "temperature": 0,
        "max_tokens": 32,
    }
    answer = served.client.post("/v1/chat/completions", json=body).json()
    text = answer["choices"][0]["message"]["content"].replace("\n", "\\n")
    assert "Blue" in text
    expected = {
        "stream": text,
        "resume": text,
        "cancel": "FINISH_REASON_ABORT",
        "deadline": "DEADLINE_EXCEEDED",
    }
    client = build(language, tmp_path)

    def run(*words: str, key: str = "") -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE}
        if key:
            environment[API_KEY_VARIABLE] = key
        argv = [*client, *words]
        return subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=90, env=environment)

    runs = [run(served.grpc_address)]
    if language != "java":  # Debian's netty is built without ALPN, which HTTP/2 over TLS needs
        runs.append(run(secured.address, secured.authority, key=KEY))
        refused = run(secured.address, secured.authority, key="another")
        assert "1. Red" not in refused.stdout
        assert refused.returncode != 0 or "key" in refused.stdout
    for done in runs:
        assert done.returncode == 0, done.stderr
        assert dict(line.split(" ", 1) for line in done.stdout.splitlines()) == expected
    until(
        lambda: "kvern_gateway_open_requests 0.0" in served.client.get("/metrics").text, "no request goes on"
    )
