"""The supervisor against real, tiny child processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvern_gateway.cli.supervisor import (
    ChildSpec,
    RestartPolicy,
    Supervisor,
    describe_exit,
    last_log_line,
    rotate_log,
)

FAST = RestartPolicy(first_s=0.05, most_s=0.2, healthy_s=30)
TRACE = "import os, pathlib; trace = pathlib.Path(os.environ['TRACE'])\n"


def spec(tmp_path: Path, name: str, code: str, **more: object) -> ChildSpec:
    return ChildSpec(
        name=name,
        argv=[sys.executable, "-S", "-c", TRACE + textwrap.dedent(code)],
        log_path=tmp_path / f"{name}.log",
        env={"TRACE": str(tmp_path / "trace")},
        **more,  # type: ignore[arg-type]
    )


SLEEPER = """
    import signal, sys, time
    def stop(*_):
        with trace.open("a") as out: out.write(sys.argv[0] + NAME + " stopped\\n")
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    print("up", flush=True)
    # In short sleeps: a signal just before a long one would be handled after it.
    while True: time.sleep(0.02)
"""


def sleeper(tmp_path: Path, name: str) -> ChildSpec:
    return spec(tmp_path, name, SLEEPER.replace("NAME", repr(name)))


async def until(condition: Callable[[], object], what: str, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.01)


def is_up(tmp_path: Path, name: str) -> bool:
    return last_log_line(tmp_path / f"{name}.log") == "up"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_children_stop_in_reverse_order(tmp_path: Path) -> None:
    names = ["store", "worker", "scheduler", "gateway"]
    supervisor = Supervisor([sleeper(tmp_path, name) for name in names], say=pytest.fail)
    supervisor.start()
    await until(lambda: all(is_up(tmp_path, name) for name in names), "all children up")
    pids = [supervisor.pid(name) for name in names]
    await supervisor.stop()
    stopped = [line.split()[0].removeprefix("-c") for line in (tmp_path / "trace").read_text().splitlines()]
    assert stopped == ["gateway", "scheduler", "worker", "store"]
    assert not any(alive(pid) for pid in pids if pid)
    assert [supervisor.pid(name) for name in names] == [None] * 4


async def test_a_killed_child_is_restarted_with_one_line(tmp_path: Path) -> None:
    lines: list[str] = []
    supervisor = Supervisor([sleeper(tmp_path, "worker")], lines.append, FAST)
    supervisor.start()
    supervisor.mark_ready()
    await until(lambda: is_up(tmp_path, "worker"), "worker up")
    first = supervisor.pid("worker")
    assert first
    os.kill(first, signal.SIGKILL)
    await until(lambda: supervisor.pid("worker") not in (None, first), "worker restarted")
    assert lines == ["worker was killed by SIGKILL; restarting in 0.05 s"]
    await supervisor.stop()


async def test_the_last_line_is_of_the_life_that_ended(tmp_path: Path) -> None:
    lines: list[str] = []
    code = f"import pathlib; p = pathlib.Path({str(tmp_path / 'second')!r}); p.exists() or print('of the first', flush=True); p.touch(); raise SystemExit(3)"
    supervisor = Supervisor([spec(tmp_path, "gateway", code)], lines.append, FAST)
    supervisor.start()
    supervisor.mark_ready()
    await until(lambda: len(lines) >= 2, "two deaths")
    await supervisor.stop()
    assert "; last log line: of the first;" in lines[0]
    assert "; last log line: (no output);" in lines[1]


async def test_backoff_doubles_up_to_its_limit(tmp_path: Path) -> None:
    lines: list[str] = []
    supervisor = Supervisor([spec(tmp_path, "gateway", "raise SystemExit(3)")], lines.append, FAST)
    supervisor.start()
    supervisor.mark_ready()
    await until(lambda: len(lines) >= 5, "five deaths")
    await supervisor.stop()
    assert [line.rsplit("restarting in ", 1)[1] for line in lines[:5]] == [
        "0.05 s",
        "0.1 s",
        "0.2 s",
        "0.2 s",
        "0.2 s",
    ]
    assert all("gateway exited with code 3" in line for line in lines)


async def test_a_configuration_error_before_ready_stops_everything(tmp_path: Path) -> None:
    bad = spec(tmp_path, "worker", "print('--block-size 7: must be a power of two'); raise SystemExit(2)")
    supervisor = Supervisor([sleeper(tmp_path, "store"), bad], say=pytest.fail, policy=FAST)
    supervisor.start()
    failure = await asyncio.wait_for(supervisor.failed, 10)
    assert str(failure) == "worker exited with code 2: --block-size 7: must be a power of two"
    await supervisor.stop()


async def test_a_child_that_never_gets_up_is_given_up_before_ready(tmp_path: Path) -> None:
    lines: list[str] = []
    supervisor = Supervisor([spec(tmp_path, "worker", "raise SystemExit(1)")], lines.append, FAST)
    supervisor.start()
    failure = await asyncio.wait_for(supervisor.failed, 10)
    assert "worker exited with code 1" in str(failure)
    assert len(lines) == 4
    await supervisor.stop()


async def test_exit_code_2_after_ready_is_a_death_like_any_other(tmp_path: Path) -> None:
    lines: list[str] = []
    supervisor = Supervisor([spec(tmp_path, "worker", "raise SystemExit(2)")], lines.append, FAST)
    supervisor.start()
    supervisor.mark_ready()
    await until(lambda: len(lines) >= 2, "two deaths")
    assert not supervisor.failed.done()
    await supervisor.stop()


async def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    stubborn = spec(
        tmp_path,
        "worker",
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)",
        stop_grace_s=0.3,
    )
    supervisor = Supervisor([stubborn], say=pytest.fail)
    supervisor.start()
    await until(lambda: is_up(tmp_path, "worker"), "worker up")
    pid = supervisor.pid("worker")
    assert pid
    started = time.monotonic()
    await supervisor.stop()
    assert 0.3 <= time.monotonic() - started < 2
    assert not alive(pid)


async def test_a_second_signal_cuts_the_grace(tmp_path: Path) -> None:
    stubborn = spec(
        tmp_path,
        "worker",
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)",
        stop_grace_s=30,
    )
    supervisor = Supervisor([stubborn], say=pytest.fail)
    supervisor.start()
    await until(lambda: is_up(tmp_path, "worker"), "worker up")
    kill = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, kill.set)
    await asyncio.wait_for(supervisor.stop(kill), 5)


async def test_what_a_child_started_ends_with_it(tmp_path: Path) -> None:
    parent = spec(
        tmp_path,
        "worker",
        """
        import subprocess, sys, time
        helper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        print(helper.pid, flush=True)
        time.sleep(60)
        """,
    )
    supervisor = Supervisor([parent], say=pytest.fail)
    supervisor.start()
    await until(lambda: last_log_line(parent.log_path).isdigit(), "helper started")
    helper = int(last_log_line(parent.log_path))
    await supervisor.stop()
    await until(lambda: not alive(helper), "helper ended")


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    code = f"""
        import asyncio, sys
        from pathlib import Path
        from kvern_gateway.cli.supervisor import ChildSpec, Supervisor
        async def main():
            child = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
            supervisor = Supervisor([ChildSpec("worker", child, Path({str(tmp_path / "w.log")!r}))], say=print)
            supervisor.start()
            print(supervisor.pid("worker"), flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        child = int(process.stdout.readline())
        assert alive(child)
        process.kill()
    deadline = time.monotonic() + 5
    while alive(child):
        assert time.monotonic() < deadline, "the child outlived its supervisor"
        time.sleep(0.01)


def test_exits_are_described_by_code_or_signal() -> None:
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(-99) == "was killed by signal 99"


def test_the_last_log_line_skips_empty_ones(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert last_log_line(log) == "(no output)"
    log.write_bytes(b"first\nlast \xff\n\n  \n")
    assert last_log_line(log) == "last \ufffd"


def test_a_large_log_is_moved_aside(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"small")
    rotate_log(log)
    assert log.read_bytes() == b"small"
    with log.open("wb") as out:
        out.truncate(17 * 2**20)
    rotate_log(log)
    assert not log.exists()
    assert (tmp_path / "x.log.1").exists()
