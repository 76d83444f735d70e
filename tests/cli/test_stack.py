"""Command lines of the services, the model and store that are found, ports and sockets."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from pathlib import Path

import pytest
import redis

from kvern_gateway.cli import stack
from kvern_gateway.cli.ports import PortInUse, claim_port


def options(tmp_path: Path, **more: object) -> stack.StackOptions:
    fields = {"model": tmp_path, "served_model_name": "m", "data_dir": tmp_path, "run_dir": tmp_path / "run"}
    return stack.StackOptions(**(fields | more))  # type: ignore[arg-type]


def test_flags_go_to_the_services_that_take_them() -> None:
    flags = {"dtype": "float32", "max_num_seqs": 8, "enable_prefix_caching": False, "http_port": 1}
    assert stack.render_flags("worker", flags) == ["--dtype", "float32", "--max-num-seqs", "8"]
    assert stack.render_flags("scheduler", flags) == ["--max-num-seqs", "8", "--no-enable-prefix-caching"]
    assert stack.render_flags("gateway", flags) == []
    assert stack.render_flags("scheduler", {"enable_prefix_caching": True}) == ["--enable-prefix-caching"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"kv_cache_dtype": "int4"}, "argument --kv-cache-dtype: invalid choice: 'int4'"),
        ({"block_size": 0}, "argument --block-size: 0 is below 1"),
        ({"gpu_memory_utilization": 1.5}, "argument --gpu-memory-utilization: 1.5 is not a share"),
        ({"load_format": "zip"}, "argument --load-format: invalid choice: 'zip'"),
        ({"device": "cpu", "exact": False}, "argument --no-exact: has no effect on --device cpu"),
        ({"cudagraph_capture_sizes": "1,0"}, "argument --cudagraph-capture-sizes: 0 is below 1"),
        ({"max_num_batched_tokens": 100}, "--max-num-batched-tokens: 100 is less than --max-num-seqs 256"),
        ({"redis_url": "localhost"}, "argument --redis-url: it must start with redis://"),
    ],
)
def test_what_a_service_would_refuse_is_known_before_it_starts(
    tmp_path: Path, flags: dict[str, object], message: str
) -> None:
    known = {name: flags.pop(name) for name in ("redis_url",) if name in flags}
    stack.check(options(tmp_path))
    with pytest.raises(stack.UsageError, match=re.escape(message)):
        stack.check(options(tmp_path, flags=flags, **known))


def test_children_are_listed_in_order_of_need(tmp_path: Path) -> None:
    names = [spec.name for spec in stack.stack_specs(options(tmp_path))]
    assert names == ["store", "worker", "scheduler", "gateway"]


def test_the_private_store_has_little_to_read_after_a_kill(tmp_path: Path) -> None:
    argv = list(stack.stack_specs(options(tmp_path))[0].argv)
    server = redis_server(argv)
    assert server["appendonly"] == "yes"
    assert int(server["auto-aof-rewrite-min-size"]) == 8 * 2**20


def redis_server(argv: list[str]) -> dict[str, str]:
    """What the started server says of its own configuration."""
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as process:
        try:
            client = redis.Redis(unix_socket_path=argv[argv.index("--unixsocket") + 1])
            deadline = time.monotonic() + 60
            while True:
                try:
                    found: dict[str, str] = client.config_get("*")
                    return found
                except redis.ConnectionError:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
        finally:
            process.kill()


@pytest.mark.parametrize("more", [{"store": "memory"}, {"redis_url": "redis://elsewhere:6379/0"}])
def test_there_is_no_private_store_where_none_is_wanted(tmp_path: Path, more: dict[str, str]) -> None:
    specs = stack.stack_specs(options(tmp_path, **more))
    assert [spec.name for spec in specs] == ["worker", "scheduler", "gateway"]
    scheduler = specs[1].argv
    assert ("--store" in scheduler and "memory" in scheduler) or "redis://elsewhere:6379/0" in scheduler


def test_the_private_store_writes_before_it_answers(tmp_path: Path) -> None:
    argv = list(stack.store_spec(options(tmp_path)).argv)
    for flag, value in [
        ("--appendonly", "yes"),
        ("--appendfsync", "always"),
        ("--save", ""),
        ("--port", "0"),
    ]:
        assert argv[argv.index(flag) + 1] == value


def test_sockets_move_to_a_short_directory_when_their_path_would_not_fit(tmp_path: Path) -> None:
    near = Path("/data")
    assert stack.choose_run_dir(near) == (near / "run", False)
    run_dir, temporary = stack.choose_run_dir(tmp_path / ("x" * 100))
    try:
        assert temporary
        assert len(str(run_dir / "scheduler.sock")) < 60
    finally:
        run_dir.rmdir()


def test_stale_sockets_are_cleared(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    chosen.run_dir.mkdir()
    chosen.socket("worker").touch()
    stack.prepare_directories(chosen)
    assert not chosen.socket("worker").exists()


def test_a_flag_without_effect_is_refused() -> None:
    stack.check_flags({"mamba_block_size": 64})
    with pytest.raises(stack.UsageError, match="--kv-offloading-size has no effect"):
        stack.check_flags({"kv_offloading_size": 1.0, "enable_prefix_caching": False})
    stack.check_flags({"mamba_block_size": 64, "enable_prefix_caching": True})
    with pytest.raises(stack.UsageError, match="--mamba-block-size has no effect"):
        stack.check_flags({"mamba_block_size": 64, "enable_prefix_caching": False})


def test_the_default_model_ships_with_a_package() -> None:
    path, name = stack.resolve_model(None)
    assert path.suffix == ".gguf"
    assert name == "SmolLM2-135M-Instruct"


def test_a_path_names_its_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert stack.resolve_model(str(folder)) == (folder, "my-model")
    file = tmp_path / "weights.Q8_0.gguf"
    file.touch()
    assert stack.resolve_model(str(file)) == (file, "weights.Q8_0")
    with pytest.raises(stack.UsageError, match="neither a folder nor a file"):
        stack.resolve_model("org/some-model")


def test_a_taken_port_is_named_with_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortInUse) as error:
            claim_port("127.0.0.1", port, "--http-port")
    assert f"127.0.0.1:{port} cannot be used" in str(error.value)
    assert f"(pid {os.getpid()})" in str(error.value)
    assert "--http-port" in str(error.value)


def test_port_0_takes_a_free_one() -> None:
    port = claim_port("127.0.0.1", 0, "--http-port")
    assert port > 0
    assert claim_port("127.0.0.1", port, "--http-port") == port


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(PortInUse, match=r"192\.0\.2\.1 is no address to serve on"):
        claim_port("192.0.2.1", 8000, "--http-port")
