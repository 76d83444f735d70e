"""Renders chat templates in a process of its own, so that a template can loop, grow or crash without harm.

Speaks length-prefixed JSON on stdin and stdout. The first message gives the templates and limits; each later one asks
for a rendering. SIGPROF with its default action ends the process when a rendering has taken too much CPU time, also
inside C code; a busy machine makes no template too slow.
"""

from __future__ import annotations

import datetime
import json
import signal
from typing import Any, NoReturn

from jinja2 import Environment, Template, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvern_gateway import child

MEMORY_BYTES = 768 * 2**20


class GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class RaisedByTemplate(Exception):
    """The template called raise_exception."""


def _raise_exception(message: str) -> NoReturn:
    raise RaisedByTemplate(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's, doesn't escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def create_environment() -> Environment:
    """Hugging Face's environment for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def render(template: Template, variables: dict[str, Any], max_chars: int) -> dict[str, str]:
    """{"text": …}, or {"error": what the caller should be told}."""
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.generate(variables):
            size += len(piece)
            if size > max_chars:
                return {
                    "error": f"the chat template's output is longer than the limit of {max_chars} characters"
                }
            pieces.append(piece)
    except RaisedByTemplate as error:
        return {"error": str(error)}
    except RecursionError:
        return {"error": "the chat template recurses too deeply"}
    except MemoryError:
        return {"error": "the chat template used too much memory"}
    except Exception as error:
        return {"error": f"the chat template failed: {type(error).__name__}: {str(error)[:300]}"}
    return {"text": "".join(pieces)}


def main() -> None:
    child.confine(MEMORY_BYTES)
    setup = json.loads(child.receive())
    environment = create_environment()
    compiled: dict[str, Template] = {}
    child.send(b"{}")
    while True:
        request = json.loads(child.receive())
        signal.setitimer(signal.ITIMER_PROF, setup["timeout_s"])
        name = request["template"]
        try:
            if name not in compiled:
                compiled[name] = environment.from_string(setup["templates"][name])
        except Exception as error:
            answer = {"error": f"the model's chat template can't be compiled: {error}"}
        else:
            answer = render(compiled[name], request["variables"], setup["max_chars"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        child.send(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
