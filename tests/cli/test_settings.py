"""Flags of `kvern up` from files, profiles and the environment; the command line wins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvern_gateway.cli.settings import PROFILES, check_environment

KVERN = str(Path(sys.executable).parent / "kvern")


def dry_run(*words: str, code: int = 0, **environment: str) -> tuple[dict[str, str], str]:
    """Command lines by service, and everything that was printed."""
    done = subprocess.run(
        [KVERN, "up", "--dry-run", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    return lines, done.stdout + done.stderr


def test_a_dry_run_starts_and_writes_nothing(tmp_path: Path) -> None:
    lines, _ = dry_run("--data-dir", str(tmp_path / "data"), "--max-num-seqs", "7")
    assert list(lines) == ["store", "worker", "scheduler", "gateway"]
    assert "--appendfsync always" in lines["store"]
    assert "--max-num-seqs 7" in lines["worker"] and "--max-num-seqs 7" in lines["scheduler"]
    assert not (tmp_path / "data").exists()


def test_the_command_line_wins_over_environment_file_and_profile(tmp_path: Path) -> None:
    config = tmp_path / "kvern.yaml"
    config.write_text(
        "context_window_size: 4k\nmax-num-seqs: 8\nblock_size: 32\nenable-prefix-caching: false\nstore: memory\n"
    )
    lines, printed = dry_run(
        *("--config", str(config), "--profile", "latency", "--max-num-seqs", "9"),
        KVERN_UP_BLOCK_SIZE="64",
        KVERN_UP_BLOK_SIZE="1",
    )
    worker, scheduler = lines["worker"], lines["scheduler"]
    assert "--max-num-seqs 9" in worker  # the command line's
    assert "--block-size 64" in worker  # the environment's
    assert "--max-model-len 4k" in worker  # the file's
    assert "--long-prefill-token-threshold 256" in scheduler  # the profile's
    assert "--no-enable-prefix-caching" in scheduler and "--store memory" in scheduler
    assert "context_window_size is called --max-model-len here" in printed
    assert "--profile latency: max_num_seqs=32" in printed
    assert "KVERN_UP_BLOK_SIZE is ignored; did you mean KVERN_UP_BLOCK_SIZE?" in printed


def test_adapters_come_from_file_and_command_line(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").touch()
    a, b = f"a={folder}", f'{{"name":"b","path":"{folder}"}}'
    lines, _ = dry_run("--enable-lora", "--max-loras", "2", "--lora-modules", a, b)
    assert f"--lora-modules {a} --lora-modules '{b}'" in lines["scheduler"]
    assert "--enable-lora --max-loras 2" in lines["worker"]
    (tmp_path / "kvern.yaml").write_text(f"enable-lora: true\nlora-modules: [{a}, c={folder}]\n")
    lines, _ = dry_run("--config", str(tmp_path / "kvern.yaml"), "--allow-runtime-lora-updating")
    assert f"--lora-modules {a} --lora-modules c={folder}" in lines["scheduler"]
    assert "--allow-runtime-lora-updating" in lines["gateway"]
    for words, said in (
        (["--enable-lora", "--lora-modules", "a=/nowhere"], "there is no adapter_config.json"),
        (["--lora-modules", a], "--lora-modules has no effect without --enable-lora"),
        (["--max-lora-rank", "4"], "--max-lora-rank has no effect without --enable-lora"),
        (["--allow-runtime-lora-updating"], "has no effect without --enable-lora"),
    ):
        assert said in " ".join(dry_run(*words, code=2)[1].split())


def test_a_file_may_name_the_model(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    (tmp_path / "kvern.yaml").write_text(f"model: {model}\n")
    lines, _ = dry_run("--config", str(tmp_path / "kvern.yaml"))
    assert f"--model {model}" in lines["worker"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max-modle-len: 5", "there is no --max-modle-len; did you mean --max-model-len?"),
        ("prefill-context-parallel-size: 4", "context parallelism is not built yet"),
        ("max-num-seqs: [1, 2]", "max-num-seqs is [1, 2]; it must be a number, text, true or false"),
        ("- a\n- b", "it must hold `flag: value` lines"),
        ("a: b: c", "is not YAML"),
        ("max-num-seqs: many", "--max-num-seqs is 'many': "),
        ("store: disk", "--store is 'disk': "),
        ("http_port: 70000", "--http-port is '70000': "),
    ],
)
def test_wrong_files_are_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "kvern.yaml").write_text(content)
    _, printed = dry_run("--config", str(tmp_path / "kvern.yaml"), code=2)
    assert message in printed and f"--config {tmp_path / 'kvern.yaml'}" in printed


def test_a_dry_run_refuses_what_a_service_would() -> None:
    _, printed = dry_run("--kv-cache-dtype", "int4", code=2)
    assert "argument --kv-cache-dtype: invalid choice: 'int4'" in printed


def test_looking_at_a_worker_s_flags_needs_no_torch() -> None:
    program = "import sys, kvern_worker.server as s, kvern_scheduler.server; s.parse_args([]); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "False"


def test_what_is_not_there_is_refused() -> None:
    assert "No such file" in dry_run("--config", "/nowhere.yaml", code=2)[1]
    assert "use one of throughput, latency, long-context" in dry_run("--profile", "fast", code=2)[1]


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_is_taken(name: str) -> None:
    lines, _ = dry_run("--profile", name)
    assert f"--max-num-seqs {PROFILES[name]['max_num_seqs']}" in lines["scheduler"]


def test_other_variables_are_nobody_s_business() -> None:
    assert check_environment({"KVERN_KERNELS": "cpu", "KVERN_UP_HOST": "::1", "PATH": ""}, ["host"]) == []


def test_copies_of_the_model_and_their_ranks(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    lines, _ = dry_run(str(model), "-dp", "2", "-tp", "2", "-ep")
    for name in ("worker", "worker-1"):
        assert "--tensor-parallel-size 2 --enable-expert-parallel" in lines[name]
        assert lines[name].count(f"/{name}.sock") == lines["scheduler"].count(f"/{name}.sock") == 1
