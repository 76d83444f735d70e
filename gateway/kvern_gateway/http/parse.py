"""HTTP bodies to jobs: what both generation routes have in common, and which fields are refused or ignored.

A field whose meaning Kvern knows and can't honour is refused by name. One that it has never heard of is ignored, as
vLLM does, with one log line per name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvern.errors import invalid
from kvern.v1 import media_pb2
from kvern.v1.sampling_pb2 import SamplingParams
from kvern_gateway.gateway import Gateway, Identity, Routing, mint_id
from kvern_gateway.http.fields import CHAT, COMMON, IGNORED, REFUSED
from kvern_gateway.http.resume import HEADER, EventIds, parse_last_event_id
from kvern_gateway.http.wire import Scope, body_digest, header
from kvern_gateway.keys import current
from kvern_gateway.output import TextOptions
from kvern_gateway.validation import (
    Fields,
    check_generates,
    check_prompt_length,
    check_request_id,
    render,
    sampling_params,
    unimplemented,
)

log = logging.getLogger(__name__)

# OpenAI's default for completions; a chat may use what the context leaves.
COMPLETION_MAX_TOKENS = 16
_logged_unknown: set[str] = set()
_MAX_LOGGED_UNKNOWN = 100


@dataclass(slots=True)
class Prompt:
    token_ids: list[int]
    params: SamplingParams
    # As given or rendered; None where the client sent ids.
    text: str | None = None
    media: Sequence[media_pb2.MediaItem] = ()


@dataclass(slots=True, eq=False)
class Job:
    """A checked request of either generation route."""

    chat: bool
    id: str
    created: int
    model: str
    prompts: list[Prompt]
    identity: Identity
    routing: Routing
    options: TextOptions
    stream: bool
    include_usage: bool
    continuous_usage: bool
    # How many alternatives to show; None: no log-probabilities.
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool
    # max_tokens 0 with echo: only the prompt is shown.
    echo_only: bool
    return_token_ids: bool
    tokens_as_ids: bool
    # Of a stream whose request was named by its client.
    event_ids: EventIds | None

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.routing.n


@dataclass(slots=True)
class ParsedPrompt:
    """Where in the body it stood, and what it became."""

    field: str
    token_ids: list[int]
    text: str | None
    media: Sequence[media_pb2.MediaItem] = ()


def log_unknown(names: Iterable[str]) -> None:
    """One line for each name that was never seen."""
    for name in names:
        if name not in _logged_unknown and len(_logged_unknown) < _MAX_LOGGED_UNKNOWN:
            _logged_unknown.add(name)
            log.warning("unknown request field ignored: %s", render(name))


def read_fields(gateway: Gateway, values: dict[str, Any], chat: bool) -> Fields:
    """Refuses what can't be honoured, whatever its value type."""
    gateway.adapter(values.get("model"), named=values.get("request_id") is not None)
    check_generates(gateway.facts())
    known = COMMON | (CHAT if chat else {"prompt"})
    for name, value in values.items():
        if name in known or name in IGNORED:
            continue
        if name in REFUSED:
            if value is not None and value is not False and value != [] and value != "":
                raise unimplemented(name)
        else:
            log_unknown([name])
    fields = Fields(values)
    best_of = fields.get("best_of")
    if best_of is not None and best_of != (1 if fields.get("n") is None else fields.get("n")):
        raise unimplemented("best_of", f"best_of {render(best_of)} is not supported; it must equal n")
    response_format = fields.get("response_format")
    if response_format is not None:
        kind = response_format.get("type") if isinstance(response_format, Mapping) else response_format
        if kind != "text":
            message = f"response_format of type {render(kind)} is not supported; only 'text' is"
            raise unimplemented("response_format", message)
    if chat:
        if fields.get("echo"):
            raise unimplemented("echo", "echo is for /v1/completions")
        if fields.get("tool_choice") not in (None, "none", "auto"):
            raise unimplemented("tool_choice")
        if fields.get("modalities") not in (None, ["text"]):
            raise unimplemented("modalities", "modalities other than ['text'] are not supported")
    return fields


