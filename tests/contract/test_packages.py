"""A wheel holds every package of the source roots."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_package_is_listed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    roots = listed["package-dir"]
    found = {
        ".".join((root, *file.parent.relative_to(ROOT / folder).parts))
        for root, folder in roots.items()
        for file in (ROOT / folder).rglob("__init__.py")
    }
    assert found == set(listed["packages"])
