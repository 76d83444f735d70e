"""`make gpu-check` where there is no GPU; its checks themselves run with ``--device cpu``, by hand."""

from __future__ import annotations

import pytest
import torch
from gpu_check import __main__ as gpu_check


def test_without_a_gpu_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_check, "CHECKS", [])
    assert gpu_check.main([]) == 1
    assert "gpu-check: --device cuda: torch" in capsys.readouterr().err


def test_a_failed_check_is_counted_and_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(device: str) -> str:
        raise gpu_check.Failed(f"nothing on {device}")

    checks = [
        gpu_check.Check("good", lambda device: f"seen on {device}"),
        gpu_check.Check("bad", fail),
        gpu_check.Check("elsewhere", fail, needs_gpu=True),
    ]
    monkeypatch.setattr(gpu_check, "CHECKS", checks)
    assert gpu_check.main(["--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "| good | passed | 0 s | seen on cpu |" in out and "| bad | FAILED | 0 s | nothing on cpu |" in out
    assert "elsewhere" not in out