def build_job(
    gateway: Gateway,
    scope: Scope,
    body: bytes,
    fields: Fields,
    prompts: Sequence[ParsedPrompt],
    *,
    chat: bool,
    logprobs: int | None,
) -> Job:
    """Checks everything that doesn't depend on how prompts are written."""
    limits, model = gateway.limits, gateway.facts()
    routing = gateway.routing(fields)
    if len(prompts) * routing.n > limits.max_choices:
        what = f"{len(prompts)} prompts times n {routing.n}"
        limit = f"at most {limits.max_choices} choices"
        raise invalid(
            "n",
            f"{what} are {len(prompts) * routing.n} choices; {limit} are allowed",
            value=routing.n,
            limit=limit,
        )
    stream = fields.boolean("stream")
    include_usage, continuous = _stream_options(fields, stream)
    echo = fields.boolean("echo")
    prompt_logprobs = fields.integer("prompt_logprobs", 0, limits.max_logprobs, None)
    if prompt_logprobs is not None and stream:
        raise invalid(
            "prompt_logprobs", "prompt_logprobs are not available with stream", limit="stream false"
        )
    asked_prompt_logprobs = (
        logprobs if echo and logprobs is not None and prompt_logprobs is None else prompt_logprobs
    )
    echo_only = echo and fields.get("max_tokens") == 0
    if echo_only:
        fields = Fields({**fields.values, "max_tokens": 1, "min_tokens": None}, fields.spell)
    bad_ids = gateway.bad_word_ids(fields)
    max_tokens_name = "max_tokens"
    if chat and fields.get("max_completion_tokens") is not None:
        max_tokens_name = "max_completion_tokens"
    checked: list[Prompt] = []
    for prompt in prompts:
        token_ids = _truncate(fields, prompt.token_ids, model.max_model_len)
        check_prompt_length(prompt.field, len(token_ids), model)
        params = sampling_params(
            fields,
            model,
            limits,
            len(token_ids),
            max_tokens_name=max_tokens_name,
            default_max_tokens=None if chat else COMPLETION_MAX_TOKENS,
            logprobs=logprobs,
            prompt_logprobs=asked_prompt_logprobs,
            bad_token_ids=bad_ids,
        )
        text = prompt.text if token_ids is prompt.token_ids else None
        checked.append(Prompt(token_ids, params, text, prompt.media))
    request_id = fields.get("request_id")
    named = request_id is not None
    event_ids = None
    last_event_id = header(scope, b"last-event-id")
    if stream and named:
        max_tokens = [prompt.params.max_tokens for prompt in checked for _ in range(routing.n)]
        event_ids = parse_last_event_id(last_event_id, max_tokens)
    elif last_event_id is not None:
        limit = "stream true and a request_id"
        message = f"{HEADER} goes on with a stream that its client named; the request has to have {limit}"
        raise invalid(HEADER, message, value=last_event_id[:60], limit=limit)
    identity = Identity(
        current().tenant.name,
        check_request_id("request_id", request_id) if named else mint_id("chatcmpl" if chat else "cmpl"),
        resumable=named,
        resumes=event_ids is not None and event_ids.resumes,
        body_digest=body_digest(scope["path"], body),
        traceparent=(header(scope, b"traceparent") or "")[:256],
    )
    return Job(
        chat=chat,
        id=identity.request_id,
        created=int(time.time()),
        model=str(fields.get("model") or gateway.names()[0]),
        prompts=checked,
        identity=identity,
        routing=routing,
        options=gateway.text_options(fields, checked[0].params),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=echo,
        echo_only=echo_only,
        return_token_ids=fields.boolean("return_token_ids"),
        tokens_as_ids=fields.boolean("return_tokens_as_token_ids"),
        event_ids=event_ids,
    )


def _stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    value = fields.get("stream_options")
    if value is None:
        return False, False
    if not stream:
        raise invalid(
            "stream_options", "stream_options is only allowed with stream true", limit="stream true"
        )
    if not isinstance(value, Mapping):
        raise fields.error("stream_options", value, "an object")
    options = Fields(value, lambda name: f"stream_options.{name}")
    include = options.boolean("include_usage")
    return include, include and options.boolean("continuous_usage_stats")


def _truncate(fields: Fields, token_ids: list[int], max_model_len: int) -> list[int]:
    """Keeps the last tokens; −1 means as many as the context holds."""
    keep = fields.integer("truncate_prompt_tokens", -1, max_model_len - 1, None)
    if keep is None:
        return token_ids
    if keep == 0:
        raise fields.error("truncate_prompt_tokens", 0, f"-1, or an integer from 1 to {max_model_len - 1}")
    if keep == -1:
        keep = max_model_len - 1
    return token_ids[-keep:] if len(token_ids) > keep else token_ids
