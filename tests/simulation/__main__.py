"""``python -m simulation`` (in tests/): runs seeds, and replays one with its trace.

python -m simulation --seeds 1000 [--first 0] [--jobs 2]
python -m simulation --seed 17
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import time
from collections import Counter

from simulation.scenario import Report, run_seed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one, with its trace")
    parser.add_argument("--only", action="append", default=[], help="kinds of faults, as the seed's")
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    if args.seed is not None:
        report = run_seed(args.seed, tracing=True, only=args.only)
        print("\n".join(report.trace))
        print(report.violations or "no violation")
        sys.exit(bool(report.violations))
    started = time.perf_counter()
    reports = run_seeds(range(args.first, args.first + args.seeds), args.jobs)
    seconds = time.perf_counter() - started
    for report in reports:
        for violation in report.violations[:1]:
            print(f"seed {report.seed}: {violation}")
    print(summary(reports, seconds))
    sys.exit(any(report.violations for report in reports))


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
        f"{sum(r.seconds for r in reports):.0f} virtual seconds",
        f"{sum(r.requests for r in reports)} requests, {sum(r.tokens for r in reports)} tokens committed, "
        f"{sum(r.leaders for r in reports)} leaders, {sum(r.fenced for r in reports)} commits fenced",
        f"{faults.total()} faults: " + ", ".join(f"{count} × {name}" for name, count in faults.most_common()),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
