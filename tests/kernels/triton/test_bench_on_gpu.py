"""`kvern bench kernels` on a GPU: what each case launches, on tensors without values, lies on one device."""

import pytest
import torch

import kvern_kernels as kernels
from kvern_kernels import bench, dispatch
from kvern_kernels.triton.launch import CHIPS, record

# GPTQ's packing looks at its zero points.
CASES = [case for case in bench.cases_on("cuda") if "gptq" not in case.kernel and "1024" not in case.shape]


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "COLD_BYTES", 1)
    dispatch._failures.pop("triton", None)
    kernels.select(None if torch.cuda.is_available() else "triton")
    yield
    kernels.select(None)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kernel} {case.shape}")
def test_a_case_stays_on_the_device(case: bench.Case) -> None:
    with torch.device("meta"):
        ours, theirs = case.prepare()
    launches = record(CHIPS["sm_90"], ours)
    assert launches
    for launch in launches:
        assert {arg.device.type for arg in launch.args if isinstance(arg, torch.Tensor)} == {"meta"}
    assert theirs is None or theirs().device.type == "meta"
