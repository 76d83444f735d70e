"""Decoders that run in one call compute the bits of their blocks one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from parity.families import FAMILIES
from worker.conftest import load_executor
from worker.test_worker_parity import random_prompts, traced


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["Mixtral", "Qwen3-MoE", "OLMoE", "GPT-OSS", "GPT-OSS, MXFP4", "Phi 3", "Gemma"]
)
def test_one_call_gives_the_bits_of_block_after_block(name: str, dtype: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    executor = load_executor(family.save(family.make(), tmp_path), dtype=dtype, threads=2)
    assert executor._model.stack.structs is not None  # type: ignore[attr-defined]
    prompts = random_prompts(4)
    together = traced(executor, prompts, chunk=16)
    executor._model = replace(executor._model, stack=None)  # type: ignore[type-var]
    assert traced(executor, prompts, chunk=16) == together


@pytest.mark.parametrize("name", ["Gemma 2", "Granite", "GPT-NeoX", "Qwen2-MoE", "DeepSeek-V3"])
def test_blocks_of_another_kind_run_one_by_one(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    executor = load_executor(family.save(family.make(), tmp_path))
    assert executor._model.stack is None  # type: ignore[attr-defined]
