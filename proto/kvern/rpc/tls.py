"""TLS: mutual between the services, and on the gateway's public ports.

Unix sockets stay plain: the file's permissions guard them. A server reads its files anew when they change, for the
connections that come after; a client reads them when it dials, so a service is restarted after its certificate was
renewed and before the old one ends.
"""

from __future__ import annotations

import argparse
import os
import ssl
from dataclasses import dataclass

import grpc


@dataclass(frozen=True)
class Tls:
    """PEM files: this process's certificate (with its chain) and key, and the authorities that peers' must be signed
    by. Without ``authorities`` a server asks its clients for none, and a client trusts the system's."""

    certificate: str
    key: str
    authorities: str = ""
    peer_name: str = ""
    """What peers' certificates must be issued to, where that is not the host that is dialled."""

    def check(self) -> None:
        """Raises ValueError where a file cannot be read, is no PEM, or the key is not the certificate's."""
        for path in filter(None, (self.certificate, self.key, self.authorities)):
            try:
                with open(path, "rb") as file:
                    pem = file.read()
            except OSError as error:
                raise ValueError(f"cannot read {path}: {error.strerror}") from None
            if b"-----BEGIN " not in pem:
                raise ValueError(f"{path} is not a PEM file")
        try:
            self.context()
        except ssl.SSLError as error:
            raise ValueError(
                f"{self.certificate} and {self.key} do not belong together, or one is damaged: {error.reason}"
            ) from None

    def context(self) -> ssl.SSLContext:
        """For servers that are not gRPC's."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        if self.authorities:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.authorities)
        self.reload(context)
        return context

    def reload(self, context: ssl.SSLContext) -> None:
        """Connections from here on see the files as they are now. Raises ssl.SSLError, OSError."""
        context.load_cert_chain(self.certificate, self.key, password=_no_password)

    def server_credentials(self) -> grpc.ServerCredentials:
        seen = self.version()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Called at each handshake; None keeps what is there."""
            nonlocal seen
            now = self.version()
            if now in (seen, None):
                return None
            try:
                self.check()
            except ValueError:
                return None  # half written
            seen = now
            return self._configuration()

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            changed,  # type: ignore[arg-type]  # the stubs forget None
            require_client_authentication=bool(self.authorities),
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        authorities = _read(self.authorities) if self.authorities else None
        return grpc.ssl_channel_credentials(authorities, _read(self.key), _read(self.certificate))

    @property
    def channel_options(self) -> list[tuple[str, str]]:
        return [("grpc.ssl_target_name_override", self.peer_name)] if self.peer_name else []

    def version(self) -> tuple[float, ...] | None:
        """Another value after a file was replaced; None while one is missing."""
        try:
            return tuple(
                os.stat(path).st_mtime_ns
                for path in filter(None, (self.certificate, self.key, self.authorities))
            )
        except OSError:
            return None

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        authorities = _read(self.authorities) if self.authorities else None
        return grpc.ssl_server_certificate_configuration(
            [(_read(self.key), _read(self.certificate))], authorities
        )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """``--tls-cert``, ``--tls-key``, ``--tls-ca``, ``--tls-peer-name``: the same on every service."""
    add = parser.add_argument_group("mutual TLS between services; all three files, or none").add_argument
    add("--tls-cert", metavar="FILE", help="this service's certificate, PEM")
    add("--tls-key", metavar="FILE", help="its key, PEM, without a password")
    add("--tls-ca", metavar="FILE", help="authorities that sign the services' certificates, PEM")
    add(
        "--tls-peer-name",
        default="",
        metavar="NAME",
        help="name that the other services' certificates have (default: the host that is dialled)",
    )


def from_flags(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Tls | None:
    """What :func:`add_flags` got. Ends the process with 2 where it makes no sense."""
    given = {name: getattr(arguments, name) for name in ("tls_cert", "tls_key", "tls_ca")}
    missing = [f"--{name.replace('_', '-')}" for name, value in given.items() if not value]
    if len(missing) == len(given):
        if arguments.tls_peer_name:
            parser.error("--tls-peer-name has no effect without --tls-cert, --tls-key and --tls-ca")
        return None
    if missing:
        parser.error(f"mutual TLS also needs {' and '.join(missing)}")
    tls = Tls(arguments.tls_cert, arguments.tls_key, arguments.tls_ca, arguments.tls_peer_name)
    try:
        tls.check()
    except ValueError as error:
        parser.error(str(error))
    return tls


def _no_password() -> str:
    raise ssl.SSLError(0, "the key has a password")


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
