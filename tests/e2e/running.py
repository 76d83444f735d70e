"""A `kvern up` in a process of its own, and what tests do to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

BIN = Path(sys.executable).parent
START_TIMEOUT_S = 90.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def until(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """The first true value of ``condition``. Fails the test after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)
    return value


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_healthy(http_port: int) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{http_port}/health", timeout=1).status_code == 200
    return False


@dataclass
class Running:
    """The supervisor's process, its ports and its output."""

    process: subprocess.Popen[bytes]
    http_port: int
    grpc_port: int
    data_dir: Path
    output_path: Path
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.base_url, timeout=60)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    def logs(self) -> str:
        """All logs, for the message of a failed assertion."""
        return "\n".join(
            f"== {path.name}\n{path.read_text()}" for path in (self.data_dir / "logs").glob("*.log")
        )

    def children(self) -> dict[str, int]:
        """Pids by name: "store", "worker", "scheduler", "gateway"."""
        found: dict[str, int] = {}
        for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            with contextlib.suppress(FileNotFoundError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
                for name in ("worker", "scheduler", "gateway"):
                    if f"kvern-{name}\0" in command:
                        found[name] = int(pid)
                if "valkey-server" in command or "redis-server" in command:
                    found["store"] = int(pid)
        return found

    def kill(self, name: str) -> int:
        """SIGKILL to that child; returns its pid."""
        pid = self.children()[name]
        os.kill(pid, signal.SIGKILL)
        return pid

    def until_restarted(self, name: str, old_pid: int, timeout_s: float = 30.0) -> None:
        until(lambda: self.children().get(name) not in (None, old_pid), f"{name} restarted", timeout_s)

    def until_healthy(self, timeout_s: float = START_TIMEOUT_S) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"kvern up ended:\n{self.output}\n{self.logs()}"
            return is_healthy(self.http_port)

        until(ready, f"/health is 200; output:\n{self.output}", timeout_s)

    def until_serving(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until a request is answered. Meanwhile it may only be refused as unavailable."""

        def answered() -> bool:
            try:
                answer = self.client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1})
            except httpx.TransportError:
                return False
            assert answer.status_code in (200, 503), answer.text
            return answer.status_code == 200

        until(answered, "a request is answered", timeout_s)

    def complete(self, prompt: str | Sequence[int], **body: Any) -> dict[str, Any]:
        """The answer of /v1/completions, greedy unless told otherwise. Fails the test on an error."""
        answer = self.client.post("/v1/completions", json={"prompt": prompt, "temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        parsed: dict[str, Any] = answer.json()
        return parsed

    def stream(self, prompt: str | Sequence[int], **body: Any) -> Stream:
        return Stream(self.base_url, {"prompt": prompt, "temperature": 0, "stream": True, **body})

    def stop(self, number: signal.Signals = signal.SIGINT, timeout_s: float = 30.0) -> int:
        """Sends the signal and returns the exit code."""
        self.client.close()
        self.process.send_signal(number)
        return self.process.wait(timeout_s)


class Stream:
    """A streamed completion, read by a thread of its own so that tests can do things meanwhile."""

    PATH = "/v1/completions"

    def __init__(self, base_url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self.text = ""
        self.num_events = 0
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.last_event_id = ""
        self.longest_gap_s = 0.0
        self._request = (base_url, body, headers)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def result(self, timeout_s: float = 90.0) -> str:
        """All the text, at the end. Fails the test when the stream broke."""
        self.wait(timeout_s)
        assert self.error is None, self.error
        assert self.finish_reason is not None, "the stream ended without a finish reason"
        return self.text

    def wait(self, timeout_s: float = 90.0) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), (
            f"the stream did not end within {timeout_s:g} s; so far: {self.num_events}"
        )

    def until_events(self, count: int, timeout_s: float = 60.0) -> None:
        until(lambda: self.num_events >= count or not self._thread.is_alive(), f"{count} events", timeout_s)
        assert self.error is None, self.error

    def _read(self) -> None:
        base_url, body, headers = self._request
        try:
            with httpx.stream(
                "POST", f"{base_url}{self.PATH}", json=body, headers=headers, timeout=90
            ) as answer:
                if answer.status_code != 200:
                    self.error = f"HTTP {answer.status_code}: {answer.read().decode()}"
                    return
                last, last_event_id = time.monotonic(), ""
                for line in answer.iter_lines():
                    if line.startswith("id: "):
                        last_event_id = line[4:]
                    if not line.startswith("data: {"):
                        continue
                    now = time.monotonic()
                    self.longest_gap_s, last = max(self.longest_gap_s, now - last), now
                    self._take(json.loads(line[6:]))
                    self.last_event_id = last_event_id
        except httpx.HTTPError as error:
            self.error = repr(error)

    @staticmethod
    def _text(choice: dict[str, Any]) -> str:
        text: str = choice["text"]
        return text

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = str(event["error"])
        for choice in event.get("choices", []):
            self.text += self._text(choice)
            self.num_events += 1
            self.finish_reason = choice["finish_reason"] or self.finish_reason


@contextlib.contextmanager
def run_kvern(directory: Path, *flags: str, wait: bool = True) -> Iterator[Running]:
    """`kvern up` on free ports with its data under ``directory``; stopped, or killed, at the end."""
    http_port, grpc_port = free_port(), free_port()
    directory.mkdir(parents=True, exist_ok=True)
    output_path = directory / "up.log"
    argv = [
        str(BIN / "kvern"),
        "up",
        *(
            "--http-port",
            str(http_port),
            "--grpc-port",
            str(grpc_port),
            "--data-dir",
            str(directory / "data"),
        ),
        *flags,
    ]
    with output_path.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output)
    running = Running(process, http_port, grpc_port, directory / "data", output_path)
    try:
        if wait:
            running.until_healthy()
        yield running
    finally:
        running.client.close()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def run_gateway(running: Running) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """One more gateway on the same scheduler: its process and its base URL."""
    http_port, grpc_port = free_port(), free_port()
    command = (
        Path(f"/proc/{running.children()['gateway']}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
    )
    start = next(index for index, word in enumerate(command) if word.endswith("kvern-gateway"))
    argv = command[start:]
    argv[argv.index("--http-port") + 1] = str(http_port)
    argv[argv.index("--grpc-port") + 1] = str(grpc_port)
    with (running.data_dir / "logs" / "gateway-2.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        until(lambda: is_healthy(http_port), "the second gateway is healthy")
        yield process, f"http://127.0.0.1:{http_port}"
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(20)
