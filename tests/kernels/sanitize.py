"""`make sanitize`: the CPU kernels built with the address and undefined-behaviour sanitizers, under their own tests."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kvern_kernels import build

# Checkpoints are read where they lie in a file, hence no check of alignment: all these processors load unaligned.
FLAGS = ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-sanitize=alignment"]
VARIANTS = ("portable", "avx2")
TESTS = [
    *("test_linear_kernel.py", "test_linear_quantized.py", "test_linear_fp8.py", "test_moe_kernel.py"),
    *("test_attention_kernel.py", "test_elementwise_kernels.py", "test_decoder_kernel.py"),
]


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="kvern-sanitize-") as name:
        library = Path(name) / "kernels.so"
        build.compile_library(library, FLAGS, VARIANTS)
        runtimes = [
            subprocess.run(
                ["g++", f"-print-file-name={runtime}"], capture_output=True, text=True, check=True
            ).stdout.strip()
            for runtime in ("libasan.so", "libubsan.so")
        ]
        environment = os.environ | {
            "KVERN_CPU_LIBRARY": str(library),
            "LD_PRELOAD": " ".join(runtimes),
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
        tests = [str(Path(__file__).with_name(test)) for test in TESTS]
        command = [sys.executable, "-m", "pytest", "-x", "-q", *tests, *sys.argv[1:]]
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
