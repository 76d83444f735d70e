"""How commands end: with a result, or with one line that says why there is none."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer


def fail(error: Exception) -> NoReturn:
    print(f"kvern: {error}", file=sys.stderr)
    raise typer.Exit(2)


def run_fast(coroutine: Any) -> Any:
    import uvloop

    return uvloop.run(coroutine)


def print_result(measuring: Any, render: Callable[[dict[str, Any]], str], as_json: bool) -> dict[str, Any]:
    """Measures, prints, and returns what was measured."""
    from kvern_gateway.cli.stack import UsageError
    from kvern_gateway.cli.supervisor import ChildFailed

    try:
        result = run_fast(measuring)
    except (ChildFailed, UsageError, ConnectionError, RuntimeError, TimeoutError) as error:
        fail(error)
    print(json.dumps(result) if as_json else render(result))
    return dict(result)
