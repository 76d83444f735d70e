"""Kvern's tokens per second over each peer's, load by load: python ratios.py OURS.json PEER.json …

The ratio of the medians, then the least and the most that single runs could give.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

Rates = dict[tuple[int, int, int], list[float]]


def rates(rows: list[dict[str, Any]]) -> Rates:
    return {(row["batch"], row["input_len"], row["output_len"]): row["tokens_per_s_runs"] for row in rows}


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    return (
        statistics.median(ours) / statistics.median(theirs),
        min(ours) / max(theirs),
        max(ours) / min(theirs),
    )


def main(ours: Path, *peers: Path) -> None:
    our_rates = rates(json.loads(ours.read_text()))
    for peer in peers:
        for load, theirs in rates(json.loads(peer.read_text())).items():
            if load not in our_rates:
                continue
            median, least, most = ratio(our_rates[load], theirs)
            print(
                f"{peer.stem:16}{load[0]:4} x {load[1]:5} -> {load[2]:4}"
                f"{statistics.median(our_rates[load]):10.2f}{statistics.median(theirs):10.2f}"
                f"{median:8.2f}  ({least:.2f} to {most:.2f})"
            )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
