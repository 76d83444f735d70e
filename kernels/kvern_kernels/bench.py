"""`kvern bench kernels`: time per kernel and shape beside what the machine could do at best.

The limits are measured in the same run: read bandwidth (all threads, eight streams each) and the rate of torch's
prepacked matrix product. A kernel's own limit is the larger of its bytes ÷ bandwidth and its operations ÷ rate.
Weights are as many copies as do not fit a cache. Of many runs the fastest counts, kernel and torch in turns, since
neighbours only ever make one slower.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kvern_kernels as kernels
from kvern_kernels.reference_gguf import GGUF_BLOCK_BYTES, gguf_block_length

LINEARS = {"gate_up": (6144, 1024), "down": (1024, 3072)}  # of Qwen3-0.6B: outputs, inputs
ROWS = (1, 8, 32, 1024)
COLD_BYTES = 384 << 20
SECONDS = 0.6  # for each kernel and shape

Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One kernel on one shape; `operations` counts multiply-adds twice, `rate` names the limit they meet."""

    kernel: str
    shape: str
    bytes: int
    operations: int
    rate: str
    prepare: Callable[[], tuple[Run, Run | None]]  # what runs the kernel, and torch's own op


@dataclass(frozen=True)
class Limits:
    bytes_per_s: float
    rates: dict[str, float]  # operations per second of float32, bfloat16 and int8 products

    def seconds(self, case: Case) -> float:
        return max(case.bytes / self.bytes_per_s, case.operations / self.rates[case.rate])


def time_here(run: Run) -> float:
    """Seconds that `run` takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class GpuClock:
    """Seconds that what `run` launches takes on the GPU. A long write before it fills the second-level cache with other
    things, and is still running when the launches arrive, so that those aren't waited for."""

    def __init__(self) -> None:
        self._other = torch.empty(COLD_BYTES, dtype=torch.uint8, device="cuda")
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, run: Run) -> float:
        self._other.zero_()
        self._start.record()
        run()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1e3


def clock_of(device: str) -> Callable[[Run], float]:
    return GpuClock() if device == "cuda" else time_here


def fastest(*runs: Run, seconds: float = SECONDS, clock: Callable[[Run], float] = time_here) -> list[float]:
    """The shortest time of each, in seconds; they take turns until `seconds` have passed."""
    best = [float("inf")] * len(runs)
    until = time.perf_counter() + seconds
    for turn in itertools.count():
        for i, run in enumerate(runs):
            took = clock(run)
            if turn:
                best[i] = min(best[i], took)
        if turn > 2 and time.perf_counter() > until:
            return best
    raise AssertionError


def measure_limits() -> Limits:
    """Read bandwidth in parts of 8 MiB of a memory that fits no cache, and torch's products at 512 x 2048 x 2048."""
    memory = torch.ones(COLD_BYTES, dtype=torch.uint8)
    parts = itertools.cycle(memory.split(min(8 << 20, COLD_BYTES)))
    m, n = 512, 2048
    x, weight = torch.randn(m, n), torch.randn(n, n)
    codes = torch.randint(-127, 128, (n, n), dtype=torch.int8)
    read, *times = fastest(
        lambda: _read(next(parts)),
        lambda: torch.nn.functional.linear(x, weight),
        prepacked(x.bfloat16(), weight.bfloat16()),
        lambda: torch._int_mm(codes[:m], codes.T),
        seconds=6 * SECONDS,
    )
    names = ("float32", "bfloat16", "int8")
    rates = {name: 2 * m * n * n / t for name, t in zip(names, times, strict=True)}
    return Limits(min(8 << 20, COLD_BYTES) / read, rates)


def measure_gpu_limits() -> Limits:
    """What a copy of 2 GiB moves, and the library's products at 8,192³."""
    memory = torch.empty(2, 1 << 30, dtype=torch.uint8, device="cuda")
    n = 8192
    x = torch.randn(n, n, device="cuda")
    codes = torch.randint(-127, 128, (n, n), dtype=torch.int8, device="cuda")
    half = x.bfloat16()
    copy, *times = fastest(
        lambda: memory[0].copy_(memory[1]),
        lambda: x @ x.T,
        lambda: half @ half.T,
        lambda: torch._int_mm(codes, codes.T),
        clock=GpuClock(),
    )
    names = ("float32", "bfloat16", "int8")
    return Limits(memory.numel() / copy, {name: 2 * n**3 / t for name, t in zip(names, times, strict=True)})


