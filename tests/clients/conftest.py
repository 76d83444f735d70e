"""One server for the clients of all languages, as `make up` starts it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e.running import Running, run_kvern


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with run_kvern(tmp_path_factory.mktemp("clients")) as running:
        yield running
