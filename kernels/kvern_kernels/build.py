"""Compiles kernels/csrc into one shared library beside this file. Nothing is downloaded.

The library's name carries a hash of its sources and flags, so a changed source is rebuilt and two
checkouts never share one. A lock and an atomic rename let many processes ask for it at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

log = logging.getLogger("kvern.kernels")

PACKAGE = Path(__file__).resolve().parent
SOURCES = PACKAGE.parent / "csrc"

# -w: GCC 12 warns falsely about its own AVX-512 headers.
FLAGS = [
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-w",
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, *["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]]
VNNI = [*AVX512, "-mavx512vnni", "-DKVERN_MATRIX_ONLY"]  # the other ops are those of avx512
BF16 = [*VNNI, "-mavx512bf16"]
AMX = [*BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"]
X86_VARIANTS = {"avx2": AVX2, "avx512": AVX512, "avx512_vnni": VNNI, "avx512_bf16": BF16, "avx512_amx": AMX}


class BuildError(RuntimeError):
    """The kernels could not be compiled here; the message says why."""


def _variants() -> dict[str, list[str]]:
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return {"portable": []} | (X86_VARIANTS if x86 else {})


def _source_hash() -> str:
    digest = hashlib.sha256(repr((FLAGS, _variants(), platform.machine())).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def library_path() -> Path:
    """The compiled library, built if it is missing; KVERN_CPU_LIBRARY names another one. Raises BuildError."""
    if given := os.environ.get("KVERN_CPU_LIBRARY"):
        return Path(given)
    if not SOURCES.is_dir():  # installed from a wheel, which carries the library and not the sources
        found = sorted(PACKAGE.glob("_kernels-*.so"))
        if not found:
            raise BuildError(f"neither sources nor a compiled library in {PACKAGE}")
        return found[-1]
    name = f"_kernels-{_source_hash()}.so"
    folder = PACKAGE if os.access(PACKAGE, os.W_OK) else _cache_folder()
    path = folder / name
    if path.exists():
        return path
    with open(folder / ".build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(path)
    return path


def build_or_warn() -> None:
    """Compile now if that is possible; otherwise one warning, and the torch reference serves."""
    try:
        library_path()
    except BuildError as error:
        log.warning("CPU kernels not compiled (%s): the slower torch reference will serve", error)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "kvern"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError("no C++ compiler: install g++ or set CXX")


def _compile(target: Path) -> None:
    """Build the library at `target` and remove those of other sources beside it."""
    compile_library(target)
    for old in target.parent.glob("_kernels-*.so"):
        if old != target:
            old.unlink(missing_ok=True)


def compile_library(target: Path, flags: Sequence[str] = (), only: Collection[str] | None = None) -> None:
    """Build the library at `target`, with more compiler `flags` and `only` some of the variants if given.

    Raises BuildError.
    """
    compiler = _compiler()
    common_flags = [*FLAGS, *flags]
    log.info("compiling the CPU kernels with %s (once, half a minute)", compiler)
    with tempfile.TemporaryDirectory(prefix="kvern-kernels-") as name:
        work = Path(name)
        jobs = {
            isa: _start(
                [compiler, *common_flags, *own, f"-DKVERN_ISA={isa}"],
                SOURCES / "variant.cpp",
                work / f"{isa}.o",
            )
            for isa, own in _variants().items()
            if only is None or isa in only
        }
        errors = {isa: job.communicate()[1] for isa, job in jobs.items() if job is not None}
        built = [isa for isa, job in jobs.items() if job.returncode == 0]
        if "portable" not in built:
            raise BuildError(f"{compiler} failed: {errors['portable'].strip()[-400:]}")
        for isa in jobs.keys() - set(built):
            log.info("kernel variant %s left out: %s", isa, errors[isa].strip()[-200:])
        have = [f"-DHAVE_{isa}" for isa in built]
        linked = work / "kernels.so"
        objects = [str(work / f"{isa}.o") for isa in built]
        shared = ("kernels", "decoder", "moe", "lora", "states", "pool", "measure")
        common = [str(SOURCES / f"{name}.cpp") for name in shared]
        link = [compiler, *common_flags, *have, "-shared", "-o", str(linked), *common, *objects]
        done = subprocess.run(link, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"{compiler} failed: {done.stderr.strip()[-400:]}")
        beside = target.with_suffix(f".{os.getpid()}.tmp")
        shutil.copy(linked, beside)
        os.replace(beside, target)


def _start(command: list[str], source: Path, target: Path) -> subprocess.Popen[str]:
    command = [*command, "-c", str(source), "-o", str(target)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