def read_bandwidth(passes: int = 12) -> float:
    """Bytes per second at which all threads read a memory that fits no cache; the median of some passes over it."""
    memory = torch.ones(COLD_BYTES, dtype=torch.uint8)
    times = []
    for _ in range(passes):
        start = time.perf_counter()
        _read(memory)
        times.append(time.perf_counter() - start)
    return COLD_BYTES / statistics.median(times)


def _read(memory: Tensor) -> None:
    try:
        from kvern_kernels import cpu
    except ImportError:
        memory.sum()
    else:
        cpu.LIBRARY.kvern_read(torch.get_num_threads(), memory.data_ptr(), memory.numel())


def prepacked(x: Tensor, weight: Tensor) -> Run:
    """torch's fastest linear on this machine: oneDNN with weights in its own layout where torch has it."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return lambda: torch.nn.functional.linear(x, weight)
    ours = torch.ops.mkldnn._reorder_linear_weight(weight, x.shape[0])
    return lambda: torch.ops.mkldnn._linear_pointwise(x, ours, None, "none", [], "")


def linear_cases() -> Iterator[Case]:
    for (name, (n, k)), kind in itertools.product(LINEARS.items(), FORMATS):
        packed: list[Any] = []  # shared by the cases of all row counts, filled by the first that is measured
        for m in ROWS:
            dtype = torch.float32 if kind == "float32" else torch.bfloat16
            yield Case(
                kernel=f"linear {kind}",
                shape=f"{name} {m}x{n}x{k}",
                bytes=int(n * k * BITS[kind] / 8) + m * (n + k) * dtype.itemsize,
                operations=2 * m * n * k,
                rate=RATES.get(kind, "bfloat16"),
                prepare=partial(_prepare_linear, kind, m, n, k, dtype, packed),
            )


def _prepare_linear(
    kind: str, m: int, n: int, k: int, dtype: torch.dtype, packed: list[Any]
) -> tuple[Run, Run]:
    if not packed:
        packed.append(FORMATS[kind](n, k))
        packed += [FORMATS[kind](n, k) for _ in range(min(COLD_BYTES // packed[0].num_bytes, 60))]
    x = torch.randn(m, k).to(dtype)
    weights = itertools.cycle(packed)
    copies = 1 + COLD_BYTES // (n * k * dtype.itemsize) if m < 64 else 1
    theirs = itertools.cycle([prepacked(x, torch.randn(n, k).to(dtype)) for _ in range(copies)])
    return lambda: kernels.linear(x, next(weights)), lambda: next(theirs)()


def _gptq(n: int, k: int) -> Any:
    return kernels.pack_gptq(
        _words(k // 8, n), _words(k // 128, n // 8), torch.rand(k // 128, n).half() * 0.01
    )


def _words(rows: int, columns: int) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, (rows, columns)).int()


def _int8(n: int, k: int, activations: str | None = None) -> Any:
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    return kernels.pack_int8(codes, torch.rand(n) * 0.001, activations=activations)


def _gguf(kind: str, n: int, k: int) -> Any:
    """Blocks of the byte 1: their halves are small numbers."""
    length = gguf_block_length(kind)
    return kernels.pack_gguf(torch.ones(n, k // length * GGUF_BLOCK_BYTES[kind], dtype=torch.uint8), kind)


def _fp8(n: int, k: int) -> Any:
    codes = torch.randn(n, k).to(torch.float8_e4m3fn)
    return kernels.pack_fp8(codes, torch.rand(-(-n // 128), -(-k // 128)))


FORMATS: dict[str, Callable[[int, int], Any]] = {
    "float32": lambda n, k: kernels.pack_linear(torch.randn(n, k)),
    "bfloat16": lambda n, k: kernels.pack_linear(torch.randn(n, k).bfloat16()),
    "int8": _int8,
    "w8a8": partial(_int8, activations="int8"),
    "fp8 128x128": _fp8,
    "gptq g128": _gptq,
    **{kind: partial(_gguf, kind) for kind in ("Q8_0", "Q4_0", "Q4_K", "Q6_K")},
}
# What the checkpoint's own format takes a weight, whatever the packed layout takes.
BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "w8a8": 8, "fp8 128x128": 8, "gptq g128": 4 + 20 / 128}
BITS |= {
    kind: 8 * GGUF_BLOCK_BYTES[kind] / gguf_block_length(kind) for kind in ("Q8_0", "Q4_0", "Q4_K", "Q6_K")
}
RATES = {"float32": "float32", "w8a8": "int8"}

EXPERTS, TOP_K, WIDTH, INNER = 32, 4, 512, 256


def moe_cases() -> Iterator[Case]:
    weights = EXPERTS * 3 * WIDTH * INNER
    for m in ROWS:
        chosen = min(EXPERTS, TOP_K * m)
        yield Case(
            kernel="fused_moe bfloat16",
            shape=f"{m}x{WIDTH}, {TOP_K} of {EXPERTS}x{INNER}",
            bytes=weights * 2 * chosen // EXPERTS,
            operations=2 * m * TOP_K * 3 * WIDTH * INNER,
            rate="bfloat16",
            prepare=partial(_prepare_moe, m),
        )


def _prepare_moe(m: int) -> tuple[Run, Run | None]:
    def layer() -> Any:
        up = [kernels.pack_linear(torch.randn(2 * INNER, WIDTH).bfloat16()) for _ in range(EXPERTS)]
        down = [kernels.pack_linear(torch.randn(WIDTH, INNER).bfloat16()) for _ in range(EXPERTS)]
        return kernels.pack_experts(up, down)

    layers = [layer()]
    layers += [layer() for _ in range(min(COLD_BYTES // layers[0].num_bytes, 16))]
    turns = itertools.cycle(layers)
    x, ids = torch.randn(m, WIDTH).bfloat16(), torch.rand(m, EXPERTS).argsort(1)[:, :TOP_K].int()
    weights = torch.rand(m, TOP_K)
    return lambda: kernels.fused_moe(x, weights, ids, next(turns)), None


CASES: list[Callable[[], Iterator[Case]]] = [linear_cases, moe_cases]


def cases_on(device: str) -> Iterator[Case]:
    """An int8 cache is for CPUs alone."""
    for case in itertools.chain.from_iterable(cases() for cases in CASES):
        if device == "cpu" or case.kernel != "attention decode int8":
            yield case


def measure(only: str | None, limits: Limits, device: str) -> Iterator[dict[str, Any]]:
    clock = clock_of(device)
    for case in cases_on(device):
        if only and only not in f"{case.kernel} {case.shape}":
            continue
        with torch.device(device):
            runs = [run for run in case.prepare() if run is not None]
        ours, *theirs = fastest(*runs, clock=clock)
        limit = limits.seconds(case)
        yield {
            "kernel": case.kernel,
            "shape": case.shape,
            "us": round(ours * 1e6, 1),
            "limit_us": round(limit * 1e6, 1),
            "limit_fraction": round(limit / ours, 3),
            "torch_ratio": round(theirs[0] / ours, 2) if theirs else None,
            "gb_per_s": round(case.bytes / ours / 1e9, 1),
            "gflop_per_s": round(case.operations / ours / 1e9, 1),
        }


def _here() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def run(only: str | None = None) -> list[dict[str, Any]]:
    """One dict per kernel and shape, on a GPU where there is one; `only` keeps those whose name contains it."""
    device = _here()
    return list(measure(only, measure_limits() if device == "cpu" else measure_gpu_limits(), device))


def report(only: str | None = None) -> None:
    """Print a table, line by line as it is measured."""
    device = _here()
    limits = measure_limits() if device == "cpu" else measure_gpu_limits()
    who = (
        f"{torch.get_num_threads()} threads read"
        if device == "cpu"
        else f"{torch.cuda.get_device_name()} copies"
    )
    rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in limits.rates.items())
    print(f"{who} {limits.bytes_per_s / 1e9:.1f} GB/s; GFLOP/s of torch: {rates}\n")
    print(
        f"{'kernel':24}{'shape':26}{'µs':>10}{'limit':>10}{'reached':>9}{'GB/s':>8}{'GFLOP/s':>9}{'× torch':>9}"
    )
    for row in measure(only, limits, device):
        ratio = "" if row["torch_ratio"] is None else f"{row['torch_ratio']:.2f}"
        print(
            f"{row['kernel']:24}{row['shape']:26}{row['us']:10.1f}{row['limit_us']:10.1f}"
            f"{row['limit_fraction']:9.0%}{row['gb_per_s']:8.1f}{row['gflop_per_s']:9.0f}{ratio:>9}",
            flush=True,
        )


# Last, since it builds on the cases above.
from kvern_kernels.bench_attention import attention_cases  # noqa: E402

CASES.append(attention_cases)
