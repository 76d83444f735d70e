"""What may be asked: every field is checked here, for HTTP and gRPC alike.

A surface hands over plain values under canonical (vLLM's) names and says how it spells them; what comes back is
resolved: all defaults filled, all ids within the vocabulary. Errors name the field, the value and the limit.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvern.errors import KvernError, invalid
from kvern.v1 import error_pb2, model_pb2, session_pb2
from kvern.v1.sampling_pb2 import SamplingParams
from kvern_gateway.limits import Limits

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_INT32 = (-(2**31), 2**31 - 1)
# vLLM's threshold: below it, dividing logits by the temperature only makes infinities.
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What validation needs to know of the model."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    # What one request may hold by default: the context, or the KV pool where that is smaller.
    default_len: int
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    # Of a model that gives embeddings instead of tokens.
    pooling: model_pb2.Pooling | None = None
    images: bool = False

    @classmethod
    def of(cls, welcome: session_pb2.Welcome, sampling_defaults: Mapping[str, float]) -> ModelFacts:
        model = welcome.model
        return cls(
            model.name,
            model.vocab_size,
            model.max_model_len,
            frozenset(model.eos_token_ids),
            min(model.max_model_len, welcome.kv_capacity_tokens or model.max_model_len),
            sampling_defaults,
            model.pooling if model.HasField("pooling") else None,
            model.images,
        )


def render(value: object) -> str:
    """A value as errors show it: in the words of JSON, which it came in, and short, whatever it is."""
    text = repr(value) if isinstance(value, str) else _in_json(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _in_json(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return f"a {type(value).__name__}"
    # A lone surrogate is no text that could be sent.
    return text.encode("utf-8", "backslashreplace").decode()


def unimplemented(name: str, message: str = "") -> KvernError:
    return KvernError(
        error_pb2.ERROR_CODE_UNIMPLEMENTED, message or f"{name} is not supported; leave it out", field=name
    )


class Fields:
    """Typed access to a request's values. Absent and null are the same.

    ``spell`` turns a canonical name into the surface's: "temperature" → "sampling.temperature".
    """

    def __init__(self, values: Mapping[str, Any], spell: Callable[[str], str] = str) -> None:
        self.values = values
        self.spell = spell

    def error(self, name: str, value: object, limit: str) -> KvernError:
        spelled = self.spell(name)
        shown = render(value)
        return invalid(spelled, f"{spelled} is {shown}; it must be {limit}", value=shown, limit=limit)

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def number(self, name: str, low: float, high: float, default: float, *, above: bool = False) -> float:
        """Within [low, high], or (low, high] with ``above``."""
        value = self.values.get(name)
        if value is None:
            return default
        limit = f"a number {'above' if above else 'from'} {low:g} {'up ' if above else ''}to {high:g}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, value, limit)
        if not low <= value <= high or (above and value == low):  # NaN is not within anything.
            raise self.error(name, value, limit)
        return float(value)

    def integer(self, name: str, low: int, high: int, default: int | None) -> Any:
        value = self.values.get(name)
        if value is None:
            return default
        limit = f"an integer from {low} to {high}"
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, value, limit)
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def string(self, name: str, max_chars: int, default: str = "") -> str:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > max_chars:
            raise self.error(name, value, f"a string of at most {max_chars} characters")
        return check_text(self.spell(name), value)

    def sequence(self, name: str, max_items: int) -> Sequence[Any]:
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            raise self.error(name, value, "a list")
        if len(value) > max_items:
            spelled = self.spell(name)
            limit = f"at most {max_items}"
            message = f"{spelled} has {len(value)} entries; {limit} are allowed"
            raise invalid(spelled, message, value=len(value), limit=limit)
        return value

    def token_ids(self, name: str, max_items: int, vocab_size: int) -> list[int]:
        return check_token_ids(self.spell(name), self.sequence(name, max_items), vocab_size)


def check_text(spelled: str, text: str) -> str:
    """Refuses lone surrogates, which JSON can spell and UTF-8 can't."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{spelled} holds a lone surrogate at character {error.start}; it must be valid Unicode"
        raise invalid(spelled, message, limit="valid Unicode") from None
    return text


