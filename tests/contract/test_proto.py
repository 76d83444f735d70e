"""The committed stubs are what the .proto files generate, and the files keep to buf's standard rules."""

import filecmp
import subprocess
import sys
from pathlib import Path

PROTO = Path(__file__).parents[2] / "proto"


def test_stubs_are_current(tmp_path):
    sources = [str(p.relative_to(PROTO)) for p in sorted(PROTO.glob("kvern/v1/*.proto"))]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={tmp_path}",
         f"--grpc_python_out={tmp_path}", *sources],
        cwd=PROTO, check=True,
    )  # fmt: skip
    made = sorted(tmp_path.glob("kvern/v1/*.py"))
    assert len(made) == 2 * len(sources)
    stale = [p.name for p in made if not filecmp.cmp(p, PROTO / p.relative_to(tmp_path), shallow=False)]
    assert not stale, f"run `make proto`: {stale}"


def test_buf_lint():
    buf = Path(sys.executable).parent / "buf"
    done = subprocess.run([buf, "lint"], cwd=PROTO.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
