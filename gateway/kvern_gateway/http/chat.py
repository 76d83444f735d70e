"""POST /v1/chat/completions: messages through the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvern.errors import invalid
from kvern_gateway.gateway import Gateway
from kvern_gateway.http.parse import Job, ParsedPrompt, build_job, read_fields
from kvern_gateway.http.wire import Scope
from kvern_gateway.media.images import Source, no_images, take_sources
from kvern_gateway.text.chat_template import RESERVED
from kvern_gateway.validation import Fields, check_text, render, unimplemented

_MAX_ROLE_CHARS = 64


async def parse_chat(gateway: Gateway, scope: Scope, body: bytes, values: dict[str, Any]) -> Job:
    fields = read_fields(gateway, values, chat=True)
    logprobs = _logprobs(gateway, fields)
    prompt = await chat_prompt(gateway, fields)
    return build_job(gateway, scope, body, fields, [prompt], chat=True, logprobs=logprobs)


async def chat_prompt(gateway: Gateway, fields: Fields) -> ParsedPrompt:
    """What a chat becomes, images and all. Raises KvernError naming the message at fault."""
    messages = parse_messages(gateway, fields)
    sources = take_sources(messages)
    if sources and fields.get("truncate_prompt_tokens") is not None:
        raise unimplemented("truncate_prompt_tokens", "truncate_prompt_tokens can't be used with images")
    text = await render_messages(gateway, fields, messages)
    add_special_tokens = fields.boolean("add_special_tokens", False)
    token_ids = await gateway.tokenize("messages", text, add_special_tokens)
    if not sources or gateway.images is None:
        return ParsedPrompt("messages", token_ids, text)
    media = await gateway.images.prepare(sources)
    return ParsedPrompt("messages", gateway.images.expand(token_ids, media), text, media)


async def render_messages(gateway: Gateway, fields: Fields, messages: list[dict[str, Any]]) -> str:
    """The prompt text of a chat, an image's token once for each."""
    continue_final = fields.boolean("continue_final_message")
    add_generation_prompt = fields.boolean("add_generation_prompt", not continue_final)
    if continue_final and add_generation_prompt:
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise invalid("continue_final_message", message, value=True, limit="add_generation_prompt false")
    kwargs = template_kwargs(fields)
    effort = fields.get("reasoning_effort")
    if effort is not None:
        kwargs.setdefault("reasoning_effort", fields.string("reasoning_effort", 32))
    return await gateway.renderer.render(
        messages if gateway.images is None else gateway.images.for_template(messages),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final,
        kwargs=kwargs,
    )


def template_kwargs(fields: Fields) -> dict[str, Any]:
    value = fields.get("chat_template_kwargs")
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise fields.error("chat_template_kwargs", value, "an object")
    for name in value:
        if name in RESERVED:
            spelled = f"{fields.spell('chat_template_kwargs')}.{name}"
            raise invalid(spelled, f"{spelled} can't be overridden", value=name, limit="other names")
    return dict(value)


def parse_messages(gateway: Gateway, fields: Fields) -> list[dict[str, Any]]:
    """Messages as chat templates expect them, their text parts joined."""
    spelled = fields.spell("messages")
    value = fields.sequence("messages", gateway.limits.max_messages)
    if not value:
        raise invalid(
            spelled, f"{spelled} is empty; it must hold at least one message", value=0, limit="≥ 1 message"
        )
    sees = gateway.images is not None
    return [_parse_message(f"{spelled}[{index}]", message, sees) for index, message in enumerate(value)]


def _parse_message(name: str, message: Any, sees: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise invalid(
            name,
            f"{name} is {render(message)}; it must be an object",
            value=render(message),
            limit="an object",
        )
    role = message.get("role")
    if not isinstance(role, str) or not 1 <= len(role) <= _MAX_ROLE_CHARS:
        limit = "system, user, assistant or another short string"
        raise invalid(
            f"{name}.role",
            f"{name}.role is {render(role)}; it must be {limit}",
            value=render(role),
            limit=limit,
        )
    for unbuilt in ("tool_calls", "function_call", "audio", "tool_call_id"):
        if message.get(unbuilt):
            raise unimplemented(f"{name}.{unbuilt}")
    parsed = {
        "role": check_text(f"{name}.role", role),
        "content": _content(f"{name}.content", message.get("content"), role, sees),
    }
    if isinstance(message.get("name"), str):
        parsed["name"] = check_text(f"{name}.name", message["name"])
    return parsed


def _content(name: str, content: Any, role: str, sees: bool) -> str | list[dict[str, Any]]:
    """One text, or its parts where some are images: {"type": "text", "text"} and {"type": "image", "source"}."""
    if isinstance(content, str):
        return check_text(name, content)
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        limit = "a string or a list of parts"
        raise invalid(
            name, f"{name} is {render(content)}; it must be {limit}", value=render(content), limit=limit
        )
    parts = [_part(f"{name}[{index}]", part, sees) for index, part in enumerate(content)]
    if any(part["type"] == "image" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _part(name: str, part: Any, sees: bool) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else "text"
    if kind in ("image_url", "input_image"):
        if not sees:
            raise no_images(name)
        return {"type": "image", "source": _source(f"{name}.image_url", part.get("image_url"))}
    text = part.get("text") if isinstance(part, Mapping) else part
    if kind not in ("text", "input_text", "refusal"):
        supported = "text and images are" if sees else "only text is"
        raise unimplemented(name, f"{name} is of type {render(kind)}; {supported} supported")
    if not isinstance(text, str):
        limit = "a text part"
        raise invalid(name, f"{name} must be {limit}", value=render(text), limit=limit)
    return {"type": "text", "text": check_text(f"{name}.text", text)}


def _source(name: str, value: Any) -> Source:
    if isinstance(value, Source):
        return value
    if isinstance(value, Mapping):
        name, value = f"{name}.url", value.get("url")
    if not isinstance(value, str) or not value:
        limit = "a data:, http(s): or file: URL"
        raise invalid(name, f"{name} must be {limit}", value=render(value), limit=limit)
    return Source(name, value)


def _logprobs(gateway: Gateway, fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, gateway.limits.max_logprobs, None)
    if not wanted:
        if top:
            raise invalid(
                "top_logprobs", "top_logprobs needs logprobs true", value=top, limit="logprobs true"
            )
        return None
    return int(top or 0)