def check_token_ids(spelled: str, ids: Sequence[Any], vocab_size: int) -> list[int]:
    for position, value in enumerate(ids):
        if type(value) is not int or not 0 <= value < vocab_size:
            limit = f"a token id from 0 to {vocab_size - 1}"
            name = f"{spelled}[{position}]"
            raise invalid(
                name, f"{name} is {render(value)}; it must be {limit}", value=render(value), limit=limit
            )
    return list(ids)


def check_request_id(spelled: str, request_id: object) -> str:
    if not isinstance(request_id, str) or _REQUEST_ID.fullmatch(request_id) is None:
        limit = "1 to 128 characters of A-Z a-z 0-9 . _ : -"
        message = f"{spelled} is {render(request_id)}; it must be {limit}"
        raise invalid(spelled, message, value=render(request_id), limit=limit)
    return request_id


def check_model(name: object, served: Sequence[str]) -> None:
    """Absent or empty means the only model."""
    if name is None or name == "":
        return
    if not isinstance(name, str):
        raise invalid(
            "model", f"model is {render(name)}; it must be a string", value=render(name), limit="a string"
        )
    if name not in served:
        known = ", ".join(served)
        message = f"model {render(name)} is not served here; served: {known}"
        raise KvernError(
            error_pb2.ERROR_CODE_MODEL_NOT_FOUND, message, field="model", value=render(name), limit=known
        )


def check_generates(model: ModelFacts) -> None:
    """Refuses generation where the model gives embeddings."""
    if model.pooling is not None:
        raise unimplemented(
            "model", f"model {model.name} gives embeddings and cannot generate; use /v1/embeddings or Embed"
        )


def check_prompt_length(spelled: str, length: int, model: ModelFacts) -> None:
    if length == 0:
        raise invalid(
            spelled, f"{spelled} is empty; it must give at least one token", value=0, limit="≥ 1 token"
        )
    if length >= model.max_model_len:
        raise context_exceeded(
            spelled, model, f"the prompt has {length} tokens and needs room for one more", length
        )


def check_prompt_chars(spelled: str, text: str, model: ModelFacts, limits: Limits) -> None:
    """Refuses what can't fit, before anything is spent on tokenizing it."""
    most = model.max_model_len * limits.max_chars_per_token
    if len(text) > most:
        what = f"the text has {len(text)} characters, and more than {most} are not even tokenized"
        raise context_exceeded(spelled, model, what, len(text))


def context_exceeded(spelled: str, model: ModelFacts, what: str, value: int) -> KvernError:
    limit = f"{model.max_model_len} tokens"
    message = f"the context of this model is {limit}; {what}. Shorten the prompt or ask for fewer tokens"
    return KvernError(
        error_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, message, field=spelled, value=value, limit=limit
    )


def stop_strings(fields: Fields, limits: Limits) -> list[str]:
    value = fields.get("stop")
    if isinstance(value, str):
        fields = Fields({"stop": [value]}, fields.spell)
    stops = fields.sequence("stop", limits.max_stop_strings)
    spelled = fields.spell("stop")
    for position, stop in enumerate(stops):
        if not isinstance(stop, str) or not 1 <= len(stop) <= limits.max_stop_chars:
            limit = f"a string of 1 to {limits.max_stop_chars} characters"
            name = f"{spelled}[{position}]"
            raise invalid(
                name, f"{name} is {render(stop)}; it must be {limit}", value=render(stop), limit=limit
            )
        check_text(spelled, stop)
    return list(stops)


