"""Every kind of process is killed and frozen under load, once for all in one run of the real services."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.running import alive, until

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


@pytest.mark.slow
def test_a_rolling_restart_is_nobodys_error() -> None:
    """Requests that their clients did not name live through it too."""
    argv = [KVERN, "bench", "chaos", "--restarts", "1", "--clients", "4", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert result["violations"] == 0, json.dumps(result, indent=1)
    assert result["by_kind"].keys() <= {f"{k} restart" for k in ("scheduler", "worker", "gateway", "store")}
    assert result["faults"] >= 3
    lacking = sum(row[kind] for row in result["by_kind"].values() for kind in ("lost", "missing", "repeated"))
    assert lacking == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [[], ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]], ids=["shell", "background"]
)
def test_a_run_that_is_cut_short_leaves_nothing_behind(launcher: list[str], tmp_path: Path) -> None:
    """A shell starts its background jobs with SIGINT ignored."""
    argv = [*launcher, KVERN, "bench", "chaos", "--kind", "worker", "--clients", "2"]
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output)
    try:
        until(lambda: len(children(process.pid)) == 7, "all services have been started")
        started = children(process.pid)
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert [pid for pid in started if alive(pid)] == []
    assert "Traceback" not in (tmp_path / "output").read_text()


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_an_unknown_kind_is_refused() -> None:
    done = subprocess.run(
        [KVERN, "bench", "chaos", "--kind", "mesh"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "'mesh'" in done.stderr
