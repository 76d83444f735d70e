"""`make aarch64`: the CPU kernels cross-compiled for AArch64, and run there by an emulator against double precision."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

COMPILER = "aarch64-linux-gnu-g++"


def main() -> int:
    os.environ["CXX"] = COMPILER
    from kvern_kernels import build  # reads CXX when it compiles

    with tempfile.TemporaryDirectory(prefix="kvern-aarch64-") as name:
        library, program = Path(name) / "libkernels.so", Path(name) / "check"
        build.compile_library(library, only=("portable",))
        source = Path(__file__).with_name("check.cpp")
        include = f"-I{build.SOURCES}"
        command = [COMPILER, "-std=c++20", "-O1", include, str(source), str(library), "-o", str(program)]
        subprocess.run(command, check=True)
        return subprocess.run(
            ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-E", f"LD_LIBRARY_PATH={name}", str(program)],
            check=False,
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
