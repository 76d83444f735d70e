"""Other spellings of flags: vLLM's short, old and informal ones become ours, with one line each that says so.

A service's own parser decides what a flag means; this only rewrites the words before it reads them. What a service does
not know is refused here, with the reason where there is one and the nearest name where there is not.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

RENAMED = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "--chunked-prefill": "--enable-chunked-prefill",
    "--chunked-prefill-token-size": "--long-prefill-token-threshold",
    "--context-parallel-size": "--decode-context-parallel-size",
    "--context-window-size": "--max-model-len",
    "--cuda-graph-sizes": "--cudagraph-capture-sizes",
    "--distributed-worker.device-count": "--data-parallel-size",
    "--gguf-model": "--model",
    "--image-processor": "--mm-processor-kwargs",
    "--max-image-size": "--mm-processor-kwargs",
    "--moe-expert-parallel-size": "--enable-expert-parallel",
    "--port": "--http-port",
    "--swap-space": "--kv-offloading-size",
}

IMPLIED = {
    "--enable-chunked-prefill": "prompts are always computed in chunks of at most --max-num-batched-tokens",
    "--disable-log-requests": "requests are logged only with --enable-log-requests",
    "--lora-extra-vocab-size": "adapters with a vocabulary of their own are refused",
}
"""Accepted without effect: why."""

UNBUILT = {
    "--all2all-backend": ("allgather_reducescatter", "other ways to dispatch to experts are"),
    "--cpu-offload-gb": ("0", "weight offload is"),
    "--dcp-comm-backend": ("", "context parallelism is"),
    "--decode-context-parallel-size": ("1", "context parallelism is"),
    "--enable-eplb": ("false", "expert load balancing is"),
    "--eplb-config": ("", "expert load balancing is"),
    "--kv-offloading-backend": ("native", "any KV offload but the native one is"),
    "--offload-backend": ("", "weight offload is"),
    "--offload-group-size": ("0", "weight offload is"),
    "--offload-num-in-group": ("", "weight offload is"),
    "--offload-prefetch-step": ("", "weight offload is"),
    "--pipeline-parallel-size": ("1", "pipeline parallelism is"),
    "--prefill-context-parallel-size": ("1", "context parallelism is"),
    "--reasoning-parser": ("", "reasoning parsers are"),
    "--speculative-config": ("", "speculative decoding is"),
    "--enable-auto-tool-choice": ("false", "tool calls are"),
    "--tool-call-parser": ("", "tool calls are"),
}
"""Known and not there yet: the value that asks for nothing, and what is missing."""

ELSEWHERE = {
    "--benchmark-length": "kvern bench serve --random-output-len",
    "--request-rate": "kvern bench serve --request-rate",
    "--data-parallel-size": "kvern up; without it, start the workers, and name each to kvern-scheduler with --worker",
    "--enable-expert-parallel": "kvern-worker",
    "--expert-placement-strategy": "kvern-worker",
    "--master-addr": "kvern-worker, one on each node",
    "--master-port": "kvern-worker, one on each node",
    "--nnodes": "kvern-worker, one on each node",
    "--node-rank": "kvern-worker, one on each node",
    "--tensor-parallel-size": "kvern-worker",
}
"""Flags of another command."""

REPEATED = {"--lora-modules"}
"""Take one value each here, and any number elsewhere."""

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


@dataclass
class Translation:
    """The words for the service's parser, and a line for each that was changed or dropped."""

    argv: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def translate(argv: Sequence[str], known: Collection[str], switches: Collection[str]) -> Translation:
    """``known``: the option strings of the service; ``switches``: those of them that take no value.

    Raises ValueError for an option that is neither known nor another spelling of one.
    """
    result = Translation()
    words = list(argv)
    while words:
        word = words.pop(0)
        if word.replace("_", "-") in REPEATED & set(known):
            word = word.replace("_", "-")
            while words and _is_entry(words[0]):
                result.argv += [word, words.pop(0)]
            if result.argv[-2:-1] != [word]:
                result.argv.append(word)  # without a value: the parser says so
            continue
        if word == "--":
            result.argv += [word, *words]
            break
        if not word.startswith("-") or word in known or _is_number(word):
            result.argv.append(word)
            if word in switches and words and words[0].lower() in (*_TRUE, *_FALSE):
                _switch(result, word, words.pop(0), known)
            continue
        spelled, equals, value = word.partition("=")
        given = [value] if equals else []
        name = _resolve(spelled, known, result)
        if not given and name not in known and words and not words[0].startswith("-"):
            given = [words.pop(0)]
        if name in known:
            result.argv.append(name)
            if name in switches:
                if not given and words and words[0].lower() in (*_TRUE, *_FALSE):
                    given = [words.pop(0)]
                if given:
                    _switch(result, name, given[0], known)
            elif given:
                result.argv[-1:] = [f"{name}={given[0]}"] if equals else [name, given[0]]
        elif name in IMPLIED:
            if given and given[0].lower() in _FALSE:
                raise ValueError(f"{name} {given[0]}: {IMPLIED[name]}; this cannot be turned off")
            result.notes.append(f"{name} has no effect: {IMPLIED[name]}")
        elif name in UNBUILT:
            neutral, what = UNBUILT[name]
            if not given or given[0].lower() != neutral:
                asked = name if name in (spelled, spelled.replace("_", "-")) else f"{spelled} (here {name})"
                raise ValueError(f"{' '.join([asked, *given])}: {what} not built yet; leave the flag out")
            result.notes.append(f"{name} {neutral} has no effect: it is how things are")
        elif name in ELSEWHERE:
            raise ValueError(f"{name} belongs to another command: {ELSEWHERE[name]}")
        else:
            near = difflib.get_close_matches(name, [*known, *IMPLIED, *UNBUILT], 1)
            raise ValueError(
                f"there is no {name}" + (f"; did you mean {near[0]}?" if near else "; see --help")
            )
    return result


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """``parser.parse_args`` that takes the other spellings too. Notes go to stderr; a refusal exits with 2."""
    actions = parser._actions
    known = {option for action in actions for option in action.option_strings}
    switches = {option for action in actions for option in action.option_strings if action.nargs == 0}
    try:
        translation = translate(sys.argv[1:] if argv is None else argv, known, switches)
    except ValueError as error:
        parser.error(str(error))
    for note in translation.notes:
        print(f"{parser.prog}: {note}", file=sys.stderr)
    return parser.parse_args(translation.argv)


def _resolve(name: str, known: Collection[str], result: Translation) -> str:
    """Dashes for underscores, then today's name."""
    dashed = name.replace("_", "-")
    new = dashed if dashed in known else RENAMED.get(dashed, dashed)
    if new not in (name, dashed):
        result.notes.append(f"{name} is called {new} here")
    return new


def _switch(result: Translation, name: str, value: str, known: Collection[str]) -> None:
    """``--flag true`` → ``--flag``; ``--flag false`` → ``--no-flag``."""
    if value.lower() in _FALSE:
        negative = f"--no-{name.removeprefix('--')}"
        if negative not in known:
            raise ValueError(f"{name} {value}: leave the flag out instead")
        result.argv[-1] = negative
    elif value.lower() not in _TRUE:
        raise ValueError(f"{name} {value}: it is true or false")


def _is_entry(word: str) -> bool:
    """name=value, or a JSON object."""
    return word.startswith("{") or ("=" in word and not word.startswith("-"))


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
