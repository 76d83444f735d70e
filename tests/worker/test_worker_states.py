"""States of hybrid models: their checkpoints, their memory, and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from parity.families import FAMILIES
from parity.local_engine import LocalEngine
from worker.conftest import load_executor

from kvern.errors import KvernError
from kvern.rpc.packing import pack_i32, pack_u32
from kvern.v1 import worker_pb2
from kvern_scheduler.core.group import Limits
from kvern_worker.batch import PlanError
from kvern_worker.executor import ModelExecutor
from kvern_worker.sizing import size_hybrid

PROMPT = [(11 * i) % 250 + 3 for i in range(75)]


@pytest.fixture(scope="module", params=["Bamba", "Qwen3-Next"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelExecutor:
    family = FAMILIES[request.param]
    folder = family.save(family.make(), tmp_path_factory.mktemp("hybrid"))
    return load_executor(folder, mamba_block_size=32, block_size=8, threads=1)


def test_a_hit_is_as_long_as_the_last_checkpoint_within_it(hybrid: ModelExecutor) -> None:
    engine = LocalEngine(hybrid)
    [first] = engine.generate([PROMPT], 30)
    # The chunk of 75 tokens was cut at 64, and 96 is the last boundary among all 104 that were computed.
    for length, hit in ((75, 64), (65, 64), (64, 0), (20, 0)):
        before = engine.group.num_prefix_hits
        engine.generate([PROMPT[:length]], 1)
        assert engine.group.num_prefix_hits - before == hit, length
    before = engine.group.num_prefix_hits
    assert engine.generate([PROMPT + first[:25]], 5) == [first[25:]]
    assert engine.group.num_prefix_hits - before == 96
    assert hybrid.generations()[hybrid.describe().num_blocks :].any()


def test_choices_share_the_state_after_their_prompt(hybrid: ModelExecutor) -> None:
    engine = LocalEngine(hybrid)
    [request] = [engine.submit(PROMPT, 12, seed=5, n=3, temperature=1.0)]
    engine.run()
    assert engine.group.num_prefix_hits == 2 * 64
    alone = LocalEngine(hybrid, Limits(enable_prefix_caching=False))
    again = alone.submit(PROMPT, 12, seed=5, n=3, temperature=1.0)
    alone.run()
    assert engine.outputs(request) == alone.outputs(again)
    assert alone.group.num_prefix_hits == 0


def test_a_plan_without_its_checkpoint_is_malformed(hybrid: ModelExecutor) -> None:
    hybrid.reset()
    new = worker_pb2.NewSequence(
        slot=0,
        token_ids=pack_i32(PROMPT[:20]),
        num_prompt_tokens=20,
        num_computed_tokens=8,
        block_ids=pack_u32([0, 1, 2]),
        block_generations=pack_u32([1, 1, 1]),
    )
    with pytest.raises(PlanError, match="without the checkpoint"):
        hybrid.run(worker_pb2.StepPlan(epoch=1, step=1, new_sequences=[new]))


def test_memory_is_divided_between_states_and_blocks() -> None:
    sized = size_hybrid(1000 * 64, 64, 640, 256, None, 16, 512, 4096)
    # 50 states fit half of it; the other half holds 500 blocks, to which 31 checkpoints can belong.
    assert (sized.state_slots, sized.num_checkpoints, sized.state_block_size) == (25, 25, 256)
    assert sized.num_bytes <= 1000 * 64 < sized.num_bytes + 64
    few = size_hybrid(1000 * 64, 64, 640, 4, 64, 16, 512, 4096)
    assert (few.state_slots, few.num_checkpoints) == (4, 46)


@pytest.mark.parametrize(
    ("size", "pool", "field"), [(24, 64_000, "mamba_block_size"), (32, 2_000, "kv_cache_memory_bytes")]
)
def test_what_does_not_fit_is_refused(size: int, pool: int, field: str) -> None:
    with pytest.raises(KvernError) as caught:
        size_hybrid(pool, 64, 640, 8, size, 16, 16, 4096)
    assert caught.value.field == field


def test_other_models_are_told_that_the_flag_has_no_effect(
    checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        executor = load_executor(checkpoint("llama"), mamba_block_size=64)
    assert "--mamba-block-size has no effect" in caplog.text
    assert executor.describe().num_state_blocks == 0 and not executor.describe().model.state_block_size


def test_a_state_that_a_broken_sequence_left_harms_no_one(hybrid: ModelExecutor) -> None:
    engine = LocalEngine(hybrid)
    expected = engine.generate([PROMPT], 4)
    for states in hybrid._cache.states.values():
        for state in states:
            state[:32] = torch.nan
    assert LocalEngine(hybrid, Limits(enable_prefix_caching=False)).generate([PROMPT], 4) == expected
    assert np.isfinite(hybrid._cache.states[0][1][0].numpy()).all()


def test_a_model_without_any_attention_is_refused(tmp_path: Path) -> None:
    family = FAMILIES["Bamba"]
    folder = family.save(family.make(), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attn_layer_indices": []}))
    with pytest.raises(KvernError, match="without any attention layer is not supported: all"):
        load_executor(folder)
