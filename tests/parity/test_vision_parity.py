"""What sees computes what transformers computes, images prepared by our gateway against its image processors."""

from __future__ import annotations

from pathlib import Path

import pytest
from parity.vision_check import check
from parity.vision_families import VISION_FAMILIES


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_greedy_tokens_and_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    check(VISION_FAMILIES[name], tmp_path, num_prompts=6, length=16)
