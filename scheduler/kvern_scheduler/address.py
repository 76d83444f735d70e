"""Where other machines find a server that listens on every interface."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

_WILDCARDS = ("0.0.0.0", "[::]", "")


def advertised(listen: str, port: int) -> str:
    """The address to tell others: ``listen`` itself, with ``port`` where that is 0; for a wildcard, the machine's own.

    That is what its host name stands for here (a container's or pod's own address, which others can dial though they
    may not know the name), or the name where that is only a loopback address.
    """
    host, colon, asked = listen.rpartition(":")
    if listen.startswith("unix:") or not colon:
        return listen
    number = port if asked == "0" else asked
    return f"{_own_host() if host in _WILDCARDS else host}:{number}"


def is_wildcard(address: str) -> bool:
    """Whether it says nothing about whose it is."""
    host, colon, _ = address.rpartition(":")
    return bool(colon) and host in _WILDCARDS


async def is_known(address: str) -> bool:
    """Whether the host's name means anything here."""
    host, colon, port = address.rpartition(":")
    if address.startswith("unix:") or not colon:
        return True
    try:
        await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port)
    except OSError:
        return False
    return True


def _own_host() -> str:
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return name
    for *_, address in found:
        ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
        if not (ip.is_loopback or ip.is_link_local):
            return f"[{ip}]" if ip.version == 6 else str(ip)
    return name
