"""Whether the compose stack serves and survives: kills each container under a stream, which must end as it would have.

    python deploy/compose_check.py [--http http://127.0.0.1:8000]

Needs a stack that runs (``docker compose -f deploy/compose.yaml up --wait``). Exit 1 where a stream broke or changed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

COMPOSE = ("docker", "compose", "-f", str(Path(__file__).parent / "compose.yaml"))
BODY = {"prompt": "The sea", "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--http", default="http://127.0.0.1:8000", help="the gateway")
    url = parser.parse_args().http
    expected = "".join(text for _, text in stream(url, "whole"))
    broken = 0
    for service in ("worker", "scheduler-0", "scheduler-1", "redis", "gateway"):
        said = check(url, service, expected)
        print(f"{service:12} {said or 'killed: the stream went on and said the same'}", flush=True)
        broken += said is not None
    sys.exit(broken > 0)


def check(url: str, service: str, expected: str) -> str | None:
    """Kills ``service`` while a stream runs. What went wrong, if anything."""
    request_id = f"check-{service}-{time.time_ns()}"
    parts: list[str] = []
    error: list[str] = []

    def read() -> None:
        try:
            parts.extend(text for _, text in stream(url, request_id))
        except (httpx.HTTPError, RuntimeError, TimeoutError) as reason:
            error.append(repr(reason))

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.5)
    if not thread.is_alive():
        return "the stream ended before the kill: nothing was tested"
    subprocess.run([*COMPOSE, "kill", "-s", "KILL", service], check=True, capture_output=True)
    # A kill by hand counts as a stop, after which no restart policy acts.
    subprocess.run([*COMPOSE, "start", service], check=True, capture_output=True)
    thread.join(120)
    if thread.is_alive():
        return "the stream did not end within 120 s"
    if error:
        return error[0]
    got = "".join(parts)
    return None if got == expected else f"the text changed after {len(got)} characters"


def stream(url: str, request_id: str) -> Iterator[tuple[str, str]]:
    """(event id, text) of each event. A broken connection is resumed where it broke, for a minute."""
    last, deadline = "", time.monotonic() + 60
    while True:
        headers = {"Last-Event-ID": last} if last else {}
        try:
            with httpx.stream(
                "POST",
                f"{url}/v1/completions",
                json={**BODY, "request_id": request_id},
                headers=headers,
                timeout=60,
            ) as answer:
                if answer.status_code != 200:
                    raise httpx.RemoteProtocolError(answer.read().decode())
                for line in answer.iter_lines():
                    if line.startswith("id: "):
                        last = line[4:]
                    elif line == "data: [DONE]":
                        return
                    elif line.startswith("data: "):
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise httpx.RemoteProtocolError(str(event["error"]))
                        yield last, "".join(choice["text"] for choice in event["choices"])
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


if __name__ == "__main__":
    main()
