"""One real model and one simulated worker, started once each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e.running import Running, run_kvern


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """SmolLM2 through all services and a durable store. Tests leave it serving."""
    with run_kvern(tmp_path_factory.mktemp("smollm")) as running:
        yield running


@pytest.fixture(scope="module")
def sim_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with run_kvern(tmp_path_factory.mktemp("sim"), "--device", "sim", "--sim-step-us", "10000") as running:
        yield running


@pytest.fixture
def sim(sim_stack: Running) -> Running:
    """A simulated worker at 10 ms a step, for tests that break things; serving again after the one before."""
    sim_stack.until_serving()
    return sim_stack
