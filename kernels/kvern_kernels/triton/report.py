"""`python -m kvern_kernels.triton.report`: compile every production kernel for every chip.

Prints a Markdown table (the one in README.md) or, with --json, a list of objects with the fields of
`aot.Compiled`. Exits 1 where a kernel spills or asks for more shared memory than the chip has.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from kvern_kernels.triton import aot
from kvern_kernels.triton.launch import CHIPS, interpreted

README = Path(__file__).with_name("README.md")
MARK = "<!-- table -->"


def table(compiled: list[aot.Compiled]) -> str:
    """One line a kernel and case; per chip: registers a thread / KiB of shared memory / warps."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for one in compiled:
        cell = f"{one.registers} / {one.shared / 1024:.0f} / {one.num_warps}"
        cell += f" **{one.spilled} B spilled**" if one.spilled else ""
        name = f"{one.module}.{one.kernel.strip('_')}"
        cells = rows.setdefault((name, one.label), {})
        cells[one.chip] = f"{cells[one.chip]}; {cell}" if one.chip in cells else cell
    lines = [f"| kernel | case | {' | '.join(CHIPS)} |", "|" + "---|" * (2 + len(CHIPS))]
    for (name, label), cells in rows.items():
        lines.append(f"| {name} | {label} | {' | '.join(cells.get(chip, '') for chip in CHIPS)} |")
    return "\n".join(lines)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=list(aot.MODULES), help="default: all")
    parser.add_argument("--chip", action="append", choices=list(CHIPS), help="default: all; may be repeated")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    args = parser.parse_args()
    if interpreted():
        parser.error("unset TRITON_INTERPRET: kernels that are interpreted can't be compiled")
    compiled = aot.compile_all(args.chip or list(CHIPS), tuple(args.modules))
    print(json.dumps([asdict(one) for one in compiled]) if args.json else table(compiled))
    if args.write:
        text = README.read_text().partition(MARK)[0]
        README.write_text(f"{text}{MARK}\n{table(compiled)}\n")
    bad = [one for one in compiled if not one.fits()]
    for one in bad:
        print(f"does not fit: {one}", file=sys.stderr)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
