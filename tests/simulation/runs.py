"""Many seeds, on one core or several, and what they add up to."""

from __future__ import annotations

import gc
import multiprocessing
from collections import Counter

from simulation.scenario import Report, run_seed


def run_seeds(seeds: range, jobs: int = 1) -> list[Report]:
    """Runs all of them, on ``jobs`` cores."""
    if jobs > 1:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            return list(pool.imap_unordered(_run, seeds, chunksize=16))
    return [_run(seed) for seed in seeds]


def _run(seed: int) -> Report:
    report = run_seed(seed)
    if seed % 16 == 0:
        gc.collect()
    return report


def summary(reports: list[Report], seconds: float) -> str:
    """Totals, in a few lines."""
    faults: Counter[str] = Counter()
    for report in reports:
        faults += report.faults
    events = sum(r.events for r in reports)
    lines = [
        f"{len(reports)} seeds in {seconds:.1f} s ({len(reports) / seconds:.1f}/s), "
        f"{sum(bool(r.violations) for r in reports)} with violations",
        f"{events} events ({events / len(reports):.0f} a seed), {sum(r.messages for r in reports)} messages, "
        f"{sum(r.seconds for r in reports):.0f} virtual seconds, "
        f"{max(r.pause for r in reports):.1f} at most without progress",
        f"{sum(r.requests for r in reports)} requests, {sum(r.tokens for r in reports)} tokens committed, "
        f"{sum(r.leaders for r in reports)} leaders, {sum(r.fenced for r in reports)} commits fenced",
        f"{faults.total()} faults: " + ", ".join(f"{count} × {name}" for name, count in faults.most_common()),
    ]
    return "\n".join(lines)
