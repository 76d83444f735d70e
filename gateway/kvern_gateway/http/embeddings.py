"""POST /v1/embeddings: texts or token ids, one or many."""

from __future__ import annotations

import base64
import time
from dataclasses import replace

from kvern.errors import invalid
from kvern_gateway.embedding import Vector, check_dimensions, check_length, embed, pooling_of
from kvern_gateway.gateway import Gateway, Identity, mint_id
from kvern_gateway.generation import unavailable
from kvern_gateway.http.parse import log_unknown
from kvern_gateway.http.protocol import Connection
from kvern_gateway.http.route import BoundRoute
from kvern_gateway.http.wire import Receive, Scope, Send, header, parse_object, read_body, send_json
from kvern_gateway.keys import current
from kvern_gateway.room import overloaded
from kvern_gateway.validation import Fields, check_token_ids, render, unimplemented

_KNOWN = frozenset(
    [
        "model",
        "input",
        "encoding_format",
        "dimensions",
        "user",
        "priority",
        "cache_salt",
        "add_special_tokens",
    ]
)
# Known, and not done: only null, false and empty values pass.
_REFUSED = frozenset(
    ["messages", "request_id", "truncate_prompt_tokens", "mm_processor_kwargs", "embed_dtype", "endianness"]
)


class EmbeddingsRoute(BoundRoute):
    """OpenAI's. One that is sent again is computed again: there is nothing to go on with."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send, connection: Connection) -> None:
        gateway = self._gateway
        body = await read_body(scope, receive, gateway.limits)
        if gateway.draining:
            raise unavailable("this gateway is shutting down; another one will answer", 100)
        if gateway.client.requests.room.full:
            raise overloaded()
        values = parse_object(body)
        gateway.adapter(values.get("model"))
        model = gateway.facts()
        pooling_of(model)
        for name, value in values.items():
            if name in _REFUSED and value not in (None, False, [], ""):
                raise unimplemented(name)
        log_unknown(set(values) - _KNOWN - _REFUSED)
        fields = Fields(values)
        encoding = fields.get("encoding_format")
        if encoding not in (None, "float", "base64"):
            raise fields.error("encoding_format", encoding, '"float" or "base64"')
        dimensions = check_dimensions(fields, model)
        plain = gateway.routing(fields)
        routing = replace(plain, n=1)
        inputs = await _parse_inputs(gateway, fields)
        answer_id = mint_id("embd")
        identity = Identity(
            current().tenant.name, answer_id, traceparent=(header(scope, b"traceparent") or "")[:256]
        )
        vectors = await embed(gateway, inputs, identity, routing, dimensions)
        num_tokens = sum(map(len, inputs))
        await send_json(
            scope,
            send,
            {
                "id": answer_id,
                "object": "list",
                "created": int(time.time()),
                "model": values.get("model") or gateway.names()[0],
                "data": [
                    {"object": "embedding", "index": index, "embedding": _encode(vector, encoding)}
                    for index, vector in enumerate(vectors)
                ],
                "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            },
        )


def _encode(vector: Vector, encoding: str | None) -> list[float] | str:
    """base64 is of float32, little endian."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


async def _parse_inputs(gateway: Gateway, fields: Fields) -> list[list[int]]:
    value = fields.get("input")
    kinds = "a string, a list of token ids, or a list of either"
    if value is None:
        raise invalid("input", "input is missing", limit=kinds)
    if isinstance(value, str):
        return [await _parse_one(gateway, fields, "input", value)]
    if not isinstance(value, list):
        raise fields.error("input", value, kinds)
    if not value:
        raise invalid("input", "input is empty; it must give at least one token", value=0, limit="≥ 1 token")
    if not isinstance(value[0], str | list):
        return [await _parse_one(gateway, fields, "input", value)]
    values = fields.sequence("input", gateway.limits.max_embedding_inputs)
    return [await _parse_one(gateway, fields, f"input[{at}]", item) for at, item in enumerate(values)]


async def _parse_one(gateway: Gateway, fields: Fields, name: str, value: object) -> list[int]:
    model = gateway.facts()
    if isinstance(value, str):
        if not value:
            check_length(name, 0, model)
        ids = await gateway.tokenize(name, value, fields.boolean("add_special_tokens", True))
    elif isinstance(value, list):
        ids = check_token_ids(name, value, model.vocab_size)
    else:
        message = f"{name} is {render(value)}; it must be a string or a list of token ids"
        raise invalid(name, message, value=render(value), limit="a string or a list of token ids")
    check_length(name, len(ids), model)
    return ids
