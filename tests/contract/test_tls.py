"""Mutual TLS of the shared runtime, with certificates that trustme makes."""

import argparse
import asyncio
import os
from dataclasses import dataclass, replace

import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvern.rpc import health, tls
from kvern.rpc.channel import create_channel
from kvern.rpc.server import Server
from kvern.rpc.tls import Tls


@dataclass
class Issued:
    """An authority, and files that it signed."""

    authority: trustme.CA
    tls: Tls


def issue(directory, name: str, authority: trustme.CA | None = None) -> Issued:
    directory.mkdir(parents=True, exist_ok=True)
    authority = authority or trustme.CA()
    leaf = authority.issue_cert(name)
    paths = [str(directory / file) for file in ("tls.crt", "tls.key", "ca.crt")]
    certificate, key, authorities = paths
    with open(certificate, "wb") as file:
        file.writelines(pem.bytes() for pem in leaf.cert_chain_pems)
    leaf.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(authorities)
    return Issued(authority, Tls(certificate, key, authorities))


@pytest.fixture
def ours(tmp_path) -> Issued:
    return issue(tmp_path / "ours", "127.0.0.1")


async def status(address: str, credentials: Tls | None) -> str:
    async with create_channel(address, credentials) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=5
            )
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


@pytest.fixture
async def serve():
    servers = []

    async def start(credentials: Tls, address: str = "127.0.0.1:0") -> str:
        server = Server([], tls=credentials)
        servers.append(server)
        port = await server.start(address)
        await server.set_serving(True)
        return address.replace(":0", f":{port}")

    yield start
    for server in servers:
        await server.drain(0)


async def test_both_ends_show_a_certificate_of_the_same_authority(serve, ours, tmp_path):
    address = await serve(ours.tls)
    stranger = issue(tmp_path / "stranger", "127.0.0.1").tls
    assert await status(address, ours.tls) == "SERVING"
    assert await status(address, None) == "UNAVAILABLE"
    # Takes our certificate, and has one of another authority.
    assert await status(address, replace(stranger, authorities=ours.tls.authorities)) == "UNAVAILABLE"
    # Has one of ours, and does not take the server's.
    assert await status(address, replace(ours.tls, authorities=stranger.authorities)) == "UNAVAILABLE"


async def test_a_peer_is_known_by_the_host_or_by_the_name_that_is_asked_for(serve, tmp_path):
    named = issue(tmp_path / "named", "kvern.internal").tls
    address = await serve(named)
    assert await status(address, named) == "UNAVAILABLE"
    assert await status(address, replace(named, peer_name="kvern.internal")) == "SERVING"
    assert await status(address, replace(named, peer_name="other.internal")) == "UNAVAILABLE"


async def test_without_authorities_clients_need_no_certificate(serve, ours):
    address = await serve(replace(ours.tls, authorities=""))
    async with grpc.aio.secure_channel(
        address, grpc.ssl_channel_credentials(ours.authority.cert_pem.bytes())
    ) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_unix_sockets_stay_plain(serve, ours, tmp_path):
    address = await serve(ours.tls, f"unix:{tmp_path}/s")
    assert await status(address, None) == await status(address, ours.tls) == "SERVING"


async def test_a_renewed_certificate_is_shown_to_the_next_client(serve, ours, tmp_path):
    address = await serve(ours.tls)
    assert await status(address, ours.tls) == "SERVING"
    renewed = issue(tmp_path / "renewed", "127.0.0.1")
    assert await status(address, renewed.tls) == "UNAVAILABLE"
    for name in ("tls.key", "tls.crt", "ca.crt"):
        os.replace(tmp_path / "renewed" / name, tmp_path / "ours" / name)
    assert await status(address, ours.tls) == "SERVING"
    # Half a certificate changes nothing.
    (tmp_path / "ours" / "tls.key").write_text("-----BEGIN ")
    good = issue(tmp_path / "again", "127.0.0.1", renewed.authority).tls
    assert await status(address, good) == "SERVING"


async def test_the_health_command_takes_certificates(serve, ours):
    address = await serve(ours.tls)
    assert await asyncio.to_thread(health.check, address, "", 5.0, ours.tls) == "SERVING"
    assert (await asyncio.to_thread(health.check, address, "", 5.0)).startswith("UNAVAILABLE")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tls_key": None}, "mutual TLS also needs --tls-key"),
        ({"tls_key": None, "tls_ca": None}, "also needs --tls-key and --tls-ca"),
        ({"tls_cert": "{d}/absent.crt"}, "cannot read {d}/absent.crt: No such file"),
        ({"tls_ca": "{d}/empty"}, "{d}/empty is not a PEM file"),
        ({"tls_key": "{d}/other/tls.key"}, "do not belong together"),
        ({"tls_cert": None, "tls_key": None, "tls_ca": None, "tls_peer_name": "x"}, "has no effect without"),
    ],
)
def test_wrong_files_are_refused_with_the_reason(ours, tmp_path, capsys, change, complaint):
    issue(tmp_path / "other", "127.0.0.1")
    (tmp_path / "empty").touch()
    values = {
        "tls_cert": ours.tls.certificate,
        "tls_key": ours.tls.key,
        "tls_ca": ours.tls.authorities,
        "tls_peer_name": "",
    }
    values |= {name: value and value.format(d=tmp_path) for name, value in change.items()}
    with pytest.raises(SystemExit) as ended:
        tls.from_flags(argparse.ArgumentParser(), argparse.Namespace(**values))
    assert ended.value.code == 2
    assert complaint.format(d=tmp_path) in capsys.readouterr().err
