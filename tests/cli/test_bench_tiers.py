"""`kvern bench tiers` loads what it says it loads."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from kvern_gateway.cli.main import app
from kvern_gateway.cli.make_model import make_model


def test_nothing_of_an_evicted_prompt_is_computed_again(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3-toy")
    answer = CliRunner().invoke(
        app, ["bench", "tiers", str(tmp_path), "--length", "200", "--runs", "2", "--json"]
    )
    assert answer.exit_code == 0, answer.output
    [times] = json.loads(answer.stdout.splitlines()[-1])
    # 200 is not a multiple of 16: the last block is not full, and no one can have it.
    assert times["tokens"] == 200 and times["recomputed"] == 8
    assert min(times["compute"], times["memory"], times["disk"]) > 0
