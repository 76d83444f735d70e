"""Every kind of process is killed and frozen under load, once for all in one run of the real services."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

KVERN = Path(sys.executable).parent / "kvern"
KILLS = 2
# Beside the kills of each of four kinds, one freeze.
FAULTS = 4 * (KILLS + 1)


@pytest.mark.slow
def test_nothing_is_lost_whatever_dies() -> None:
    argv = [KVERN, "bench", "chaos", "--kind", "all", "--kills", str(KILLS), "--clients", "6", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert result["violations"] == 0, json.dumps(result, indent=1)
    assert done.returncode == 0
    # A strike at a process that is just starting again is none.
    assert FAULTS - 2 <= result["faults"] <= FAULTS
    assert result["requests"] > 20
    assert result["tokens"] > 2_000
    assert set(result["by_kind"]) >= {"scheduler kill", "worker kill", "gateway kill", "store kill"}
    assert result["stall_ms_p50"] <= result["stall_ms_p99"]


def test_an_unknown_kind_is_refused() -> None:
    done = subprocess.run(
        [KVERN, "bench", "chaos", "--kind", "mesh"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "'mesh'" in done.stderr
