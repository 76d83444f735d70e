"""Compiles what launchers would run, for chips that this machine need not have, and tells what it takes.

The specialization (dtypes, alignment, constants, warps, stages) is the one that the launcher itself
asks for: its call is recorded on meta tensors (`launch.record`) and bound as Triton's own JIT binds it.
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from kvern_kernels.triton.launch import CHIPS, Chip, Launch, record

# Modules of this package with a `production()`: (label, call on meta tensors).
MODULES = (
    *("activations", "attention", "gemm", "grouping", "kv", "lora", "moe", "norms", "quantize", "rope"),
    *("routing", "sampling"),
)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one compiled kernel takes: registers a thread, bytes spilled a thread, bytes of shared memory.

    `products` names the matrix instructions and their layouts, which fix the order of sums: two kernels
    with the same ones give a row the same bits.
    """

    module: str
    label: str
    kernel: str
    chip: str
    num_warps: int
    num_stages: int
    registers: int
    spilled: int
    shared: int
    products: tuple[str, ...]

    def fits(self) -> bool:
        """No spills, and shared memory within the chip's."""
        return self.spilled == 0 and self.shared <= CHIPS[self.chip].shared_bytes


def production(modules: tuple[str, ...] = MODULES) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """(module, label, call) of all that is compiled."""
    for module in modules:
        for label, call in importlib.import_module(f"kvern_kernels.triton.{module}").production():
            yield module, label, call


def compile_all(chips: list[str], modules: tuple[str, ...] = MODULES, processes: int = 2) -> list[Compiled]:
    """Compile every production call for every chip of `chips`, in order, in `processes` processes."""
    jobs = [(module, label, chip) for module, label, _ in production(modules) for chip in chips]
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        return [compiled for found in pool.map(_compile_job, jobs) for compiled in found]


def _compile_job(job: tuple[str, str, str]) -> list[Compiled]:
    module, label, chip_name = job
    chip = CHIPS[chip_name]
    call = {label: call for _, label, call in production((module,))}[label]
    done: dict[str, Compiled] = {}
    for launch in record(chip, call):
        compiled = compile_launch(launch, chip, module, label)
        done[repr(compiled)] = compiled
    return list(done.values())


def compile_launch(launch: Launch, chip: Chip, module: str = "", label: str = "") -> Compiled:
    """Compile one launch for `chip`. Raises what Triton or ptxas raise."""
    kernel = launch.kernel
    target = GPUTarget(chip.backend, chip.arch, chip.warp_size)
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = {**launch.options, "debug": False, "instrumentation_mode": ""}
    bound, specialization, _ = binder(*launch.args, **given)
    options, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialization, None)
    source = ASTSource(kernel, signature, constants, attributes)
    log = io.StringIO()
    with redirect_stdout(log), knobs.compilation.scope(), knobs.nvidia.scope():
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        compiled: Any = triton.compile(source, target=target, options=options.__dict__)
    registers, spilled = _nvidia(log.getvalue()) if chip.backend == "cuda" else _amd(compiled.asm["amdgcn"])
    return Compiled(
        *(module, label, kernel.__name__, chip.name, options.num_warps, options.num_stages),
        *(registers, spilled, compiled.metadata.shared, _products(compiled.asm["ttgir"])),
    )


def _products(layouts: str) -> tuple[str, ...]:
    """Encodings of matrix products and the types of their operands, from Triton's GPU dialect."""
    encodings = re.findall(r"#(?:ttg\.\w*(?:mma|mfma)|ttng\.tensor_memory_encoding)<.*>", layouts)
    lines = [line for line in layouts.splitlines() if re.search(r"tt\.dot |group_dot |gen5_mma ", line)]
    types = [re.sub(r"#\w+|loc\(.*", "", line.partition(" : ")[2]) for line in lines]
    return tuple(sorted({*encodings, *types}))


def _nvidia(log: str) -> tuple[int, int]:
    """(registers, spilled bytes) from `ptxas -v`."""
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if not registers or not spills:
        raise RuntimeError(f"ptxas told neither registers nor spills: {log[-400:]!r}")
    return max(map(int, registers)), sum(int(a) + int(b) for a, b in spills)


def _amd(assembly: str) -> tuple[int, int]:
    """(vector registers, spilled bytes) from the metadata in the assembly."""

    def field(name: str) -> int:
        values = re.findall(rf"\.{name}:\s*(\d+)", assembly)
        if not values:
            raise RuntimeError(f"the AMD assembly has no .{name}")
        return max(map(int, values))

    return field("vgpr_count"), 4 * field("vgpr_spill_count") + field("private_segment_fixed_size")
