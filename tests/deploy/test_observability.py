"""Dashboards and alerts against a real Prometheus that scrapes a live stack."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx
import pytest
from e2e.running import Running, free_port, run_kvern, until

FOLDER = Path(__file__).parents[2] / "deploy" / "observability"


def dashboards_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dashboards", FOLDER / "dashboards.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def promtool(*arguments: str) -> None:
    assert shutil.which("promtool"), "install Debian's package prometheus"
    done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_and_scrape_configuration_are_valid() -> None:
    promtool("check", "config", "--syntax-only", "prometheus.yaml")
    promtool("check", "rules", "alerts.yaml")


def test_each_alert_fires_when_it_should() -> None:
    promtool("test", "rules", "alerts_test.yaml")
    alerts = re.findall(r"- alert: (\w+)", (FOLDER / "alerts.yaml").read_text())
    fired = re.findall(r"alertname: (\w+)\n\s+exp_alerts", (FOLDER / "alerts_test.yaml").read_text())
    assert sorted(set(fired)) == sorted(alerts)


def test_the_dashboards_are_what_their_panels_say() -> None:
    files = dashboards_module().files()
    assert {path: path.read_text() for path in FOLDER.glob("dashboards/*.json")} == files, (
        "run: python deploy/observability/dashboards.py"
    )


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, int]]:
    """A simulated worker with a cache so small that it preempts, and the port of the scheduler's metrics."""
    port = free_port()
    flags = (
        "--device",
        "sim",
        "--sim-step-us",
        "2000",
        "--sim-num-blocks",
        "24",
        "--metrics-port",
        str(port),
    )
    with run_kvern(tmp_path_factory.mktemp("observed"), *flags) as running:
        yield running, port


@pytest.fixture(scope="module")
def prometheus(
    stack: tuple[Running, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """Scrapes the stack four times a second."""
    running, metrics_port = stack
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    targets = {"kvern-gateway": running.http_port, "kvern-scheduler": metrics_port}
    config = {
        "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms"},
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
            for job, target in targets.items()
        ],
    }
    (folder / "prometheus.yaml").write_text(json.dumps(config))
    argv = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    with subprocess.Popen(argv, stdout=sys.stderr) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=30) as client:
                yield client
        finally:
            process.terminate()


def test_every_panel_shows_data(stack: tuple[Running, int], prometheus: httpx.Client) -> None:
    running, _ = stack
    queries = {
        target["expr"].replace("$model_name", ".*").replace("$__rate_interval", "1m")
        for path in FOLDER.glob("dashboards/*.json")
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    }
    assert len(queries) > 30

    def ask() -> None:
        """Streams that fill the cache, answers with shared beginnings, and a refusal at each door."""
        streams = [running.stream(list(range(20 + n, 60 + n)), max_tokens=100) for n in range(4)]
        for _ in range(2):
            running.complete(list(range(100, 148)), max_tokens=8)
        for body in ({"prompt": ""}, {"prompt": [1] * 390, "max_tokens": 1}):
            assert running.client.post("/v1/completions", json=body).status_code >= 400
        for stream in streams:
            stream.wait()

    def empty() -> list[str]:
        answers = {
            query: prometheus.get("/query", params={"query": query}).json()["data"]["result"]
            for query in queries
        }
        return [
            query
            for query, rows in answers.items()
            if not any(row["value"][1] not in ("NaN", "+Inf") for row in rows)
        ]

    def reachable() -> bool:
        try:
            answer = prometheus.get("/query", params={"query": "up"})
        except httpx.TransportError:
            return False
        return answer.status_code == 200 and answer.json()["data"]["result"] != []  # 503 while it starts

    until(reachable, "prometheus answers")
    deadline = time.monotonic() + 60
    ask()
    while missing := empty():
        assert time.monotonic() < deadline, f"no data for: {missing}"
        ask()
