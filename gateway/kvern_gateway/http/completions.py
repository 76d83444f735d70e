"""POST /v1/completions: prompts as text or token ids, one or many."""

from __future__ import annotations

from typing import Any

from kvern.errors import invalid
from kvern_gateway.gateway import Gateway
from kvern_gateway.http.parse import Job, ParsedPrompt, build_job, read_fields
from kvern_gateway.http.wire import Scope
from kvern_gateway.validation import Fields, check_token_ids, render


async def parse_completion(gateway: Gateway, scope: Scope, body: bytes, values: dict[str, Any]) -> Job:
    fields = read_fields(gateway, values, chat=False)
    # OpenAI's older clients send logprobs as a count; false means none.
    if fields.get("logprobs") is False:
        fields = Fields({**fields.values, "logprobs": None})
    logprobs = fields.integer("logprobs", 0, gateway.limits.max_logprobs, None)
    prompts = await _parse_prompts(gateway, fields)
    return build_job(gateway, scope, body, fields, prompts, chat=False, logprobs=logprobs)


async def _parse_prompts(gateway: Gateway, fields: Fields) -> list[ParsedPrompt]:
    value = fields.get("prompt")
    if value is None:
        raise invalid("prompt", "prompt is missing", limit="a string, token ids, or a list of either")
    if isinstance(value, str):
        return [await _parse_one(gateway, fields, "prompt", value)]
    if not isinstance(value, list):
        raise fields.error("prompt", value, "a string, a list of token ids, or a list of either")
    if not value:
        raise invalid(
            "prompt", "prompt is empty; it must give at least one token", value=0, limit="≥ 1 token"
        )
    if not isinstance(value[0], str | list):
        return [await _parse_one(gateway, fields, "prompt", value)]
    most = gateway.limits.max_prompts
    if len(value) > most:
        message = f"prompt has {len(value)} prompts; at most {most} are allowed"
        raise invalid("prompt", message, value=len(value), limit=most)
    return [await _parse_one(gateway, fields, f"prompt[{i}]", item) for i, item in enumerate(value)]


async def _parse_one(gateway: Gateway, fields: Fields, name: str, value: object) -> ParsedPrompt:
    if isinstance(value, str):
        add_special_tokens = fields.boolean("add_special_tokens", True)
        return ParsedPrompt(name, await gateway.tokenize(name, value, add_special_tokens), value)
    if not isinstance(value, list):
        message = f"{name} is {render(value)}; it must be a string or a list of token ids"
        raise invalid(name, message, value=render(value), limit="a string or a list of token ids")
    return ParsedPrompt(name, check_token_ids(name, value, gateway.facts().vocab_size), None)
