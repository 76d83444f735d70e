"""Wrong flags end each service with exit code 2 and one line that says what is wrong, before anything is loaded."""

from __future__ import annotations

import pytest

from kvern_gateway.server import build_parser as gateway_parser
from kvern_scheduler.server import parse_args as parse_scheduler
from kvern_worker.server import build_parser as worker_parser
from kvern_worker.server import parse_args as parse_worker

SCHEDULER = ["--listen", "127.0.0.1:0", "--worker", "127.0.0.1:1"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dtype", "int3"], "argument --dtype: invalid choice: 'int3'"),
        (["--load-format", "zip"], "argument --load-format: invalid choice: 'zip'"),
        (["--max-model-len", "long"], "'long' is neither auto nor a positive number"),
        (["--max-model-len", "0"], "'0' is neither auto nor a positive number"),
        (["--block-size", "0"], "argument --block-size: 0 is below 1"),
        (["--kv-cache-memory-bytes", "-5"], "argument --kv-cache-memory-bytes: -5 is below 1"),
        (["--gpu-memory-utilization", "7"], "argument --gpu-memory-utilization: 7 is not a share"),
        (["--gpu-memory-utilization", "nan"], "argument --gpu-memory-utilization: nan is not a share"),
        (["--max-num-seqs", "many"], "argument --max-num-seqs: 'many' is not a whole number"),
    ],
)
def test_worker(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        worker_parser().parse_args(flags)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--redis-url", "localhost"], "argument --redis-url: it must start with redis://"),
        (["--metrics-port", "99999"], "argument --metrics-port: 99999 is not a port"),
        (["--max-num-seqs", "0"], "argument --max-num-seqs: 0 is below 1"),
        (["--store", "redis"], "--store redis needs --redis-url"),
        (["--lora-modules", "a=/x"], "--lora-modules has no effect without --enable-lora"),
        (["--enable-lora", "--lora-modules", "a=/x", "a=/y"], "--lora-modules names 'a' twice"),
        (["--enable-lora", "--lora-modules", "a="], "'a=' is not an adapter; use NAME=PATH or"),
        (["--enable-lora", "--lora-modules", '{"name":'], "is not valid JSON"),
        (["--enable-lora", "--lora-modules", '{"name":"a"}'], "is not an adapter"),
        (["--enable-lora", "--lora-modules", '{"nam":"a"}'], "has 'nam', which is not known"),
    ],
)
def test_scheduler(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_scheduler([*SCHEDULER, *flags])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-loras", "2"], "--max-loras has no effect without --enable-lora"),
        (["--enable-lora", "--max-loras", "0"], "argument --max-loras: 0 is below 1"),
        (["--enable-lora", "--max-loras", "3", "--max-cpu-loras", "2"], "2 is less than --max-loras 3"),
    ],
)
def test_adapters_of_a_worker(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_worker(flags)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_adapters_are_named_in_either_form() -> None:
    flags = [
        "--enable-lora",
        "--lora-modules",
        "a=/x=1",
        '{"name": "b", "path": "/y", "base_model_name": "m"}',
    ]
    assert parse_scheduler([*SCHEDULER, *flags]).lora_modules == [("a", "/x=1"), ("b", "/y")]
    assert parse_worker(["--enable-lora"]).max_loras == 1
    assert parse_worker([]).max_loras == 0


def test_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gateway_parser().parse_args(["--http-port", "-1"])
    assert ended.value.code == 2
    assert "argument --http-port: -1 is not a port" in capsys.readouterr().err


def test_right_values_are_taken() -> None:
    worker = worker_parser().parse_args(["--max-model-len", "8k", "--gpu-memory-utilization", "1"])
    assert (worker.max_model_len, worker.gpu_memory_utilization) == (8000, 1.0)
    assert worker_parser().parse_args([]).max_model_len is None
    assert (
        parse_scheduler([*SCHEDULER, "--redis-url", "unix:///tmp/x.sock"]).redis_url == "unix:///tmp/x.sock"
    )
