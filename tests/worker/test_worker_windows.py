"""A model whose every layer has a window keeps no more blocks than its windows reach."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from parity.local_engine import LocalEngine
from worker.conftest import load_executor
from worker.test_worker_parity import assert_greedy, random_prompts

from kvern_scheduler.core.group import Limits


def test_tokens_equal_transformers_in_a_pool_that_could_not_hold_all(
    checkpoint: Callable[[str], Path], reference: Callable[[str], Any]
) -> None:
    executor = load_executor(checkpoint("mistral"), block_size=4)
    assert executor.describe().model.sliding_window == 8
    engine = LocalEngine(executor, Limits(max_num_seqs=6), num_blocks=60)
    prompts = random_prompts(6, 20, 40)
    outputs = engine.generate(prompts, 60)  # 80 to 100 tokens each: 20 to 25 blocks
    assert engine.group.num_preemptions == 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(reference("mistral"), prompt, output)
    # Prefixes are found, and whole, though they were given back meanwhile.
    last = engine.submit(prompts[-1], 60)
    engine.run()
    assert engine.outputs(last) == [outputs[-1]]
    assert np.count_nonzero(engine.group.pool.states() >= 2) == 0


def test_mixed_windows_keep_all_blocks(checkpoint: Callable[[str], Path]) -> None:
    for name in ("llama", "qwen2-windows"):
        assert load_executor(checkpoint(name)).describe().model.sliding_window == 0
