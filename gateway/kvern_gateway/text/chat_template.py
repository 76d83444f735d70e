"""Messages to prompt text through the model's chat template, bounded in time, memory and output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kvern.errors import KvernError, invalid
from kvern_gateway.limits import Limits
from kvern_gateway.text.tokenizer import TextModel

# What chat_template_kwargs may not redefine.
RESERVED = frozenset(
    {
        "messages",
        "add_generation_prompt",
        "continue_final_message",
        "raise_exception",
        "strftime_now",
        "chat_template",
    }
)
_MAX_PROCESSES = 2
_START_TIMEOUT_S = 10.0
# Wall time that a rendering may take, in limits of CPU time: machines are busy.
_PATIENCE = 10


class TemplateRenderer:
    """A small pool of rendering processes, started on demand and replaced when a template kills one."""

    def __init__(self, model: TextModel, limits: Limits) -> None:
        self._model = model
        self._limits = limits
        self._idle: asyncio.Queue[_Process] = asyncio.Queue()
        self._slots = asyncio.Semaphore(_MAX_PROCESSES)
        setup = {
            "templates": model.chat_templates,
            "timeout_s": limits.template_timeout_s,
            "max_chars": limits.max_template_chars,
        }
        self._setup = json.dumps(setup).encode()

    async def start(self) -> None:
        """Starts the first process ahead of the first request."""
        if self._model.chat_templates:
            self._idle.put_nowait(await _Process.start(self._setup))

    async def close(self) -> None:
        while not self._idle.empty():
            await self._idle.get_nowait().close()

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text.

        Raises:
            KvernError: INVALID_ARGUMENT with the template's own message when it refuses the messages, and when it
                fails, loops or grows too large.
        """
        if "default" not in self._model.chat_templates:
            raise invalid("messages", "this model has no chat template; use /v1/completions with a prompt")
        variables = {
            **self._model.special_tokens,
            "tools": None,
            "documents": None,
            **(kwargs or {}),
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        request = json.dumps({"template": "default", "variables": variables}).encode()
        answer = await self._ask(request)
        if "error" in answer:
            raise invalid("messages", answer["error"])
        text: str = answer["text"]
        if continue_final_message:
            text = _cut_after_final(text, messages[-1]["content"] or "")
        return text

    async def _ask(self, request: bytes) -> dict[str, str]:
        async with self._slots:
            process = await self._process()
            try:
                async with asyncio.timeout(_PATIENCE * self._limits.template_timeout_s):
                    answer = await process.ask(request)
            except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
                await process.close()
                raise self._too_slow() from error
            except BaseException:  # Cancelled half-way: its answer must not reach the next request.
                await process.close()
                raise
            self._idle.put_nowait(process)
            return answer

    async def _process(self) -> _Process:
        while not self._idle.empty():
            process = self._idle.get_nowait()
            if process.alive:
                return process
        return await _Process.start(self._setup)

    def _too_slow(self) -> KvernError:
        limit = f"{self._limits.template_timeout_s:g} s"
        message = (
            f"rendering the chat template took longer than {limit}; it loops, or the messages are too many"
        )
        return invalid("messages", message, limit=limit)


def _cut_after_final(text: str, final: str) -> str:
    """The rendering up to the end of the last message's content, so that the model goes on with it."""
    stripped = final.strip()
    at = text.rfind(stripped)
    if at < 0:
        message = (
            "continue_final_message: the chat template changes the last message, so it can't be continued"
        )
        raise invalid("continue_final_message", message)
    ended = at + len(final.lstrip())
    return text[:ended] if text[at:ended] == final.lstrip() else text[: at + len(stripped)]


class _Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout

    @classmethod
    async def start(cls, setup: bytes) -> _Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvern_gateway.text.template_worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**20,
        )
        started = cls(process)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await started.ask(setup)
        except BaseException:
            await started.close()
            raise
        return started

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def _write(self, data: bytes) -> None:
        self._stdin.write(struct.pack("<I", len(data)) + data)

    async def ask(self, request: bytes) -> dict[str, str]:
        self._write(request)
        await self._stdin.drain()
        (length,) = struct.unpack("<I", await self._stdout.readexactly(4))
        answer: dict[str, str] = json.loads(await self._stdout.readexactly(length))
        return answer

    async def close(self) -> None:
        self._stdin.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
