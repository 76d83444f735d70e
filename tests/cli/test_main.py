"""The command line itself: quick, and clear about wrong input."""

from __future__ import annotations

import importlib.metadata
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvern_gateway.cli import command_up
from kvern_gateway.cli.main import app

KVERN = str(Path(sys.executable).parent / "kvern")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kvern_gateway.cli.main import app; "
        "heavy = {'torch', 'grpc', 'numpy', 'transformers', 'httpx', 'redis', 'rich.progress'} & sys.modules.keys(); "
        "print(sorted(heavy))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_help_names_the_commands() -> None:
    answer = subprocess.run([KVERN, "--help"], capture_output=True, text=True, check=True)
    for command in ("up", "chat", "bench"):
        assert f"  {command} " in answer.stdout


def test_the_version_is_told() -> None:
    answer = subprocess.run([KVERN, "--version"], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["kvern", importlib.metadata.version("kvern")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["up", "org/model"], "neither a folder nor a file"),
        (["bench", "serve", "--goodput", "itl:5"], "--goodput 'itl:5'"),
        (["bench", "serve", "--goodput", "ttft:5", "tpot:x"], "--goodput 'tpot:x'"),
        (["bench", "serve", "--dataset-name", "sharegpt"], "choose from random"),
        (["bench", "serve", "--request-rate", "0"], "above 0"),
        (["bench", "serve", "--base-url", "ftp://x"], "URL"),
        (["bench", "serve", "--port", "1"], "cannot connect to 127.0.0.1:1"),
        (["chat", "--base-url", "http://127.0.0.1:1"], "cannot reach"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.startswith("kvern: ")
    assert "Traceback" not in result.output


def test_up_names_a_taken_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = CliRunner().invoke(app, ["up", "--http-port", str(port), "--data-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert f"127.0.0.1:{port} cannot be used, held by" in result.output
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--http-port", "99999"], "--http-port"),
        (["--http-port", "7001", "--grpc-port", "7001"], "--http-port and --grpc-port are both 7001"),
        (["--data-dir", "/proc/no/such"], "/proc/no/such cannot be used"),
        (["--data-dir", __file__], "cannot be used (File exists)"),
    ],
)
def test_up_refuses_before_it_starts_anything(flags: list[str], message: str) -> None:
    done = subprocess.run(
        [KVERN, "up", "--http-port", "0", "--grpc-port", "0", *flags],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def translate_up(words: list[str]) -> list[str]:
    return command_up.translate(typer.main.get_command(app), words)


@pytest.mark.parametrize(
    ("words", "translated"),
    [
        ("--model m.gguf --max_model_len 8k", "m.gguf --max-model-len 8k"),
        ("--model=m.gguf --enable-prefix-caching false", "m.gguf --no-enable-prefix-caching"),
        ("m --port 8001 -pcp 1", "m --http-port 8001"),
    ],
)
def test_up_takes_the_flags_of_vllm_serve(words: str, translated: str) -> None:
    assert translate_up(words.split()) == translated.split()


def test_up_refuses_what_is_not_built(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        translate_up(["m", "--prefill-context-parallel-size", "2"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(
        "kvern up: --prefill-context-parallel-size 2: context parallelism is not built yet"
    )
