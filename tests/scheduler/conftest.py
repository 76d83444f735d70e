"""A cluster of fakes around a real scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from scheduler.scheduler_harness import Cluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Not started yet, so that a test can set flags."""
    cluster = Cluster(tmp_path)
    yield cluster
    await cluster.stop()
