"""Messages to prompt text through the model's chat template, bounded in time, memory and output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvern.errors import KvernError, invalid
from kvern_gateway.limits import Limits
from kvern_gateway.processes import ProcessFailed, ProcessPool
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
_WORKER = "kvern_gateway.text.template_worker"
_MAX_PROCESSES = 2
# Wall time that a rendering may take, in limits of CPU time: machines are busy.
_PATIENCE = 10


class TemplateRenderer:
    """A small pool of rendering processes, started on demand and replaced when a template kills one."""

    def __init__(self, model: TextModel, limits: Limits) -> None:
        self._model = model
        self._limits = limits
        setup = {
            "templates": model.chat_templates,
            "timeout_s": limits.template_timeout_s,
            "max_chars": limits.max_template_chars,
        }
        patience = _PATIENCE * limits.template_timeout_s
        self._pool = ProcessPool(_WORKER, json.dumps(setup).encode(), _MAX_PROCESSES, patience)

    async def start(self) -> None:
        """Starts the first process ahead of the first request."""
        if self._model.chat_templates:
            await self._pool.start()

    async def close(self) -> None:
        await self._pool.close()

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
            text = _cut_after_final(text, _last_text(messages[-1]["content"]))
        return text

    async def _ask(self, request: bytes) -> dict[str, str]:
        try:
            answer: dict[str, str] = json.loads(await self._pool.ask(request))
        except ProcessFailed as error:
            raise self._too_slow() from error
        return answer

    def _too_slow(self) -> KvernError:
        limit = f"{self._limits.template_timeout_s:g} s"
        message = (
            f"rendering the chat template took longer than {limit}; it loops, or the messages are too many"
        )
        return invalid("messages", message, limit=limit)


def _last_text(content: Any) -> str:
    """Of a message's content, which may be in parts."""
    if not isinstance(content, list):
        return content or ""
    return next((part["text"] for part in reversed(content) if part["type"] == "text"), "")


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