def sampling_params(
    fields: Fields,
    model: ModelFacts,
    limits: Limits,
    num_prompt_tokens: int,
    *,
    max_tokens_name: str = "max_tokens",
    default_max_tokens: int | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    bad_token_ids: Sequence[int] = (),
) -> SamplingParams:
    """The resolved parameters: every optional field but the log-probabilities is set.

    ``default_max_tokens`` None means what the context leaves.
    """
    presets = model.sampling_defaults
    room = model.max_model_len - num_prompt_tokens
    max_tokens = _max_tokens(fields, model, num_prompt_tokens, max_tokens_name, default_max_tokens, room)
    min_tokens = fields.integer("min_tokens", 0, model.max_model_len, 0)
    if min_tokens > max_tokens:
        spelled = fields.spell("min_tokens")
        limit = f"max_tokens, {max_tokens}"
        message = f"{spelled} is {min_tokens}; it must be at most {limit}"
        raise invalid(spelled, message, value=min_tokens, limit=limit)
    temperature = fields.number("temperature", 0, 100, presets.get("temperature", 1.0))
    top_k = fields.integer("top_k", -1, 2**31 - 1, int(presets.get("top_k", 0)))
    stop_token_ids = fields.token_ids("stop_token_ids", limits.max_stop_token_ids, model.vocab_size)
    allowed, bad = _allowed_and_bad(fields, model, bad_token_ids)
    return SamplingParams(
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_p=fields.number("top_p", 0, 1, presets.get("top_p", 1.0), above=True),
        top_k=min(max(top_k, 0), model.vocab_size),
        min_p=fields.number("min_p", 0, 1, presets.get("min_p", 0.0)),
        repetition_penalty=fields.number(
            "repetition_penalty", 0, 100, presets.get("repetition_penalty", 1.0), above=True
        ),
        presence_penalty=fields.number("presence_penalty", -2, 2, 0.0),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, 0.0),
        seed=_seed(fields),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=fields.boolean("ignore_eos"),
        bad_token_ids=bad,
        allowed_token_ids=allowed,
        logit_bias=_logit_bias(fields, model, limits),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _max_tokens(
    fields: Fields, model: ModelFacts, num_prompt_tokens: int, name: str, default: int | None, room: int
) -> int:
    asked = fields.integer(name, 1, 2**31 - 1, None)
    if asked is None:
        # A pool too small for the prompt itself is the scheduler's to refuse.
        left = max(1, model.default_len - num_prompt_tokens)
        return left if default is None else min(default, left)
    if asked > room:
        what = f"the prompt has {num_prompt_tokens} tokens and {fields.spell(name)} asks for {asked} more"
        raise context_exceeded(fields.spell(name), model, what, num_prompt_tokens + asked)
    return int(asked)


def _seed(fields: Fields) -> int:
    seed = fields.integer("seed", -(2**63), 2**64 - 1, None)
    # −1 means "any" to vLLM; other negative seeds keep their bits.
    return secrets.randbits(64) if seed is None or seed == -1 else seed & (2**64 - 1)


def _allowed_and_bad(
    fields: Fields, model: ModelFacts, bad_token_ids: Sequence[int]
) -> tuple[list[int], list[int]]:
    allowed = fields.token_ids("allowed_token_ids", model.vocab_size, model.vocab_size)
    if not allowed and fields.get("allowed_token_ids") is not None:
        raise fields.error("allowed_token_ids", [], "a list of at least one token id")
    bad = [*bad_token_ids, *fields.token_ids("bad_token_ids", model.vocab_size, model.vocab_size)]
    banned = set(bad)
    if banned and (banned.issuperset(allowed) if allowed else len(banned) >= model.vocab_size):
        raise fields.error("bad_token_ids", f"{len(bad)} ids", "fewer, so that a token is left to sample")
    return allowed, bad


def _logit_bias(fields: Fields, model: ModelFacts, limits: Limits) -> dict[int, float]:
    value = fields.get("logit_bias")
    if value is None:
        return {}
    spelled = fields.spell("logit_bias")
    if not isinstance(value, Mapping):
        raise fields.error("logit_bias", value, "an object of token ids and numbers")
    if len(value) > limits.max_logit_bias:
        limit = f"at most {limits.max_logit_bias}"
        message = f"{spelled} has {len(value)} entries; {limit} are allowed"
        raise invalid(spelled, message, value=len(value), limit=limit)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        text = str(key)
        if not text.isascii() or not text.isdigit() or len(text) > 10 or int(text) >= model.vocab_size:
            limit = f"a token id from 0 to {model.vocab_size - 1}"
            message = f"a key of {spelled} is {render(key)}; it must be {limit}"
            raise invalid(spelled, message, value=render(key), limit=limit)
        entry = Fields({text: bias}, lambda name: f"{spelled}[{name}]")
        biases[int(text)] = entry.number(text, -100, 100, 0.0)
    return biases
