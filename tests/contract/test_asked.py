"""The table of what is asked for names tests that exist, and says no where there is none."""

from __future__ import annotations

import asked


def test_every_row_names_tests_that_exist_or_says_what_is_missing() -> None:
    for rows in asked.ROWS.values():
        for row in rows:
            assert row.tests or row.missing, row.asked
            for test in row.tests:
                assert (asked.ROOT / "tests" / test.partition("::")[0]).exists(), test


def test_the_table_has_every_row() -> None:
    table = asked.TABLE.read_text()
    for section, rows in asked.ROWS.items():
        assert f"## {section}\n" in table
        for row in rows:
            assert f"| {row.asked} | {row.here} | {row.state}" in table, "run: make asked"
