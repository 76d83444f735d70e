"""Every family computes what transformers computes, however the scheduler cuts it up. `make parity` does it at length."""

from __future__ import annotations

from pathlib import Path

import pytest
from parity.families import FAMILIES
from parity.family_check import check


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_and_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    check(FAMILIES[name], tmp_path, num_prompts=6, length=16)
