"""The compose file and the images: what they start exists, and nothing has more rights than it needs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvern_gateway import server as gateway
from kvern_scheduler import server as scheduler
from kvern_worker import server as worker

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()
PARSERS: dict[str, Callable[[list[str]], Any]] = {
    "gateway": gateway.build_parser().parse_args,
    "scheduler": scheduler.parse_args,
    "worker-cpu": worker.build_parser().parse_args,
}


def entrypoint(target: str) -> list[str]:
    stage = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)
    (own,) = [part for part in stage if part.split("\n", 1)[0].endswith(f" AS {target}")]
    (words,) = re.findall(r"^ENTRYPOINT (.*)$", own, flags=re.MULTILINE)
    parsed: list[str] = json.loads(words)
    return parsed


def substitute(word: str) -> str:
    """``${NAME:-default}`` → default."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word)


OURS = sorted(
    name for name, service in COMPOSE["services"].items() if service.get("build", {}).get("target") in PARSERS
)


@pytest.mark.parametrize("name", OURS)
def test_each_command_line_is_one_that_the_service_takes(name: str) -> None:
    service = COMPOSE["services"][name]
    target = service["build"]["target"]
    program, *flags = entrypoint(target)
    assert program == f"kvern-{target.removesuffix('-cpu')}"
    PARSERS[target]([*flags, *map(substitute, service["command"])])


def test_every_part_of_the_stack_is_there() -> None:
    assert OURS == ["gateway", "scheduler-0", "scheduler-1", "worker"]


@pytest.mark.parametrize("name", sorted(set(COMPOSE["services"]) - {"model"}))
def test_no_container_has_more_rights_than_it_needs(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_commits_are_on_the_disk() -> None:
    command = COMPOSE["services"]["redis"]["command"]
    assert command[command.index("--appendfsync") + 1] == "always"
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"


def test_images_run_as_a_user_without_rights() -> None:
    runtime = DOCKERFILE[DOCKERFILE.index(" AS runtime") :]
    assert "USER 10001:10001" in runtime
    # Only to install a compiler, and not for long.
    assert runtime.count("USER root\n") == runtime.count("-rf /var/lib/apt/lists/*\nUSER 10001:10001\n") == 1
    assert "USER 0" not in runtime


class _Override(yaml.SafeLoader):
    """Compose's own tags say how two files become one; the value is what it is."""


_Override.add_constructor("!override", lambda loader, node: loader.construct_sequence(node))


def test_the_worker_on_a_gpu_takes_the_same_command_line() -> None:
    gpu = yaml.load((DEPLOY / "compose.gpu.yaml").read_text(), _Override)["services"]
    assert list(gpu) == ["worker"]
    target = gpu["worker"]["build"]["target"]
    program, *flags = entrypoint(target)
    assert program == "kvern-worker" and gpu["worker"]["image"] == f"kvern/{target}"
    command = COMPOSE["services"]["worker"]["command"]
    assert worker.build_parser().parse_args([*flags, *map(substitute, command)]).device == "cuda"
    (device,) = gpu["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
