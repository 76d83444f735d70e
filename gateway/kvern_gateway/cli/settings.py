"""Where the flags of `kvern up` come from: the command line, else the environment, else a file, else a profile.

All of it ends up as click's own defaults (``default_map``), so that precedence and checks are click's.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvern.rpc.spellings import REPEATED, translate

ENVIRONMENT = "KVERN_UP_"

PROFILES: dict[str, dict[str, Any]] = {
    # Large steps: most tokens per second, and streams that wait for each other's prompts.
    "throughput": {"max_num_seqs": 256, "max_num_batched_tokens": 8192},
    # Small steps: a new prompt delays running streams little, and takes more steps itself.
    "latency": {"max_num_seqs": 32, "max_num_batched_tokens": 512, "long_prefill_token_threshold": 256},
    # Few sequences, each of any length the memory holds; a long prompt leaves half of each step to others.
    "long-context": {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "long_prefill_token_threshold": 1024,
        "max_model_len": "auto",
        "gpu_memory_utilization": 0.9,
    },
}


class SettingsError(ValueError):
    """A file, a profile or a variable that makes no sense; the message says which and why."""


def profile(name: str) -> dict[str, Any]:
    if name not in PROFILES:
        raise SettingsError(f"--profile {name}: use one of {', '.join(PROFILES)}")
    return PROFILES[name]


def read_file(
    path: str, known: Collection[str], switches: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Flags by Python name from a YAML file of ``flag: value`` lines, in any spelling; and notes on those spellings."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: {error.problem}" if mark else str(error).splitlines()[0]  # type: ignore[union-attr]
        raise SettingsError(f"--config {path} is not YAML: {where}") from error
    if not isinstance(values, dict):
        raise SettingsError(f"--config {path}: it must hold `flag: value` lines")
    settings: dict[str, Any] = {}
    notes: list[str] = []
    for key, value in values.items():
        words = [f"--{str(key).lstrip('-')}"]
        if words[0].replace("_", "-") in REPEATED:
            words += map(str, value if isinstance(value, list) else [value])
        elif isinstance(value, bool):
            words.append(str(value).lower())
        elif isinstance(value, str | int | float):
            words.append(str(value))
        else:
            raise SettingsError(
                f"--config {path}: {key} is {value!r}; it must be a number, text, true or false"
            )
        try:
            translation = translate(words, known, switches)
        except ValueError as error:
            raise SettingsError(f"--config {path}: {error}") from error
        notes += translation.notes
        settings.update(_as_settings(translation.argv))
    return settings, notes


def _as_settings(argv: Sequence[str]) -> dict[str, Any]:
    """["--max-model-len", "8k"] → {"max_model_len": "8k"}; ["--no-x"] → {"x": False}."""
    if not argv:
        return {}
    name = argv[0].removeprefix("--")
    if argv[0] in REPEATED:
        return {name.replace("-", "_"): [word for word in argv if word != argv[0]]}
    if len(argv) == 2:
        return {name.replace("-", "_"): argv[1]}
    return {name.removeprefix("no-").replace("-", "_"): not name.startswith("no-")}


def check_environment(environment: Mapping[str, str], names: Collection[str]) -> list[str]:
    """A note for each variable that looks like a setting and is none."""
    known = {f"{ENVIRONMENT}{name.upper()}" for name in names}
    notes = []
    for variable in sorted(environment):
        if variable.startswith(ENVIRONMENT) and variable not in known:
            near = difflib.get_close_matches(variable, known, 1)
            notes.append(f"{variable} is ignored" + (f"; did you mean {near[0]}?" if near else ""))
    return notes
