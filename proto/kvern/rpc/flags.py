"""argparse types that the service mains share: a wrong value ends the process with 2 before anything is loaded."""

from __future__ import annotations

import argparse
import json
import re


def positive(text: str) -> int:
    """A whole number from 1."""
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def not_negative(text: str) -> int:
    """A whole number from 0."""
    value = _whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


def seconds(text: str) -> float:
    """A time of at least 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a time: use 0 or more seconds")
    return value


def factor(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a factor: use a number above 0")
    return value


def group_addresses(first: str, count: int) -> list[str]:
    """Of ``count`` simulated groups in one process: the ports after that of ``first``, or its socket path with .1, .2 …"""
    if first.startswith("unix:"):
        return [first, *(f"{first}.{index}" for index in range(1, count))]
    host, _, port_number = first.rpartition(":")
    return [f"{host}:{int(port_number) + index if int(port_number) else 0}" for index in range(count)]


def endpoint(text: str) -> str:
    """host:port, or unix:/path."""
    host, colon, number = text.rpartition(":")
    if text.startswith("unix:"):
        return text
    if not colon or not host:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address: use host:port or unix:/path.sock")
    port(number)
    return text


def port(text: str) -> int:
    """A TCP port; 0 stands for any free one."""
    value = _whole(text)
    if not 0 <= value <= 65_535:
        raise argparse.ArgumentTypeError(f"{value} is not a port: use 0 to 65535")
    return value


def fraction(text: str) -> float:
    """More than 0, at most 1."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share: use more than 0 and at most 1")
    return value


def size(text: str) -> float:
    """A number from 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a size: use 0 or more")
    return value


def dialable(text: str) -> str:
    """host:port, or unix:/path, of one machine: no wildcard, and not any port."""
    host, _, number = text.rpartition(":")
    if text.startswith("unix:"):
        return text
    if host in ("", "0.0.0.0", "[::]") or port(number or "x") == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address that others can dial: use host:port")
    return text


def cell_name(text: str) -> str:
    """A part of the store's keys: letters, digits, and . _ - ."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no name: use 1 to 64 letters, digits, dots, dashes, underscores"
        )
    return text


def redis_url(text: str) -> str:
    """redis://, rediss:// or unix://."""
    if not text.startswith(("redis://", "rediss://", "unix://")):
        raise argparse.ArgumentTypeError("it must start with redis://, rediss:// or unix://")
    return text


def lora_module(text: str) -> tuple[str, str]:
    """Name and path of ``name=path`` or ``{"name": …, "path": …}``."""
    shape = 'use NAME=PATH or {"name": "NAME", "path": "PATH"}'
    if not text.startswith("{"):
        name, _, path = text.partition("=")
    else:
        try:
            values = json.loads(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON ({error}); {shape}") from None
        unknown = sorted(set(values) - {"name", "path", "base_model_name"})
        if unknown:
            raise argparse.ArgumentTypeError(f"{text!r} has {unknown[0]!r}, which is not known; {shape}")
        name, path = values.get("name"), values.get("path")
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not an adapter; {shape}")
    return name, path


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
