"""Chooses a backend for each op: the first that works, in the order cpu, reference.

`KVERN_KERNELS=reference|cpu` or `select(...)` forces one. The choice is logged once per op with the
reason why the others were rejected.
"""

from __future__ import annotations

import importlib
import logging
import os
from types import ModuleType
from typing import Any

import kvern_kernels

log = logging.getLogger("kvern.kernels")

BACKENDS = ("cpu", "reference")
_forced: str | None = None
_failures: dict[str, str] = {}  # backend → why it cannot serve here; tried once per process


class Unavailable(RuntimeError):
    """A backend cannot serve on this machine; the message says why."""


def select(backend: str | None) -> None:
    """Force `backend` ("cpu" or "reference") for ops looked up from now on; None: choose again.

    Raises ValueError for an unknown name.
    """
    global _forced
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"unknown kernel backend {backend!r}: use one of {', '.join(BACKENDS)}")
    _forced = backend
    for name in (*kvern_kernels.OPS, "PackedLinear"):
        vars(kvern_kernels).pop(name, None)


def resolve(op: str) -> Any:
    """The function that serves `op` here."""
    forced = _forced or os.environ.get("KVERN_KERNELS") or None
    if forced is not None and forced not in BACKENDS:
        raise ValueError(f"KVERN_KERNELS={forced!r}: use one of {', '.join(BACKENDS)}")
    rejected: list[str] = []
    for backend in BACKENDS:
        if forced not in (None, backend):
            rejected.append(f"{backend}: {forced} was asked for")
            continue
        try:
            module = _load(backend)
        except Unavailable as reason:
            if forced == backend:
                raise
            rejected.append(f"{backend}: {reason}")
            continue
        function = getattr(module, op, None)
        if function is None:
            rejected.append(f"{backend}: has no {op}")
            continue
        log.info("%s: %s%s", op, module.NAME, f" ({'; '.join(rejected)})" if rejected else "")
        return function
    raise Unavailable(f"no backend for {op}: {'; '.join(rejected)}")


def _load(backend: str) -> ModuleType:
    if backend not in _failures:
        try:
            return importlib.import_module(f"kvern_kernels.{backend}")
        except ImportError as error:
            _failures[backend] = str(error)
            log.warning("%s kernels are unavailable, a slower backend serves: %s", backend, error)
    raise Unavailable(_failures[backend])
