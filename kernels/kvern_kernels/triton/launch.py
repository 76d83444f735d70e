"""How every launcher starts its kernel, and which chip it tunes for.

A launcher computes its grid and constants from shapes and dtypes only, never from values on the device,
so that a CUDA graph can hold it. `record` proves that: it runs a launcher on tensors without memory
(device "meta") and notes what would be compiled and launched, for `aot`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs


@dataclass(frozen=True, slots=True)
class Chip:
    """What a launcher may tune for. `shared_bytes`: shared memory (LDS) that one program can have."""

    name: str
    backend: str  # "cuda" or "hip"
    arch: int | str  # as triton's GPUTarget wants it
    warp_size: int
    shared_bytes: int
    processors: int

    @property
    def native_fp8(self) -> bool:
        """Whether float8_e4m3fn converts in hardware; elsewhere it is taken apart as bytes (`fp8`)."""
        return self.backend == "cuda" and int(self.arch) >= 89


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("sm_80", "cuda", 80, 32, 163 << 10, 108),
        Chip("sm_90", "cuda", 90, 32, 227 << 10, 132),
        Chip("sm_100", "cuda", 100, 32, 227 << 10, 148),
        Chip("gfx942", "hip", "gfx942", 64, 64 << 10, 304),
    )
}


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with the arguments it would run with."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


_recorded: list[Launch] | None = None
_pretended: Chip | None = None
_invariant = os.environ.get("KVERN_BATCH_INVARIANT") == "1"


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    /,
    *args: Any,
    num_warps: int = 4,
    num_stages: int = 2,
    **constants: Any,
) -> None:
    """Run `kernel` over `grid` (nothing for an empty one). Python floats and ints arrive as scalars."""
    if 0 in grid:
        return
    options = {"num_warps": num_warps, "num_stages": num_stages, **constants}
    if _recorded is not None:
        _recorded.append(Launch(kernel, grid, args, options))
    else:
        kernel[grid](*args, **options)


def record(chip: Chip, call: Callable[[], object]) -> list[Launch]:
    """What `call`, on meta tensors, launches on `chip`. It fails where a launcher looks at a value."""
    global _recorded
    launches: list[Launch] = []
    _recorded = launches
    try:
        with pretend(chip):
            call()
    finally:
        _recorded = None
    return launches


@contextmanager
def pretend(chip: Chip) -> Iterator[None]:
    """Launchers tune for `chip` within."""
    global _pretended
    before, _pretended = _pretended, chip
    try:
        yield
    finally:
        _pretended = before


def batch_invariant() -> bool:
    """Whether a row's bits may depend neither on its neighbours nor on being part of a prefill chunk."""
    return _invariant


def use_batch_invariant(on: bool) -> None:
    """Set what `batch_invariant` says; KVERN_BATCH_INVARIANT=1 sets it at the start."""
    global _invariant
    _invariant = on


def invariantly(call: Callable[[], object]) -> object:
    """`call()` in batch-invariant mode."""
    before = _invariant
    use_batch_invariant(True)
    try:
        return call()
    finally:
        use_batch_invariant(before)


def fusion_options(invariant: bool) -> dict[str, Any]:
    """Compiler options: in invariant mode one kernel may not fuse a multiply-add that another does not."""
    return {"enable_fp_fusion": False} if invariant else {}


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), on CPU tensors."""
    return bool(knobs.runtime.interpret)


def chip() -> Chip:
    """The chip of the current device; sm_90 in the interpreter."""
    if _pretended is not None:
        return _pretended
    if interpreted():
        return CHIPS["sm_90"]
    return _device_chip(torch.cuda.current_device())


@cache
def _device_chip(index: int) -> Chip:
    properties: Any = torch.cuda.get_device_properties(index)
    count = properties.multi_processor_count
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
        return Chip(name, "hip", name, 64 if name.startswith("gfx9") else 32, 64 << 10, count)
    arch = properties.major * 10 + properties.minor
    return Chip(f"sm_{arch}", "cuda", arch, 32, properties.shared_memory_per_block_optin, count)


def dense(x: Tensor) -> Tensor:
    """`x` with unit stride in its last dimension; rows may stay strided."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is ≥ n (1 for n ≤ 1)."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
