"""Chooses a backend for each op and device: the first that works, in the order triton, cpu, reference.

`KVERN_KERNELS=triton|cpu|reference` or `select(...)` forces one. The choice is logged once per op with
the reason why the others were rejected. Where the machine has one kind of device an op is the backend's
own function; with a GPU it is a thin wrapper that looks at the device of its first tensor.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import kvern_kernels

log = logging.getLogger("kvern.kernels")

BACKENDS = {
    "triton": "kvern_kernels.triton.ops",
    "cpu": "kvern_kernels.cpu",
    "reference": "kvern_kernels.reference",
}
_forced: str | None = None
_attention: str | None = None
_failures: dict[str, str] = {}  # backend → why it cannot serve here; tried once per process


class Unavailable(RuntimeError):
    """A backend cannot serve on this machine; the message says why."""


def select(backend: str | None) -> None:
    """Force `backend` ("triton", "cpu" or "reference") for ops looked up from now on; None: choose again.

    Raises ValueError for an unknown name.
    """
    global _forced
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"unknown kernel backend {backend!r}: use one of {', '.join(BACKENDS)}")
    _forced = backend
    forget()


def select_attention(name: str | None, device: str) -> None:
    """Serve `paged_attention` from the backend `name` of attention_backends from now on; None: choose as for
    other ops. Raises Unavailable, which says why each backend was rejected, unless it serves on `device`.
    """
    global _attention
    if name is not None:
        from kvern_kernels import attention_backends

        try:
            attention_backends.find(name, device)
        except attention_backends.Unavailable as error:
            raise Unavailable(str(error)) from None
    _attention = name
    forget()


def forget() -> None:
    """Choose again at the next use of each op."""
    for name in (*kvern_kernels.OPS, "PackedLinear"):
        vars(kvern_kernels).pop(name, None)


def resolve(op: str) -> Any:
    """The function that serves `op` here, on every kind of device that this machine has."""
    import torch

    if not torch.cuda.is_available():
        return choose(op, "cpu")
    functions = {"cpu": choose(op, "cpu"), "cuda": choose(op, "cuda")}
    return functions["cpu"] if isinstance(functions["cpu"], type) else _by_device(op, functions)


def choose(op: str, device: str) -> Any:
    """The function that serves `op` on tensors of `device` ("cpu" or "cuda"). Raises Unavailable."""
    if op == "paged_attention" and _attention is not None:
        from kvern_kernels import attention_backends

        try:
            named = attention_backends.find(_attention, device)
            log.info("%s on %s: %s, which was asked for", op, device, _attention.upper())
            return named
        except attention_backends.Unavailable as reason:  # on a device beside the one it was asked for
            log.info("%s on %s: %s", op, device, reason)
    if _attention is not None and _attention.upper() != "CPU_ATTN" and op in ("pack_decoder", "run_decoder"):
        from kvern_kernels import decoder, reference  # a whole stack in one call has its own attention

        return reference.pack_decoder if op == "pack_decoder" else decoder.run_by_op
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
        if device not in module.DEVICES:
            rejected.append(f"{backend}: does not serve {device} tensors")
            continue
        if forced is None and getattr(module, "ONLY_WHEN_ASKED", False):
            rejected.append(f"{backend}: {module.NAME} serves only when it is asked for")
            continue
        function = getattr(module, op, None)
        if function is None:
            rejected.append(f"{backend}: has no {op}")
            continue
        log.info("%s on %s: %s%s", op, device, module.NAME, f" ({'; '.join(rejected)})" if rejected else "")
        return function
    raise Unavailable(f"no backend for {op} on {device}: {'; '.join(rejected)}")


def _by_device(op: str, functions: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    from torch import device as Device

    def call(*args: Any, **kwargs: Any) -> Any:
        first = args[0][0] if isinstance(args[0], list | tuple) and args[0] else args[0]
        device = kwargs.get("device") or getattr(first, "device", None)
        if device is None:  # layers, a decoder of them, weights packed for the CPU, a number of blocks
            layers = getattr(first, "layers", [first])
            device = layers[0].input_norm.device if hasattr(layers[0], "input_norm") else "cpu"
        # Tensors without values ("meta") are what a GPU's launchers are looked at with.
        kind = Device(device).type
        return functions[kind if kind in functions else "cuda"](*args, **kwargs)

    call.__name__ = call.__qualname__ = op
    call.__doc__ = functions["cpu"].__doc__
    return call


def _load(backend: str) -> ModuleType:
    if backend not in _failures:
        try:
            return importlib.import_module(BACKENDS[backend])
        except ImportError as error:
            _failures[backend] = str(error)
            if backend != "triton":  # which most machines lack, and few miss
                log.warning("%s kernels are unavailable, a slower backend serves: %s", backend, error)
    raise Unavailable(_failures[backend])
