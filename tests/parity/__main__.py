"""`make parity`: every family at length, and the table PARITY.md. With names of families: their rows alone, printed."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import transformers
from parity.families import FAMILIES, Family
from parity.family_check import Parity, check
from parity.vision_check import check as check_vision
from parity.vision_families import VISION_FAMILIES, VisionFamily

from kvern_worker.models.registry import known

TABLE = Path(__file__).with_name("PARITY.md")
HEAD = f"""# Parity with transformers

Made by `make parity` with transformers {transformers.__version__}: for every family a tiny random checkpoint in float32,
and 20 random prompts of 9 to 60 tokens with 32 tokens of greedy output each. Every token is transformers' own (or ties with
it within 1e-4) when prompts are cut into chunks of at most 32 tokens and mixed with decodes, and the same tokens come alone,
all in one batch, after prefix hits and after preemption; the same bits of log-probabilities, too, where "bits" says so.

Of families that see images, one prompt of four has two images, two have one, prepared as the gateway does; every sequence
is preempted once, and tokens are compared, not bits.

* **log-probability**: the largest difference to transformers', over the whole vocabulary at every position of 3 prompts
* **gap**: by how much transformers' best logit exceeds the chosen token's at the worst position; 0: always its arg max

| family | architecture | code | tokens | log-probability | gap | bits | tokens from prefix hits | preemptions |
|---|---|---|---|---|---|---|---|---|
"""


def row(name: str, family: Family | VisionFamily, found: Parity) -> str:
    bits = "same" if isinstance(family, Family) else "–"
    return (
        f"| {name} | {family.architecture} | {'ours' if family.architecture in known() else 'transformers'} "
        f"| {found.tokens} | {found.logit_error:.1e} | {found.worst_gap:.1e} | {bits} "
        f"| {found.prefix_hits} | {found.preemptions} |"
    )


def measure(family: Family | VisionFamily, folder: Path) -> Parity:
    if isinstance(family, VisionFamily):
        return check_vision(family, folder, num_prompts=20, length=32)
    return check(family, folder, num_prompts=20, length=32)


def main() -> int:
    rows, failed = [], []
    families: dict[str, Family | VisionFamily] = {**FAMILIES, **VISION_FAMILIES}
    wanted = sys.argv[1:] or list(families)
    for name in wanted:
        family = families[name]
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows.append(row(name, family, measure(family, Path(folder))))
                print(rows[-1], flush=True)
            except AssertionError as error:
                failed.append(name)
                print(f"{name}: {error}", file=sys.stderr, flush=True)
    if not failed and len(wanted) == len(families):
        TABLE.write_text(HEAD + "\n".join(rows) + "\n")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
