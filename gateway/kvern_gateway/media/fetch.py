"""Images from where requests say they are, without letting requests reach what they should not.

* A URL is taken apart once, and what is checked is what is asked for.
* Names are resolved here; all their addresses must be public, and the connection goes to one that was checked.
* Redirects are followed a few times, each checked like the first.
* Size and time are bounded while reading; nothing is decoded here.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpcore
import httpx

from kvern.errors import KvernError, invalid
from kvern.v1 import error_pb2

_REDIRECTS = (301, 302, 303, 307, 308)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether an IP address belongs to nobody's own network, however it is written."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        # Tunnels end at an IPv4 address that lies within.
        if ip.sixtofour is not None or ip.teredo is not None or ip in _NAT64:
            return False
    return ip.is_global and not ip.is_multicast


@dataclass(frozen=True, kw_only=True)
class MediaRules:
    """``allowed_domains``: hosts that may be asked; None: all that are public. ``local_path``: under which file:// URLs
    may lie; None: nowhere."""

    allowed_domains: frozenset[str] | None = None
    local_path: Path | None = None
    max_bytes: int = 20 * 2**20
    timeout_s: float = 5.0
    max_redirects: int = 3
    is_public: Callable[[str], bool] = field(default=is_public)


class Fetcher:
    """``max_connections`` bounds how many are fetched at a time."""

    def __init__(self, rules: MediaRules, max_connections: int = 32) -> None:
        self._rules = rules
        self._slots = asyncio.Semaphore(max_connections)

    async def fetch(self, name: str, url: str) -> bytes:
        """The bytes at a data:, http:, https: or file: URL. ``name``: the field that has it. Raises KvernError."""
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return self._data(name, url)
        if scheme == "file":
            return await asyncio.to_thread(self._file, name, url)
        if scheme in ("http", "https"):
            try:
                async with self._slots, asyncio.timeout(self._rules.timeout_s):
                    return await self._http(name, url)
            except TimeoutError:
                limit = f"{self._rules.timeout_s:g} s"
                raise invalid(name, f"{name} took longer than {limit} to fetch", limit=limit) from None
        limit = "a data:, http(s): or file: URL"
        raise invalid(name, f"{name} must be {limit}", value=scheme[:20], limit=limit)

    def _data(self, name: str, url: str) -> bytes:
        head, comma, payload = url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise invalid(name, f"{name} is a data URL without base64 data", limit="data:image/…;base64,…")
        self._check_size(name, len(payload) * 3 // 4)
        try:
            return base64.b64decode(payload, validate=True)
        except (binascii.Error, ValueError):
            raise invalid(name, f"{name} is a data URL whose base64 is damaged") from None

    def _file(self, name: str, url: str) -> bytes:
        root = self._rules.local_path
        if root is None:
            message = f"{name} is a file, and this gateway was started without --allowed-local-media-path"
            raise invalid(name, message)
        host, _, path = url[len("file://") :].partition("/") if url[4:7] == "://" else ("?", "", "")
        if host not in ("", "localhost"):
            raise invalid(name, f"{name} names a file of another machine")
        refused = invalid(name, f"{name} is no file that may be read")
        try:
            found = Path("/" + unquote(path)).resolve(strict=True)
            if not found.is_relative_to(root.resolve()) or not found.is_file():
                raise refused
            self._check_size(name, found.stat().st_size)
            return found.read_bytes()
        except (OSError, ValueError):
            raise refused from None

    async def _http(self, name: str, url: str) -> bytes:
        pool = httpcore.AsyncConnectionPool(
            ssl_context=_tls_context(), network_backend=_CheckedNetwork(self._rules.is_public), retries=0
        )
        async with pool:
            for _ in range(self._rules.max_redirects + 1):
                parsed = self._checked(name, url)
                answer = await self._get(name, pool, parsed)
                if isinstance(answer, bytes):
                    return answer
                try:
                    url = str(parsed.join(answer))
                except httpx.InvalidURL:
                    raise invalid(name, f"{name} is redirected to what is no URL") from None
        limit = f"{self._rules.max_redirects} redirects"
        raise invalid(name, f"{name} is redirected more often than is followed", limit=limit)

    def _checked(self, name: str, url: str) -> httpx.URL:
        """What is asked for is built of these very parts."""
        try:
            if "\\" in url or not url.isprintable() or " " in url:
                raise httpx.InvalidURL("characters that parsers disagree about")
            parsed = httpx.URL(url)
            host = parsed.host.rstrip(".").lower()
            if parsed.scheme not in ("http", "https") or not host or parsed.userinfo:
                raise httpx.InvalidURL("no host, or a user name")
        except (httpx.InvalidURL, ValueError):
            raise invalid(name, f"{name} is no plain http(s) URL") from None
        allowed = self._rules.allowed_domains
        if allowed is not None and host not in allowed:
            message = f"{name} is at {host}, which is not among --allowed-media-domains"
            raise invalid(name, message, value=host, limit=", ".join(sorted(allowed)))
        return parsed

    async def _get(self, name: str, pool: httpcore.AsyncConnectionPool, url: httpx.URL) -> bytes | str:
        """The body, or where a redirect leads."""
        target = httpcore.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path or b"/"
        )
        headers = [(b"host", url.netloc), (b"accept", b"image/*"), (b"user-agent", b"kvern")]
        try:
            async with pool.stream("GET", target, headers=headers) as response:
                fields = {key.lower(): value for key, value in response.headers}
                if response.status in _REDIRECTS and b"location" in fields:
                    return fields[b"location"].decode("ascii", "replace")
                if response.status != 200:
                    message = f"{name} was answered with status {response.status}"
                    raise invalid(name, message, value=response.status, limit=200)
                if fields.get(b"content-encoding", b"identity") != b"identity":
                    raise invalid(
                        name, f"{name} was answered with a content encoding, which was not asked for"
                    )
                if (declared := fields.get(b"content-length", b"")).isdigit():
                    self._check_size(name, int(declared))
                return await self._read(name, response.aiter_stream())
        except _NotPublic as error:
            message = f"{name} is at an address that is not public, and is not fetched"
            raise invalid(name, message, value=url.host, limit="public addresses") from error
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as error:
            raise KvernError(
                error_pb2.ERROR_CODE_INVALID_ARGUMENT,
                f"{name} could not be fetched: {_reason(error)}",
                field=name,
                value=url.host,
            ) from error

    async def _read(self, name: str, stream: Any) -> bytes:
        parts, size = [], 0
        async for part in stream:
            size += len(part)
            self._check_size(name, size)
            parts.append(part)
        return b"".join(parts)

    def _check_size(self, name: str, size: int) -> None:
        if size > self._rules.max_bytes:
            message = f"{name} has more than {self._rules.max_bytes} bytes"
            raise invalid(name, message, value=size, limit=self._rules.max_bytes)


class _NotPublic(Exception):
    pass


class _CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to addresses that were checked, not to names that could mean others a moment later."""

    def __init__(self, may_reach: Callable[[str], bool]) -> None:
        self._may_reach = may_reach
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if not addresses or not all(self._may_reach(address) for address in addresses):
            raise _NotPublic(host)
        for address in addresses[:-1]:
            with contextlib.suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return await self._network.connect_tcp(address, port, 2.0)
        return await self._network.connect_tcp(addresses[-1], port, timeout)

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        raise _NotPublic(path)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


_context: ssl.SSLContext | None = None


def _tls_context() -> ssl.SSLContext:
    """Made once: it takes some 10 ms."""
    global _context
    if _context is None:
        _context = ssl.create_default_context()
    return _context


def _reason(error: Exception) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, socket.gaierror):
            return "its host has no address"
        if isinstance(cause, TimeoutError | httpcore.TimeoutException):
            return "there was no answer in time"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpcore.ProtocolError):
        return "the answer was not HTTP"
    return "the connection failed"
