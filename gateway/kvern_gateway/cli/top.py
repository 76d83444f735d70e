"""`kvern top`: groups, queues, blocks and rates, live, from a gateway's status."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvern_gateway.cli.api import LOCAL, Api, ApiKey, BaseUrl
from kvern_gateway.cli.report import fail

Status = dict[str, Any]
BAR_WIDTH = 24


def top(
    base_url: BaseUrl = LOCAL,
    api_key: ApiKey = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Two looks, one print, and no more")] = False,
) -> None:
    """What the groups are doing now. Ctrl-C ends it."""
    from rich.console import Console
    from rich.live import Live

    api = Api(base_url, api_key)
    console = Console()
    try:
        before = look(api)
        time.sleep(interval)
        now = look(api)
        if once:
            console.print(view(before, now))
            return
        with Live(view(before, now), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                before, now = now, look(api)
                live.update(view(before, now), refresh=True)
    except KeyboardInterrupt:
        return
    except (ValueError, ConnectionError) as error:
        fail(error)


@dataclass(frozen=True)
class Look:
    """The status at a time, seconds by a clock of ours, and the newest requests."""

    at: float
    status: Status
    requests: list[dict[str, Any]]


def look(api: Api) -> Look:
    status = api.json("/v1/status")
    return Look(time.monotonic(), status, api.json("/v1/requests?limit=8")["data"])


def view(before: Look, now: Look) -> Any:
    """A renderable of rich."""
    from rich.console import Group

    return Group(_head(before, now), _groups(now.status), _requests(now))


def _head(before: Look, now: Look) -> Any:
    from rich.text import Text

    status, timings = now.status, now.status["timings"]
    new, old = status["gateway"], before.status["gateway"]
    seconds = max(now.at - before.at, 1e-9)
    # A gateway that was restarted counts from 0 again.
    tokens = max(0, new["generation_tokens"] - old["generation_tokens"]) / seconds
    prompt = max(0, new["prompt_tokens"] - old["prompt_tokens"]) / seconds
    lines = [
        f"cell {status['cell']}  epoch {status['epoch']}  step {status['step']}  store {status['store']}  "
        f"{status['num_gateways']} gateways",
        f"here: {new['open_requests']} open requests  {tokens:,.0f} output tokens/s  {prompt:,.0f} prompt tokens/s  "
        f"first token {_mean(old, new, 'time_to_first_token')}  between tokens {_mean(old, new, 'inter_token')}  "
        f"{new['refused']} refused",
        f"step {timings['step_us_p50'] / 1e3:,.1f} ms  plan {timings['plan_us_p50']:,.0f} µs  "
        f"fold {timings['fold_us_p50']:,.0f} µs  commit {timings['commit_us_p50']:,.0f} µs (medians)",
    ]
    return Text("\n".join(lines))


def _mean(old: Status, new: Status, name: str) -> str:
    count = new[name]["count"] - old[name]["count"]
    return f"{1e3 * (new[name]['seconds'] - old[name]['seconds']) / count:,.1f} ms" if count > 0 else "–"


def _groups(status: Status) -> Any:
    from rich.table import Table

    table = Table(expand=True)
    for title in (
        "group",
        "worker",
        "running",
        "waiting",
        "pending tokens",
        "blocks",
        "held",
        "cached",
        "free",
    ):
        table.add_column(title, justify="left" if title in ("group", "worker", "blocks") else "right")
    for group in status["groups"]:
        blocks, free, cached = (
            group[name] for name in ("num_blocks", "num_free_blocks", "num_cached_blocks")
        )
        held = blocks - free - cached
        table.add_row(
            group["group_id"] if group["ready"] else f"{group['group_id']} (away)",
            ", ".join(address.rpartition("/")[2] for address in group["addresses"]),
            *(f"{group[name]:,}" for name in ("num_running", "num_waiting", "pending_prompt_tokens")),
            _bar(held, cached, blocks),
            *(f"{number:,}" for number in (held, cached, free)),
        )
    return table


def _bar(held: int, cached: int, blocks: int) -> Any:
    from rich.text import Text

    scale = BAR_WIDTH / max(1, blocks)
    own = min(BAR_WIDTH, round(held * scale) or int(held > 0))
    known = min(BAR_WIDTH - own, round(cached * scale) or int(cached > 0))
    text = Text("█" * own, style="green")
    return text.append("█" * known, style="blue").append("░" * (BAR_WIDTH - own - known), style="dim")


def _requests(now: Look) -> Any:
    from rich.table import Table

    table = Table(expand=True)
    for title in ("request", "tenant", "prompt", "output", "first token", "total", "phase"):
        table.add_column(
            title, justify="left" if title in ("request", "tenant", "phase") else "right", no_wrap=True
        )
    for head in now.requests:
        first, ended = head["first_token_seconds"], head["ended"]
        table.add_row(
            head["request_id"],
            head["tenant"],
            f"{head['prompt_tokens']:,}",
            f"{head['output_tokens']:,}" if ended else "",
            f"{1e3 * first:,.0f} ms" if first else "",
            f"{ended - head['arrived']:,.2f} s" if ended else "",
            "ended" if ended else head["phase"].removeprefix("PHASE_KIND_").lower(),
        )
    return table
