"""Choosing, building and falling back; concurrent callers."""

import logging
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kvern_kernels
from kvern_kernels import build, cpu, dispatch, reference


@pytest.fixture(autouse=True)
def _choose_again_afterwards():
    yield
    dispatch.select(None)


def run_python(source: str, **environment: str) -> str:
    """stdout and stderr of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_importing_the_package_does_not_import_torch() -> None:
    assert run_python("import sys, kvern_kernels; print('torch' in sys.modules)").strip() == "False"


def test_the_fast_backend_is_chosen_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    dispatch.select(None)
    with caplog.at_level(logging.INFO, logger="kvern.kernels"):
        assert kvern_kernels.linear is cpu.linear
        assert kvern_kernels.linear is cpu.linear
    (message,) = [r.message for r in caplog.records]
    assert message.startswith(f"linear on cpu: {cpu.NAME} (triton: ")


def test_a_backend_can_be_forced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("KVERN_KERNELS", "reference")
    dispatch.select(None)
    with caplog.at_level(logging.INFO, logger="kvern.kernels"):
        assert kvern_kernels.rms_norm is reference.rms_norm
    assert "cpu: reference was asked for" in caplog.text
    dispatch.select("cpu")
    assert kvern_kernels.rms_norm is cpu.rms_norm
    with pytest.raises(ValueError, match="unknown kernel backend 'gpu': use one of triton, cpu, reference"):
        dispatch.select("gpu")


def test_with_two_kinds_of_devices_the_tensors_decide() -> None:
    op = dispatch._by_device("op", {"cpu": lambda *_, **__: "here", "cuda": lambda *_, **__: "there"})
    near, far = torch.zeros(1), torch.zeros(1, device="meta")
    assert (op(near), op(far, near)) == ("here", "there")
    assert (op(3, 4, device="meta"), op(3, 4)) == ("there", "here")  # a cache to be
    layers = [SimpleNamespace(input_norm=far)]
    assert (op(layers), op(SimpleNamespace(layers=layers))) == ("there", "there")  # a decoder


def test_an_unknown_op_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'softmax'"):
        kvern_kernels.softmax  # noqa: B018


def test_without_a_compiler_the_reference_serves_after_one_warning(tmp_path: Path) -> None:
    output = run_python(
        f"""
        import logging, pathlib
        logging.basicConfig(level=logging.WARNING)
        from kvern_kernels import build
        build.PACKAGE = pathlib.Path({str(tmp_path)!r})
        build.shutil.which = lambda name: None
        build.build_or_warn()
        import torch, kvern_kernels as kernels
        packed = kernels.pack_linear(torch.ones(2, 3))
        print(kernels.linear(torch.ones(1, 3), packed).tolist(), kernels.silu_and_mul(torch.zeros(1, 2)).shape)
        """
    )
    assert "[[3.0, 3.0]]" in output
    unavailable = [line for line in output.splitlines() if "kernels are unavailable" in line]
    assert len(unavailable) == 1 and "no C++ compiler: install g++ or set CXX" in unavailable[0]


def test_a_failed_compilation_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "csrc"
    broken.mkdir()
    (broken / "variant.cpp").write_text("this is not C++")
    monkeypatch.setattr(build, "SOURCES", broken)
    monkeypatch.setattr(build, "PACKAGE", tmp_path)
    with pytest.raises(build.BuildError, match=r"failed: .*error"):
        build.library_path()
    assert not list(tmp_path.glob("*.so"))


def test_callers_of_many_threads_do_not_disturb_each_other() -> None:
    packed = cpu.pack_linear(torch.randn(640, 256))
    inputs = [torch.randn(3 + i, 256) for i in range(8)]
    expected = [cpu.linear(x, packed) for x in inputs]

    def repeat(i: int) -> bool:
        return all(torch.equal(cpu.linear(inputs[i], packed), expected[i]) for _ in range(100))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(repeat, range(8)))


def test_a_forked_child_computes_too() -> None:
    output = run_python(
        """
        import os, torch
        from kvern_kernels import cpu
        torch.set_num_threads(2)
        packed, x = cpu.pack_linear(torch.randn(2048, 512)), torch.randn(4, 512)
        expected = cpu.linear(x, packed)
        child = os.fork()
        if child == 0:
            os._exit(0 if all(torch.equal(cpu.linear(x, packed), expected) for _ in range(20)) else 1)
        print("status", os.waitpid(child, 0)[1])
        """
    )
    assert "status 0" in output
