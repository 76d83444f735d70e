"""Prompts in, vectors out: what both surfaces share of embeddings."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvern.errors import KvernError, invalid
from kvern.v1 import error_pb2, model_pb2, sampling_pb2
from kvern_gateway.gateway import Gateway, Identity, Routing, admit
from kvern_gateway.generation import Choice, Generation
from kvern_gateway.validation import Fields, ModelFacts, context_exceeded, unimplemented

Vector = npt.NDArray[np.float32]


def pooling_of(model: ModelFacts) -> model_pb2.Pooling:
    """Raises UNIMPLEMENTED where the model generates."""
    if model.pooling is None:
        raise unimplemented(
            "model",
            f"model {model.name} generates and gives no embeddings; serve one that does, or this one with --runner pooling",
        )
    return model.pooling


def check_dimensions(fields: Fields, model: ModelFacts) -> int | None:
    """How many components are asked for; None: all. Raises KvernError where the model has no shorter vectors."""
    pooling = pooling_of(model)
    asked: int | None = fields.integer("dimensions", 1, pooling.size, None)
    if asked is None or asked == pooling.size:
        return None
    name = fields.spell("dimensions")
    if not pooling.truncatable:
        raise unimplemented(
            name,
            f"{name} is {asked}; model {model.name} was not trained for shorter vectors than its {pooling.size} "
            "components, leave it out",
        )
    if pooling.sizes and asked not in pooling.sizes:
        raise fields.error("dimensions", asked, f"one of {', '.join(map(str, pooling.sizes))}")
    return asked


def check_length(spelled: str, length: int, model: ModelFacts) -> None:
    if length == 0:
        raise invalid(
            spelled, f"{spelled} is empty; it must give at least one token", value=0, limit="≥ 1 token"
        )
    if length > model.max_model_len:
        raise context_exceeded(spelled, model, f"the input has {length} tokens", length)


async def embed(
    gateway: Gateway,
    inputs: Sequence[list[int]],
    identity: Identity,
    routing: Routing,
    dimensions: int | None,
) -> list[Vector]:
    """One vector for each of ``inputs``, computed together. Raises the error of one that fails; then none goes on."""
    pooling = pooling_of(gateway.facts())
    generations: list[Generation] = []
    try:
        for index, ids in enumerate(inputs):
            one = replace(identity, request_id=f"{identity.request_id}-{index}", body_digest=_digest(ids))
            generations.append(gateway.submit_embedding(ids, one, routing))
        await admit(generations)
        gateway.metrics.prompt_tokens += sum(map(len, inputs))
        for ids in inputs:
            gateway.metrics.request_prompt_tokens.observe(len(ids))
        raw = await _Vectors(generations).all
    finally:
        for generation in generations:
            generation.cancel()
    return [finish_vector(vector, pooling, dimensions) for vector in raw]


def finish_vector(packed: bytes, pooling: model_pb2.Pooling, dimensions: int | None) -> Vector:
    """The first ``dimensions`` components, of length 1 where the model's are."""
    vector = np.frombuffer(packed, "<f4")[:dimensions].astype(np.float32)
    if pooling.normalized:
        vector /= max(float(np.linalg.norm(vector)), 1e-12)
    return vector


def _digest(ids: list[int]) -> bytes:
    return hashlib.sha256(np.array(ids, "<i4").tobytes()).digest()


class _Vectors:
    """The sink of several requests: ``all`` has their vectors, in order, or the first error."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self.all: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        self._positions = {id(generation): at for at, generation in enumerate(generations)}
        self._vectors: list[bytes] = [b""] * len(generations)
        self._num_missing = len(generations)
        for generation in generations:
            generation.attach_sink(self)

    def flush(self, choice: Choice) -> None:
        finished = choice.finished
        if finished is None or self.all.done():
            return
        if finished.reason != sampling_pb2.FINISH_REASON_STOP:
            error = KvernError(error_pb2.ERROR_CODE_CANCELLED, "the request was cancelled")
            self.fail(KvernError.from_pb(finished.error) if finished.HasField("error") else error)
            return
        self._vectors[self._positions[id(choice.generation)]] = finished.embedding
        self._num_missing -= 1
        if not self._num_missing:
            self.all.set_result(self._vectors)

    def fail(self, error: KvernError) -> None:
        if not self.all.done():
            self.all.set_exception(error)
            self.all.exception()  # Retrieved: its client may be gone.
