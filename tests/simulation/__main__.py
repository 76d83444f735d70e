"""``python -m simulation`` (in tests/): runs seeds, and replays one with its trace.

python -m simulation --seeds 1000 [--first 0] [--jobs 2]
python -m simulation --seed 17
"""

from __future__ import annotations

import argparse
import sys
import time

from simulation.runs import run_seeds, summary
from simulation.scenario import run_seed


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


if __name__ == "__main__":
    main()
