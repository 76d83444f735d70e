"""`kvern explain`: why a request took as long as it did, from its gateway."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from kvern_gateway.cli.api import LOCAL, Api, ApiKey, BaseUrl
from kvern_gateway.cli.report import fail
from kvern_gateway.timeline.picture import bars
from kvern_gateway.timeline.words import Line, Story


def explain(
    request_id: Annotated[str, typer.Argument(help="The id in its answer [default: the newest]")] = "",
    base_url: BaseUrl = LOCAL,
    api_key: ApiKey = None,
    svg: Annotated[Path | None, typer.Option(help="Also draw it into this file")] = None,
) -> None:
    """Why was my request slow? What happened to it, step by step."""
    api = Api(base_url, api_key)
    try:
        request_id = request_id or newest(api)
        print(render(fetch(api, request_id)))
        if svg is not None:
            svg.write_bytes(api.content(f"/v1/requests/{quote(request_id)}/timeline.svg"))
    except (ValueError, ConnectionError, OSError) as error:
        fail(error)


def logging(
    requests: Annotated[
        bool | None, typer.Option(help="A record when one is admitted and when it ends")
    ] = None,
    steps: Annotated[bool | None, typer.Option(help="A record of each step")] = None,
    base_url: BaseUrl = LOCAL,
    api_key: ApiKey = None,
) -> None:
    """Switch the scheduler's records of requests and steps, and say what is on."""
    asked = {"requests": requests, "steps": steps}
    try:
        wanted = {name: value for name, value in asked.items() if value is not None}
        state = Api(base_url, api_key).post("/v1/logging", wanted, 10.0)
    except (ValueError, ConnectionError) as error:
        fail(error)
    print("  ".join(f"{name}: {'on' if on else 'off'}" for name, on in state.items()))


def newest(api: Api) -> str:
    heads = api.json("/v1/requests?limit=1")["data"]
    if not heads:
        raise ValueError("no request has come yet, or the scheduler keeps no timelines (--max-timelines 0)")
    return str(heads[0]["request_id"])


def fetch(api: Api, request_id: str) -> Story:
    body = api.json(f"/v1/requests/{quote(request_id)}/timeline")
    lines = [Line(**line) for line in body["lines"]]
    return Story(body["title"], lines, max((line.start + line.seconds for line in lines), default=0.0))


def render(story: Story) -> str:
    width = max(60, min(shutil.get_terminal_size().columns, 120))
    parts = [*textwrap.wrap(story.title, width), "", *bars(story, width - 30), ""]
    for line in story.lines:
        parts += textwrap.wrap(
            f"+{line.start:.3f} s {line.kind}: {line.text}", width, subsequent_indent=" " * 11
        )
    return "\n".join(parts)
