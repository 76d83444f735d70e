"""How commands end: with a result, or with one line that says why there is none."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import typer


def fail(error: Exception) -> NoReturn:
    print(f"kvern: {error}", file=sys.stderr)
    raise typer.Exit(2)


def run_fast(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs it on uvloop. SIGINT and SIGTERM cancel it, so that it stops what it has started; the exit code says which."""
    import uvloop

    received: list[signal.Signals] = []
    try:
        return uvloop.run(_cancelled_by_signals(coroutine, received))
    except asyncio.CancelledError:
        raise SystemExit(128 + received[0]) from None


async def _cancelled_by_signals(coroutine: Coroutine[Any, Any, Any], received: list[signal.Signals]) -> Any:
    task = asyncio.current_task()
    assert task is not None

    def end(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        # A shell's background job is deaf to SIGINT, and stays so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, end, number)
    return await coroutine


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
