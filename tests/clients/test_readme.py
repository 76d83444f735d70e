"""The README's client examples run as printed; only the ports are those of the test's server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.running import Running

ROOT = Path(__file__).parents[2]


def example(heading: str, language: str) -> str:
    """The first code block of that language under the heading."""
    readme = (ROOT / "README.md").read_text()
    section = readme.split(f"\n### {heading}\n", 1)[1].split("\n#", 1)[0]
    found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert found, f"no {language} block under {heading}"
    return found[1]


def adapt(code: str, served: Running) -> str:
    for printed, real in [("127.0.0.1:8000", served.http_port), ("127.0.0.1:50051", served.grpc_port)]:
        code = code.replace(printed, f"127.0.0.1:{real}")
    assert f":{served.http_port}" in code or f":{served.grpc_port}" in code
    return code


def run(argv: list[str], cwd: Path = ROOT, timeout_s: float = 60) -> str:
    answer = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=timeout_s)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def assert_colors(text: str) -> None:
    assert all(color in text for color in ("Red", "Blue", "Green")), text


def test_curl(served: Running) -> None:
    answer = json.loads(run(["bash", "-c", adapt(example("curl", "bash"), served)]))
    assert_colors(answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("heading", ["Python, OpenAI SDK", "Python, gRPC"])
def test_python(served: Running, heading: str) -> None:
    assert_colors(run([sys.executable, "-c", adapt(example(heading, "python"), served)]))


@pytest.mark.slow
def test_node(served: Running, tmp_path: Path) -> None:
    (tmp_path / "proto").symlink_to(ROOT / "proto")
    (tmp_path / "client.js").write_text(adapt(example("Node, gRPC", "javascript"), served))
    install = re.search(r"`(npm install [^`]*)`", (ROOT / "README.md").read_text())
    assert install
    run(install[1].split(), cwd=tmp_path, timeout_s=240)
    assert_colors(run(["node", "client.js"], cwd=tmp_path))


def test_the_measurements_are_commands(served: Running) -> None:
    readme = (ROOT / "README.md").read_text()
    line = next(line for line in readme.splitlines() if "kvern bench serve --max-concurrency" in line)
    words = [str(Path(sys.executable).parent / "kvern"), *line.split()[1:], "--port", str(served.http_port)]
    words[words.index("--num-prompts") + 1] = "4"
    words[words.index("--random-output-len") + 1] = "8"
    result = json.loads(run([*words, "--json"], timeout_s=120))
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (4, 0, 32)
