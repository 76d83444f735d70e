"""Server-sent events: one per token and choice, events that come together joined into one write.

An event is a head encoded once per choice, the text's JSON, and a tail encoded once per stream. Only requests with
log-probabilities, token ids or running usage build tails per token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from kvern.errors import KvernError
from kvern_gateway.gateway import Gateway
from kvern_gateway.generation import ORPHAN_GRACE_S, Choice, Generation
from kvern_gateway.http.logprobs import LogprobFormatter
from kvern_gateway.http.parse import Job
from kvern_gateway.http.protocol import Connection
from kvern_gateway.http.results import prompt_entries, usage_object
from kvern_gateway.http.resume import HEADER, Position, beyond_the_end
from kvern_gateway.http.wire import encode_json, error_object
from kvern_gateway.metrics import RequestClock
from kvern_gateway.output import ChoiceOutput
from kvern_gateway.unread import Unread

# A client that has been slow gets what waited in pieces, each when it has read the one before.
_EVENTS_PER_WRITE = 64

DONE = b"data: [DONE]\n\n"


class EventStream:
    """All events of one HTTP response. ``on_end`` is called once, after the last write."""

    def __init__(
        self,
        gateway: Gateway,
        job: Job,
        generations: Sequence[Generation],
        connection: Connection,
        clock: RequestClock,
        on_end: Callable[[], object],
    ) -> None:
        self.job = job
        self.clock = clock
        self.connection = connection
        self.generations = generations
        self.plain = job.logprobs is None and not job.continuous_usage and not job.return_token_ids
        self._on_end = on_end
        self._ended = False
        self._sinks = [
            GenerationSink(self, generation, index * job.routing.n, gateway)
            for index, generation in enumerate(generations)
        ]
        self._open = job.num_choices
        self._waiting: dict[Choice, GenerationSink] = {}
        self._unread = Unread(generations, gateway.limits.max_unread_bytes, self._waiting.clear)
        connection.on_writable = self._resume

    def start(self) -> None:
        for generation, sink in zip(self.generations, self._sinks, strict=True):
            generation.attach_sink(sink)

    def base(self) -> bytes:
        """The beginning of every event, open at the list of choices."""
        kind = "chat.completion.chunk" if self.job.chat else "text_completion"
        fields = encode_json(
            {"id": self.job.id, "object": kind, "created": self.job.created, "model": self.job.model}
        )
        return b"data: " + fields[:-1] + b',"choices":['

    def wait(self, sink: GenerationSink, choice: Choice) -> None:
        """The client is slow: the choice's tokens stay where they are until it has read."""
        self._waiting[choice] = sink
        self._unread.stalled()

    def _resume(self) -> None:
        self._unread.went_on()
        if self._unread.error is not None:
            self._end_with(self._unread.error)
            return
        waiting = self._waiting.copy()
        self._waiting.clear()
        for choice, sink in waiting.items():
            sink.flush(choice)

    def choice_ended(self) -> None:
        self._open -= 1
        if self._open:
            return
        parts = []
        if self.job.include_usage:
            outputs = [output for sink in self._sinks for output in sink.outputs]
            usage = encode_json(usage_object(self.job, outputs))
            parts.append(self.base() + b'],"usage":' + usage + b"}\n\n")
        self.connection.write_chunk(b"".join([*parts, DONE]))
        self._end()

    def fail(self, error: KvernError) -> None:
        if not self._ended:
            for generation in self.generations:
                generation.cancel()
            self._end_with(error)

    def refuse(self, error: KvernError) -> None:
        """What its client asked for is wrong: the answer ends, the request does not."""
        if not self._ended:
            for generation in self.generations:
                generation.abandon(ORPHAN_GRACE_S)
            self._end_with(error)

    def _end_with(self, error: KvernError) -> None:
        self.connection.write_chunk(b"data: " + encode_json(error_object(error)) + b"\n\n" + DONE)
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._unread.went_on()
        self._waiting.clear()
        self.connection.on_writable = None
        self._on_end()


