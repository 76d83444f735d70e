"""Builds the C++ CPU kernels into the package; everything else is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent / "kernels"))


class BuildWithKernels(build_py):
    """`build_py`, after compiling kernels/csrc. Without a C++ compiler the torch reference serves."""

    def run(self) -> None:
        from kvern_kernels import build

        build.build_or_warn()
        super().run()


setup(cmdclass={"build_py": BuildWithKernels})
