"""The sweep over servers' flags and loads, on a simulated worker."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from e2e.running import BIN

from kvern_gateway.cli.bench_sweep import SweepOptions, pareto, parse_grid, render


def test_every_combination_is_measured(tmp_path: Path) -> None:
    argv = [
        *(BIN / "kvern", "bench", "sweep", "--store", "memory", "--with", "device=sim"),
        *("--set", "sim-step-us=2000,20000", "--with", "--max-num-seqs=8", "--max-concurrency", "1,4"),
        *("--num-prompts", "8", "--input-len", "8", "--output-len", "8", "--output", tmp_path, "--json"),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["sim_step_us"], row["max_concurrency"]) for row in rows] == [
        ("2000", 1), ("2000", 4), ("20000", 1), ("20000", 4)
    ]  # fmt: skip
    assert json.loads((tmp_path / "results.json").read_text()) == rows
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
    # Ten times longer steps, and nothing else, are what one stream sees.
    assert rows[2]["median_tpot_ms"] > 3 * rows[0]["median_tpot_ms"]
    assert rows[2] not in pareto(rows)


def row(tpot: float | None, throughput: float | None, **more: object) -> dict[str, object]:
    return {"median_tpot_ms": tpot, "output_throughput": throughput, **more}


def test_the_front_is_what_nothing_beats() -> None:
    fast, busy, beaten, broken = row(10, 100), row(50, 400), row(60, 390), row(None, None, error="no")
    assert pareto([fast, beaten, busy, broken]) == [fast, busy]
    assert pareto([fast, dict(fast)]) == [fast, fast]


def test_the_table_marks_it_and_tells_of_failures() -> None:
    rows = [
        row(10, 100, max_num_seqs="8"),
        row(20, 50, max_num_seqs="4"),
        {"max_num_seqs": "0", "error": "no"},
    ]
    lines = render({"rows": rows, "output": None}).splitlines()
    assert [line.split()[0] for line in lines] == ["max_num_seqs", "8", "4", "0"]
    assert [line[-1] for line in lines[1:]] == ["*", "0", "o"]


def test_settings_multiply() -> None:
    options = SweepOptions(None, [], parse_grid(["--max-num-seqs=1,2", "block_size=16,32"]))
    assert options.servers == [{"max_num_seqs": a, "block_size": b} for a in ("1", "2") for b in ("16", "32")]


@pytest.mark.parametrize("word", ["max-num-seqs", "max-num-seqs=", "no-such-flag=1"])
def test_wrong_settings_are_named(word: str) -> None:
    with pytest.raises(ValueError, match=f"--set '{word}'"):
        parse_grid([word])