class GenerationSink:
    """Events of one prompt's choices; ``base_index`` is the index of its first choice in the response."""

    def __init__(
        self, stream: EventStream, generation: Generation, base_index: int, gateway: Gateway
    ) -> None:
        job = stream.job
        self._stream = stream
        self._generation = generation
        self._text = gateway.text
        self._base_index = base_index
        self._prompt = job.prompts[base_index // job.routing.n]
        self.outputs = [ChoiceOutput(choice, job.options) for choice in generation.choices]
        base = stream.base()
        key, self._close = (b'"delta":{"content":', b"}") if job.chat else (b'"text":', b"")
        self._heads = [base + b'{"index":%d,' % (base_index + i) + key for i in range(len(self.outputs))]
        self._tail = self._close + b',"logprobs":null,"finish_reason":null}]}\n\n'
        self._formatter = LogprobFormatter(gateway.decoders, job.logprobs or 0, job.tokens_as_ids)
        self._offsets = [0] * len(self.outputs)
        self._ids = job.event_ids
        positions = [Position()] * job.num_choices if self._ids is None else self._ids.sent_before
        self._sent_before = positions[base_index : base_index + len(self.outputs)]
        self._begun = [position.next_index > 0 for position in self._sent_before]

    def fail(self, error: KvernError) -> None:
        self._stream.fail(error)

    def flush(self, choice: Choice) -> None:
        connection, output = self._stream.connection, self.outputs[choice.index]
        if self._sent_before[choice.index].ended:
            self._pass_over(choice, output)
            return
        while output.finish_reason is None:
            if not connection.writable:
                self._stream.wait(self, choice)
                return
            self._write_some(choice, output)
            if not choice.tokens:
                return

    def _pass_over(self, choice: Choice, output: ChoiceOutput) -> None:
        """The client says that it has all of this choice, its end too."""
        first, tokens = choice.take()
        choice.logprobs.clear()
        num_tokens, said = first + len(tokens), self._sent_before[choice.index].next_index
        if output.finish_reason is not None:
            return
        if num_tokens >= said:
            output.end_before(said)
            self._stream.choice_ended()
        elif choice.finished is not None:
            self._refuse(choice, num_tokens)

    def _refuse(self, choice: Choice, num_tokens: int) -> None:
        said = self._sent_before[choice.index].next_index
        error = beyond_the_end(HEADER, self._base_index + choice.index, said, num_tokens)
        self._stream.refuse(error)

    def _write_some(self, choice: Choice, output: ChoiceOutput) -> None:
        stream, index = self._stream, choice.index
        first, tokens = choice.take(_EVENTS_PER_WRITE)
        finished = None if choice.tokens else choice.finished
        parts: list[bytes] = [] if self._begun[index] else self._begin(index)
        if tokens:
            now = time.monotonic()
            stream.clock.tokens(self._base_index + index, len(tokens), now)
        head, tail, plain = self._heads[index], self._tail, stream.plain
        push = output.push
        last = len(tokens) - 1 if finished is not None else -1
        ids, sent_before = self._ids, self._sent_before[index].next_index
        for position, token in enumerate(tokens):
            text = push(token)
            sent = first + position < sent_before
            if sent:
                text = ""
            if position == last and output.finish_reason is None:
                assert finished is not None
                text += output.finish(finished)
            if stream.job.echo_only:
                text = ""
            ended = output.finish_reason is not None
            if ended and first + position + 1 < sent_before:
                self._refuse(choice, first + position + 1)
                return
            if sent and not ended:
                self._skip_logprobs(index, token)
                continue
            if ids is not None:
                parts.append(ids.after(self._base_index + index, first + position + 1, ended))
            if plain and not ended:
                parts.append(head)
                parts.append(encode_json(text))
                parts.append(tail)
            else:
                parts.append(
                    head
                    + encode_json(text)
                    + self._full_tail(choice, output, None if sent else token, first + position)
                )
            if ended:
                break
        if output.finish_reason is None and finished is not None:
            text = output.finish(finished)
            if choice.first_index < sent_before:
                self._refuse(choice, choice.first_index)
                return
            if ids is not None:
                parts.append(ids.after(self._base_index + index, choice.first_index, True))
            parts.append(head + encode_json(text) + self._full_tail(choice, output, None, 0))
        if parts:
            stream.connection.write_chunk(b"".join(parts))
        if output.finish_reason is not None:
            self._choice_ended(choice, output)

    def _skip_logprobs(self, index: int, token: int) -> None:
        """Keeps text offsets right after a token that an earlier response showed."""
        if self._stream.job.logprobs is not None and not self._stream.job.chat:
            _, self._offsets[index] = self._formatter.completion([(token, None)], self._offsets[index])

    def _begin(self, index: int) -> list[bytes]:
        """What precedes a choice's first token: the role of a chat, the echo of a completion."""
        self._begun[index] = True
        stream, job = self._stream, self._stream.job
        base = stream.base()
        prompt_ids = b""
        if job.return_token_ids:
            prompt_ids = b',"prompt_token_ids":' + encode_json(self._prompt.token_ids)
        if job.chat:
            role = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            return [base + role % (self._base_index + index) + prompt_ids + b"}\n\n"]
        if not job.echo and not prompt_ids:
            return []
        text = ""
        logprobs: Any = None
        if job.echo:
            given = self._prompt.text
            text = given or self._text.decode(self._prompt.token_ids, job.options.skip_special)
            if job.logprobs is not None:
                entries = prompt_entries(self._generation, self._prompt.token_ids)
                logprobs, _ = self._formatter.completion(entries, 0)
            self._offsets[index] = len(text)
        tail = b',"logprobs":' + encode_json(logprobs) + b',"finish_reason":null' + prompt_ids + b"}]}\n\n"
        return [self._heads[index] + encode_json(text) + tail]

    def _full_tail(self, choice: Choice, output: ChoiceOutput, token: int | None, index: int) -> bytes:
        """Everything after the text of an event that carries more than text. ``token`` None: no token, only an end."""
        job = self._stream.job
        logprobs: Any = None
        if job.logprobs is not None and token is not None and not job.echo_only:
            entries = [(token, choice.logprobs.pop(index, None))]
            if job.chat:
                logprobs = self._formatter.chat(entries)
            else:
                logprobs, self._offsets[choice.index] = self._formatter.completion(
                    entries, self._offsets[choice.index]
                )
        tail = self._close + b',"logprobs":' + encode_json(logprobs)
        tail += b',"finish_reason":' + encode_json(output.finish_reason)
        if output.finish_reason is not None:
            tail += b',"stop_reason":' + encode_json(output.stop_reason)
        if job.return_token_ids:
            tail += b',"token_ids":' + encode_json([] if token is None or job.echo_only else [token])
        tail += b"}]"
        if job.continuous_usage:
            tail += b',"usage":' + encode_json(usage_object(job, [output]))
        error = (
            output.finished.error if output.finished is not None and output.finish_reason == "error" else None
        )
        if error is not None and error.message:
            tail += b"," + encode_json(error_object(KvernError.from_pb(error)))[1:-1]
        return tail + b"}\n\n"

    def _choice_ended(self, choice: Choice, output: ChoiceOutput) -> None:
        choice.logprobs.clear()
        self._stream.clock.choice_finished(
            output.finish_reason or "error", output.num_tokens, time.monotonic()
        )
        self._stream.choice_ended()
