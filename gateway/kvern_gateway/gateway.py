"""What both surfaces share: the model's text side, the session, and turning a request into a submit."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc.aio

from kvern.block_hash import adapter_keys, hash_prompt, join_hashes
from kvern.errors import KvernError, invalid
from kvern.media import keys_of
from kvern.rpc.errors import error_from_rpc
from kvern.rpc.packing import pack_i32
from kvern.rpc.tracing import Tracing
from kvern.v1 import adapter_pb2, generation_pb2, media_pb2, session_pb2
from kvern.v1.sampling_pb2 import SamplingParams
from kvern_gateway.generation import Generation, unavailable
from kvern_gateway.keys import Keys, current
from kvern_gateway.limits import Limits
from kvern_gateway.media.images import Images
from kvern_gateway.metrics import Metrics
from kvern_gateway.output import TextOptions
from kvern_gateway.scheduler_client import SchedulerClient
from kvern_gateway.text.chat_template import TemplateRenderer
from kvern_gateway.text.detokenizer import DecoderFactory
from kvern_gateway.text.tokenizer import TextModel
from kvern_gateway.validation import (
    Fields,
    ModelFacts,
    check_model,
    check_prompt_chars,
    check_text,
    check_token_ids,
    stop_strings,
    unimplemented,
)

# Tokens that a tokenizer may have above its model's vocabulary; more means that it belongs to another model.
MAX_EXTRA_TOKENS = 16
# A worker reads files meanwhile, be it from far away.
ADAPTER_TIMEOUT_S = 130.0


@dataclass(slots=True)
class Identity:
    """Who asks, under which name, and for how long."""

    tenant: str
    request_id: str
    # The client chose the id: a lost connection doesn't cancel, the same id with the same body continues.
    resumable: bool = False
    # It has a part of the output already.
    resumes: bool = False
    body_digest: bytes = b""
    deadline_unix_ms: int = 0
    traceparent: str = ""


@dataclass(slots=True)
class Routing:
    n: int = 1
    cache_salt: str = ""
    priority: int = 0
    adapter: adapter_pb2.Adapter | None = None


@dataclass(eq=False)
class Gateway:
    """Everything that outlives a request. Built once, after the model's text side is loaded."""

    text: TextModel
    client: SchedulerClient
    limits: Limits = field(default_factory=Limits)
    served_names: Sequence[str] = ()
    metrics: Metrics = field(default_factory=Metrics)
    keys: Keys = field(default_factory=Keys)
    tracing: Tracing | None = None
    allow_lora_updating: bool = False
    images: Images | None = None
    draining: bool = False

    def __post_init__(self) -> None:
        self.decoders = DecoderFactory(self.text)
        self.renderer = TemplateRenderer(self.text, self.limits)
        self.started_at = time.time()
        self._facts: tuple[session_pb2.Welcome, ModelFacts] | None = None

    @property
    def ready(self) -> bool:
        return self.client.connected.is_set() and not self.draining

    def facts(self) -> ModelFacts:
        """What the scheduler said of the model. Raises KvernError UNAVAILABLE before the first session."""
        welcome = self.client.welcome
        if welcome is None:
            raise unavailable(
                "no model is served yet: the scheduler is not reached, or its worker still loads; try again shortly"
            )
        if self._facts is None or self._facts[0] is not welcome:
            self._facts = (welcome, ModelFacts.of(welcome, self.text.sampling_defaults))
            self.metrics.model = self.model_names()[0]
        return self._facts[1]

    def model_names(self) -> list[str]:
        """Names of the model, the one shown first."""
        own = self.facts().name
        return [*self.served_names, *([] if own in self.served_names else [own])]

    def names(self) -> list[str]:
        """Names that requests may use: the model's, then its adapters'."""
        names = self.model_names()
        return [*names, *(a.name for a in self.client.adapters.served if a.name not in names)]

    def adapter(self, name: object, *, named: bool = False) -> adapter_pb2.Adapter | None:
        """The adapter that a request's ``model`` means, if not the model itself. ``named``: its client named the request,
        which may so be one that was admitted before its adapter was unloaded. Raises MODEL_NOT_FOUND."""
        found = self.client.adapters.find(name, admitted=named)
        if found is None or found.name in self.model_names():
            check_model(name, self.names())
            return None
        return found

    async def load_adapter(self, request: adapter_pb2.LoadAdapterRequest) -> adapter_pb2.LoadAdapterResponse:
        """Returns when requests here may name it. Raises KvernError with what is wrong with it."""
        self._check_lora_updating()
        if request.name in self.model_names():
            raise invalid(
                "lora_name", f"{request.name} is a name of the model; choose another one", value=request.name
            )
        try:
            ask = session_pb2.ServeAdapterRequest(
                name=request.name, path=request.path, replace=request.replace
            )
            response = await self.client.leader().ServeAdapter(ask, timeout=ADAPTER_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        loaded, adapters = response.adapter, self.client.adapters

        def is_known() -> bool:
            found = adapters.find(loaded.name)
            return found is not None and found.number >= loaded.number

        await adapters.until(is_known)
        return adapter_pb2.LoadAdapterResponse(adapter=loaded)

    async def unload_adapter(
        self, request: adapter_pb2.UnloadAdapterRequest
    ) -> adapter_pb2.UnloadAdapterResponse:
        """Returns when requests here may no longer name it. Raises KvernError."""
        self._check_lora_updating()
        try:
            ask = session_pb2.WithdrawAdapterRequest(name=request.name)
            response = await self.client.leader().WithdrawAdapter(ask, timeout=ADAPTER_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        gone, adapters = response.adapter, self.client.adapters

        def is_gone() -> bool:
            found = adapters.find(gone.name)
            return found is None or found.number != gone.number

        await adapters.until(is_gone)
        return adapter_pb2.UnloadAdapterResponse(adapter=gone, num_running=response.num_running)

    def _check_lora_updating(self) -> None:
        self.facts()
        if not self.allow_lora_updating:
            raise unimplemented(
                "lora_name",
                "adapters cannot be loaded or unloaded here; start the gateway with --allow-runtime-lora-updating",
            )

    def check_compatible(self) -> None:
        """Refuses a tokenizer that isn't the served model's.

        Raises:
            ValueError: Its ids don't fit the model's vocabulary.
        """
        facts = self.facts()
        # Models pad their vocabulary above the tokenizer's.
        if self.text.vocab_size > facts.vocab_size + MAX_EXTRA_TOKENS:
            raise ValueError(
                f"the tokenizer has {self.text.vocab_size} tokens, the served model {facts.name!r} only "
                f"{facts.vocab_size}: --model names the files of another model than the workers loaded"
            )
        if self.images is not None and not facts.images:
            raise ValueError(
                f"--model names files of a model that takes images; the served {facts.name!r} takes none"
            )

    async def tokenize(self, spelled: str, text: str, add_special_tokens: bool) -> list[int]:
        """Raises KvernError for text that isn't Unicode or that can't fit the context."""
        check_text(spelled, text)
        facts = self.facts()
        check_prompt_chars(spelled, text, facts, self.limits)
        ids = await self.text.encode_async(text, add_special_tokens)
        # A few tokenizers have a token or two more than their model has rows.
        return (
            check_token_ids(spelled, ids, facts.vocab_size)
            if self.text.vocab_size > facts.vocab_size
            else ids
        )

    def text_options(
        self, fields: Fields, params: SamplingParams, *, default_skip: bool = True
    ) -> TextOptions:
        return TextOptions(
            self.decoders,
            stop_strings(fields, self.limits),
            include_stop=fields.boolean("include_stop_str_in_output"),
            skip_special=fields.boolean("skip_special_tokens", default_skip),
            end_ids=self._end_ids(params),
            min_tokens=params.min_tokens,
        )

    def attached_options(self, submit: session_pb2.Submit) -> TextOptions:
        """The options of a request that any gateway submitted."""
        context = generation_pb2.GenerateRequest.FromString(submit.gateway_context)
        return TextOptions(
            self.decoders,
            list(context.stop),
            include_stop=context.include_stop_in_output,
            skip_special=not context.keep_special_tokens,
            end_ids=self._end_ids(submit.params),
            min_tokens=submit.params.min_tokens,
        )

    def attached_model(self, submit: session_pb2.Submit) -> str:
        """The name of what such a request asked for."""
        context = generation_pb2.GenerateRequest.FromString(submit.gateway_context)
        return context.model or self.model_names()[0]

    def _end_ids(self, params: SamplingParams) -> frozenset[int]:
        stop_ids = frozenset(params.stop_token_ids)
        return stop_ids if params.ignore_eos else stop_ids | self.facts().eos_token_ids

    def bad_word_ids(self, fields: Fields) -> list[int]:
        """Ids of words that are one token each, with and without a space before them."""
        ids: list[int] = []
        for position, word in enumerate(fields.sequence("bad_words", self.limits.max_bad_words)):
            name = f"{fields.spell('bad_words')}[{position}]"
            entry = Fields({name: word})
            if not entry.string(name, self.limits.max_stop_chars):
                raise entry.error(name, word, "a word of at least one character")
            single = [
                tokens[0]
                for form in (word, f" {word.lstrip()}")
                if len(tokens := self.text.encode(form, add_special_tokens=False)) == 1
            ]
            if not single:
                raise unimplemented(name, f"{name} is more than one token; only single tokens can be banned")
            ids.extend(single)
        return ids

    def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        options: TextOptions,
        identity: Identity,
        routing: Routing,
        media: Sequence[media_pb2.MediaItem] = (),
    ) -> Generation:
        """``media``: the images of the prompt. Raises KvernError UNAVAILABLE; the scheduler's own answer comes by
        ``Generation.admitted``."""
        submit = self._submission(prompt_ids, params, identity, routing, media)
        submit.n = routing.n
        submit.gateway_context = options.context(routing.adapter.name if routing.adapter else "")
        submit.resumable, submit.resumes = identity.resumable, identity.resumes
        return self.client.submit(submit)

    def submit_embedding(self, prompt_ids: list[int], identity: Identity, routing: Routing) -> Generation:
        """As :meth:`submit`, for a vector instead of tokens."""
        submit = self._submission(prompt_ids, SamplingParams(max_tokens=0), identity, routing)
        submit.n, submit.pooling = 1, True
        return self.client.submit(submit)

    def _submission(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        identity: Identity,
        routing: Routing,
        media: Sequence[media_pb2.MediaItem] = (),
    ) -> session_pb2.Submit:
        pooling, welcome = self.facts().pooling, self.client.welcome
        assert welcome is not None, "facts() has been asked"
        hashes: list[bytes] = []
        # Of an encoder nothing is cached.
        cached = welcome.prefix_caching and not (pooling is not None and pooling.bidirectional)
        if cached and welcome.block_size:
            lora = adapter_keys(routing.adapter) if routing.adapter else None
            hashes = hash_prompt(prompt_ids, welcome.block_size, routing.cache_salt, lora, keys_of(media))
        return session_pb2.Submit(
            request_id=identity.request_id,
            tenant=identity.tenant,
            body_digest=identity.body_digest,
            prompt_token_ids=pack_i32(prompt_ids),
            params=params,
            block_hashes=join_hashes(hashes),
            cache_salt=routing.cache_salt,
            priority=routing.priority,
            deadline_unix_ms=identity.deadline_unix_ms,
            model=welcome.model.name,
            traceparent=identity.traceparent,
            adapter=routing.adapter.number if routing.adapter else 0,
            media=media,
        )

    def routing(self, fields: Fields) -> Routing:
        return Routing(
            fields.integer("n", 1, self.limits.max_n, 1),
            current().salted(fields.string("cache_salt", self.limits.max_salt_chars)),
            current().prioritized(fields.integer("priority", -(2**31), 2**31 - 1, 0)),
            self.adapter(fields.get("model"), named=fields.get("request_id") is not None),
        )


async def admit(generations: Sequence[Generation]) -> None:
    """Waits until all are admitted. Raises the error of one that is refused; the others are the caller's to cancel."""
    for generation in generations:
        await generation.admitted


def mint_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def log_safe(error: KvernError) -> str:
    """For logs: never the value, which may be a piece of a prompt."""
    return f"{error.code} {error.field}"
