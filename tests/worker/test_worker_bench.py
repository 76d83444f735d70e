"""`kvern bench engine` drives the executor as a scheduler would, and counts what it says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvern.rpc.packing import unpack_u32
from kvern.v1 import worker_pb2
from kvern_gateway.cli.main import app
from kvern_gateway.cli.make_model import make_model
from kvern_kernels import bench as kernels_bench
from kvern_worker import bench
from kvern_worker.loading import LoadOptions, load


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("bench"), "qwen3-toy").path


def test_prompts_fill_the_budget_and_what_has_sampled_decodes(model: Path) -> None:
    options = LoadOptions(
        str(model), kv_cache_memory_bytes=1 << 20, max_model_len=32, max_num_seqs=8, max_num_batched_tokens=16
    )
    executor = load(options, bench._Quiet())
    plans: list[worker_pb2.StepPlan] = []
    run = executor.run

    def spy(plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
        plans.append(worker_pb2.StepPlan.FromString(plan.SerializeToString()))
        result = run(plan)
        assert not result.errors
        return result

    executor.run = spy  # type: ignore[method-assign]
    timings = bench.Engine(executor).run(bench.Load(3, 10, 4))
    steps = [(unpack_u32(p.prefill_lengths).tolist(), len(p.decode_slots) // 4) for p in plans[:-1]]
    # 16 tokens: a prompt and a part of the next; its rest, the third and one that decodes.
    assert steps == [([10, 6], 0), ([4, 10], 1), ([], 3), ([], 3), ([], 2)]
    assert len(timings.decode_s) == 3 and timings.total_s > timings.prompt_s > 0
    assert sorted(unpack_u32(plans[-1].released_slots)) == [0, 1, 2]
    with pytest.raises(ValueError, match=r"9 x 10 -> 4 needs 9 KV blocks"):
        bench.Engine(executor).run(bench.Load(9, 10, 4))


def test_the_limit_is_the_bandwidth_over_the_weights_that_a_step_reads(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_bench, "COLD_BYTES", 1 << 20)
    arguments = [
        "bench",
        "engine",
        str(model),
        "--json",
        "--runs",
        "2",
        "--load",
        "2x8x4",
        "--load",
        "1x20x1",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.output.splitlines()[-1])
    # Tied: the embedding is the head, read once a step. bfloat16, or float32 where the processor lacks it.
    hidden, inner, vocab, layers = 64, 192, 1024, 2
    attention = hidden * (64 + 32 + 32) + 64 * hidden + 2 * 32
    parameters = layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden + vocab * hidden
    assert first["weight_bytes"] / parameters == pytest.approx(2, rel=0.02) or first[
        "weight_bytes"
    ] / parameters == pytest.approx(4, rel=0.02)
    assert (first["batch"], len(first["tokens_per_s_runs"])) == (2, 2)
    assert first["tokens_per_s"] == pytest.approx(np.median(first["tokens_per_s_runs"]), rel=1e-2)
    assert first["limit_fraction"] > 0
    assert second["decode_tokens_per_s"] is None and second["prefill_tokens_per_s"] > 0


def test_a_load_that_is_no_load_is_named(model: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "engine", str(model), "--load", "8x0x4"])
    assert result.exit_code == 2
