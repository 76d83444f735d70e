"""Every kernel compiles for every chip as its launcher asks, without spills and within shared memory."""

import json
import os
import subprocess
import sys

import pytest

# A minute of two processors, and many on a machine that has other things to do.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    """What `report` says, in a process whose kernels are not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kvern_kernels.triton.report", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1) and done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_kernels_fit_the_chip(compiled: list[dict], chip: str) -> None:
    shared = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}[chip]
    here = [one for one in compiled if one["chip"] == chip]
    modules = {one["module"] for one in compiled}
    assert here and {one["module"] for one in here} == modules
    for one in here:
        assert one["registers"] > 0, one
        assert one["spilled"] == 0, one
        assert one["shared"] <= shared, one


@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_batch_invariant_attention_multiplies_alike_in_decode_and_prefill(
    compiled: list[dict], chip: str
) -> None:
    """Two kernels: splits in parallel, and one after the other. The order of sums is that of their products."""
    decode, prefill = (
        one["products"]
        for label in ("batch-invariant decode", "batch-invariant prefill")
        for one in compiled
        if (one["chip"], one["label"], one["kernel"]) == (chip, label, "attention_kernel")
    )
    assert decode == prefill and any(
        "mma" in product or "mfma" in product or "tensor_memory" in product for product in decode
    )
