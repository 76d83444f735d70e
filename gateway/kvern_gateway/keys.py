"""API keys: who asks, and how much at once. Without keys everybody may ask for anything.

A file of keys is a YAML list, read anew when it changes::

    - name: team-a                    # the tenant: its request ids and cached prefixes are its own
      sha256: 9b74c9897bac770f…       # printf %s "$KEY" | sha256sum
      max_concurrent_requests: 8      # at one gateway; 0 or absent: any number
      max_requests_per_minute: 600    # likewise
      priority: 0                     # its requests run no earlier than this says (lower runs first)
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvern.errors import KvernError
from kvern.v1 import error_pb2

log = logging.getLogger(__name__)

API_KEY_VARIABLE = "KVERN_API_KEY"
"""Holds keys besides those of the flags, spaces between them."""

# Of keys that are given by flag or variable, without a file.
DEFAULT_TENANT = "default"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_BUSY_RETRY_MS = 1_000


@dataclass(frozen=True, slots=True)
class Tenant:
    """What a key allows. 0 of a limit: none."""

    name: str = ""
    max_concurrent_requests: int = 0
    max_requests_per_minute: int = 0
    priority: int | None = None


class Caller:
    """A tenant, and what it uses at this gateway."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.running = 0
        # A bucket of requests that refills all the time and holds a minute's.
        self._left = float(tenant.max_requests_per_minute)
        self._counted_at = time.monotonic()

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Around one request. Raises KvernError OVERLOADED where it is one too many."""
        tenant = self.tenant
        if 0 < tenant.max_concurrent_requests <= self.running:
            raise _too_many(
                f"this key has {self.running} requests running, its limit; wait for one to end",
                self.running + 1,
                tenant.max_concurrent_requests,
                _BUSY_RETRY_MS,
            )
        if tenant.max_requests_per_minute:
            self._take_one(tenant.max_requests_per_minute)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def _take_one(self, per_minute: int) -> None:
        now = time.monotonic()
        left = min(self._left + (now - self._counted_at) * per_minute / 60, per_minute)
        if left < 1:
            wait_ms = int((1 - left) * 60_000 / per_minute) + 1
            raise _too_many(
                f"this key may ask {per_minute} times a minute; try again in {wait_ms} ms",
                per_minute + 1,
                per_minute,
                wait_ms,
            )
        self._left, self._counted_at = left - 1, now

    def salted(self, cache_salt: str) -> str:
        """The salt under which prefixes are cached: no tenant finds out what another one asked by how fast it is."""
        return f"{self.tenant.name}/{cache_salt}" if self.tenant.name else cache_salt

    def prioritized(self, priority: int) -> int:
        return priority if self.tenant.priority is None else max(priority, self.tenant.priority)


def _too_many(message: str, value: int, limit: int, retry_after_ms: int) -> KvernError:
    return KvernError(
        error_pb2.ERROR_CODE_OVERLOADED, message, value=value, limit=limit, retry_after_ms=retry_after_ms
    )


_anybody = Caller(Tenant())
_current: ContextVar[Caller] = ContextVar("caller", default=_anybody)


def current() -> Caller:
    """Who made the request that this task answers."""
    return _current.get()


class KeyFileError(ValueError):
    """The file cannot be read or says something else than keys; the message says what."""


class Keys:
    """All keys: ``secrets`` share a tenant without limits, ``path`` names the file. Raises KeyFileError."""

    def __init__(self, secrets: Sequence[str] = (), path: Path | None = None) -> None:
        self._path = path
        self._fixed = [(_digest(secret), Tenant(DEFAULT_TENANT)) for secret in secrets]
        self._callers: dict[str, Caller] = {}
        self._keys: list[tuple[bytes, Caller]] = []
        self._version: object = None
        self.reload()

    @property
    def required(self) -> bool:
        return bool(self._fixed) or self._path is not None

    def enter(self, authorization: str | None) -> None:
        """Makes the holder of the key the current task's caller. Raises KvernError UNAUTHENTICATED."""
        if self.required:
            _current.set(self._find(authorization))

    def _find(self, authorization: str | None) -> Caller:
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret:
            raise _unauthenticated("this server wants an API key: send the header Authorization: Bearer KEY")
        digest = _digest(secret.strip())
        # All are compared, so that the time tells nothing.
        matches = [caller for known, caller in self._keys if hmac.compare_digest(known, digest)]
        if not matches:
            raise _unauthenticated("the API key is not one of this server's")
        return matches[0]

    def changed(self) -> bool:
        """Whether the file is another one than was read last."""
        return self._path is not None and _version_of(self._path) not in (self._version, None)

    def reload(self) -> None:
        """Reads the file. A tenant's running requests still count. Raises KeyFileError, and keeps what there was."""
        # Before it is read: what changes meanwhile is read again, and a wrong file is complained of once.
        self._version = _version_of(self._path) if self._path else None
        found = [*self._fixed, *(_read(self._path) if self._path else [])]
        callers: dict[str, Caller] = {}
        for _, tenant in found:
            caller = callers[tenant.name] = self._callers.get(tenant.name) or Caller(tenant)
            caller.tenant = tenant
        self._callers = callers
        self._keys = [(digest, callers[tenant.name]) for digest, tenant in found]
        if self._path:
            log.info("%d API keys of %d tenants", len(self._keys), len(callers))


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _unauthenticated(message: str) -> KvernError:
    return KvernError(error_pb2.ERROR_CODE_UNAUTHENTICATED, message, field="authorization")


def _version_of(path: Path) -> object:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> list[tuple[bytes, Tenant]]:
    import yaml

    try:
        entries = yaml.safe_load(path.read_text())
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        # The reason would quote the file.
        raise KeyFileError(f"{path} is not YAML") from None
    if not isinstance(entries, list):
        raise KeyFileError(f"{path} must hold a list of keys, each with name and sha256")
    found = [_entry(f"{path}, key {index + 1}", entry) for index, entry in enumerate(entries)]
    tenants: dict[str, Tenant] = {}
    for _, tenant in found:
        if tenants.setdefault(tenant.name, tenant) != tenant:
            raise KeyFileError(f"{path}: the keys of {tenant.name} have different limits")
    if DEFAULT_TENANT in tenants:
        raise KeyFileError(f"{path}: the name {DEFAULT_TENANT} is kept for keys without a file")
    return found


def _entry(where: str, entry: Any) -> tuple[bytes, Tenant]:
    if not isinstance(entry, dict):
        raise KeyFileError(f"{where}: it must have name and sha256")
    limits = {field.name for field in fields(Tenant)} - {"name"}
    if unknown := sorted(map(str, entry.keys() - limits - {"name", "sha256"})):
        raise KeyFileError(
            f"{where}: {unknown[0]} is unknown; there are name, sha256, {', '.join(sorted(limits))}"
        )
    name, digest = str(entry.get("name", "")), str(entry.get("sha256", ""))
    if not _NAME.fullmatch(name):
        raise KeyFileError(f"{where}: its name must be 1 to 64 letters, digits, dots, dashes and underscores")
    if not _SHA256.fullmatch(digest):
        raise KeyFileError(
            f"{where} ({name}): sha256 must be 64 hexadecimal digits: printf %s KEY | sha256sum"
        )
    for limit in sorted(limits & entry.keys()):
        value = entry[limit]
        least = -(2**31) if limit == "priority" else 0
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
            raise KeyFileError(f"{where} ({name}): {limit} must be a whole number from {least}")
    return bytes.fromhex(digest), Tenant(name, **{limit: entry[limit] for limit in limits & entry.keys()})
