"""The gateway's web page in a real browser, in front of a real model."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.running import BIN, Running
from playwright.sync_api import Browser, Page, expect, sync_playwright


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert chromium, "install Debian's chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.set_default_timeout(30_000)
    yield page
    page.close()


def test_chat_block_map_timeline_and_plots(smollm: Running, page: Page, tmp_path: Path) -> None:
    troubles: list[str] = []
    hosts: set[str] = set()
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    page.goto(smollm.base_url)
    expect(page.locator("#model")).to_have_text("SmolLM2-135M-Instruct")
    page.fill("#temperature", "0")
    page.fill("#max-tokens", "40")
    page.fill("#prompt", "Name three colors.")
    page.press("#prompt", "Enter")
    answer = page.locator(".message.assistant")
    expect(answer).to_contain_text("1. Red\n2. Blue\n3. Green")
    # The timeline of this very request, in bars and words.
    expect(page.locator("#timeline p")).to_contain_text("chatcmpl-")
    assert page.locator("#timeline rect").evaluate_all("all => all.map(r => r.className.baseVal)") == [
        *("queue", "prefill", "decode")
    ]
    expect(page.locator("#timeline li").nth(2)).to_contain_text("steps of")
    expect(page.locator("#requests tr").first).to_contain_text("chatcmpl-")
    # A question while another one runs: its blocks are on the map.
    page.fill("#max-tokens", "600")
    page.fill("#prompt", "Tell a long story about the sea.")
    page.press("#prompt", "Enter")
    canvas = page.locator("#blocks canvas")
    expect(canvas).not_to_have_attribute("data-held", "0")
    owned = (
        "c => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data].filter((v, i) => i % 4 < 3)"
    )
    colours = canvas.evaluate(f"c => new Set(({owned})(c).join().match(/\\d+,\\d+,\\d+/g)).size")
    assert colours >= 3
    expect(page.locator("#plots figure")).to_have_count(6)
    expect(page.locator("#plots figcaption b").first).not_to_have_text("0")
    page.screenshot(path=tmp_path / "ui.png")
    page.click("#stop")
    expect(page.locator("#send")).to_be_visible()
    expect(canvas).to_have_attribute("data-held", "0")
    assert (troubles, hosts) == ([], {smollm.base_url.removeprefix("http://")})


def test_the_policy_keeps_other_hosts_and_inline_code_out(smollm: Running, page: Page) -> None:
    answer = page.goto(smollm.base_url + "/ui")
    assert answer is not None
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'window.ran = 1'}))"
    )
    assert page.evaluate("window.ran") is None
    assert smollm.client.get("/ui/../app.py").status_code in (400, 404)


def test_top_and_explain_say_what_the_status_says(smollm: Running) -> None:
    from rich.console import Console

    from kvern_gateway.cli.api import Api
    from kvern_gateway.cli.top import look, view

    api = Api(smollm.base_url)
    before = look(api)
    answer = smollm.complete("Once upon a time", max_tokens=24, ignore_eos=True)
    now = look(api)
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(view(before, now))
    text = console.export_text()
    (group,) = now.status["groups"]
    assert re.search(rf"│ +{group['num_free_blocks']:,} │", text)
    tokens = 24 / (now.at - before.at)
    assert f"{tokens:,.0f} output tokens/s" in text
    assert re.search(rf"{answer['id']} .* 24 │ .* ended", text)
    command = [str(BIN / "kvern"), "explain", answer["id"], "--base-url", smollm.base_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert "4 prompt tokens" in done.stdout and "23 steps of" in done.stdout, done.stderr
    once = subprocess.run(
        [*(str(BIN / "kvern"), "top", "--once", "--interval", "0.1"), "--base-url", smollm.base_url],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert "cell default" in once.stdout, once.stderr
    unknown = subprocess.run([*command[:2], "no-such", *command[3:]], capture_output=True, text=True)
    assert (unknown.returncode, "--max-timelines" in unknown.stderr) == (2, True)


def test_profile_times_phases_and_kernels_of_a_running_stack(smollm: Running, tmp_path: Path) -> None:
    stream = smollm.stream("Once upon a time", max_tokens=400, ignore_eos=True)
    stream.until_events(2)
    path = tmp_path / "trace.json"
    command = [str(BIN / "kvern"), "profile", "--seconds", "1", "--output", str(path)]
    done = subprocess.run(
        [*command, "--base-url", smollm.base_url], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    stream.wait()
    found = re.search(r"(\d+) steps in", done.stdout)
    assert found and (steps := int(found[1])) >= 2
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert sum(event["name"].startswith("step ") for event in spans) == steps
    forward = {e["ts"]: e["dur"] for e in spans if e["name"] == "forward" and e["tid"] == 2}
    kernels = [event for event in spans if event["tid"] == 3]
    own = [line.split() for line in done.stdout.split("kernel ")[1].splitlines()[1:] if line.strip()]
    seconds = sum(float(words[3]) for words in own if words[0] == "0")
    assert len(forward) == steps and kernels
    # Kernels are most of what the worker calls the forward pass and sampling, and no more than the time that passed.
    assert 0.3 * sum(forward.values()) / 1e6 < seconds < 1.2
    assert all(event["name"] in done.stdout for event in kernels)
