"""Routing over four groups in virtual time, beside rules that know less, and beside what one big cache would hit."""

from __future__ import annotations

from typing import Any

import pytest

from kvern_gateway.cli.bench_routing import measure


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, Any]]:
    return measure(2000, 4)


def test_prefixes_stay_where_they_are_and_no_group_is_flooded(measured: dict[str, dict[str, Any]]) -> None:
    rows = measured["prefix-heavy"]
    ours = rows["kvern"]
    assert rows["one big cache"]["hit_rate"] - ours["hit_rate"] < 0.02
    assert ours["imbalance"] < 1.5
    for rule in ("round robin", "least requests"):
        assert rows[rule]["p99_s"] > 2 * ours["p99_s"]
        assert rows[rule]["hit_rate"] < ours["hit_rate"] - 0.1


def test_prompts_of_very_different_lengths_load_groups_alike(measured: dict[str, dict[str, Any]]) -> None:
    rows = measured["skewed lengths"]
    ours = rows["kvern"]
    assert ours["imbalance"] < 1.5 < rows["round robin"]["imbalance"]
    assert rows["round robin"]["p99_s"] > 2 * ours["p99_s"]
    assert rows["least requests"]["p99_s"] > 1.2 * ours["p99_s"]
