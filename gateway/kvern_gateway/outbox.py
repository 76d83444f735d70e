"""From a generation to the messages of one gRPC call, at the pace of its client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence

from kvern.errors import KvernError
from kvern.v1 import generation_pb2 as pb
from kvern.v1 import sampling_pb2
from kvern_gateway.generation import Choice, Generation
from kvern_gateway.http.resume import beyond_the_end
from kvern_gateway.metrics import RequestClock
from kvern_gateway.output import ChoiceOutput, TextOptions
from kvern_gateway.unread import Unread

# A client that has been slow gets what waited in pieces, each when it has read the one before.
_TOKENS_PER_MESSAGE = 1024


class _Sent:
    """What a choice's client has been told."""

    __slots__ = ("before", "choice", "end", "output")

    def __init__(self, choice: Choice, options: TextOptions, before: int) -> None:
        self.choice = choice
        self.output = ChoiceOutput(choice, options)
        # Tokens before this index were sent by an earlier call, their text too.
        self.before = before
        self.end = False


class Outbox:
    """The sink of one call: what arrives waits with its choice until the client has read what was sent before."""

    def __init__(
        self,
        generation: Generation,
        options: TextOptions,
        clock: RequestClock,
        max_unread_bytes: int,
        from_index: Sequence[int] = (),
    ) -> None:
        self._generation = generation
        self._clock = clock
        self._unread = Unread([generation], max_unread_bytes, self._too_much)
        self._sending = False
        before = [*from_index, *[0] * (len(generation.choices) - len(from_index))]
        self._sent = [
            _Sent(choice, options, first) for choice, first in zip(generation.choices, before, strict=False)
        ]
        self._changed = asyncio.Event()
        self._error: KvernError | None = None
        self._prompt_logprobs_sent = any(before)

    def fail(self, error: KvernError) -> None:
        self._error = self._error or error
        self._changed.set()

    def flush(self, choice: Choice) -> None:
        if self._sending:
            self._unread.stalled()
        self._changed.set()

    def _too_much(self) -> None:
        """The client hears of it when it reads on."""
        assert self._unread.error is not None
        self.fail(self._unread.error)

    async def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        """Raises KvernError where the request failed, or has fewer tokens than its client says."""
        try:
            async for response in self._responses():
                self._sending = True
                yield response
                self._sending = False
                self._unread.went_on()
        finally:
            self._unread.went_on()

    async def _responses(self) -> AsyncIterator[pb.GenerateResponse]:
        while not all(sent.end for sent in self._sent):
            await self._changed.wait()
            self._changed.clear()
            for index, sent in enumerate(self._sent):
                for delta in self._deltas(index, sent):
                    yield pb.GenerateResponse(delta=delta)
                if sent.output.finish_reason is not None and not sent.end:
                    sent.end = True
                    yield pb.GenerateResponse(finished=self._finished(index, sent.output))
            if self._error is not None:
                raise self._error

    def _deltas(self, index: int, sent: _Sent) -> Iterator[pb.Delta]:
        """More may come in while one is being sent; the end comes after all of it."""
        choice, output = sent.choice, sent.output
        while output.finish_reason is None and (choice.tokens or choice.finished is not None):
            delta = self._take(index, sent)
            if output.finish_reason is not None:
                self._clock.choice_finished(output.finish_reason, output.num_tokens, time.monotonic())
            if delta.token_ids or delta.text:
                yield delta

    def _take(self, index: int, sent: _Sent) -> pb.Delta:
        choice, output = sent.choice, sent.output
        first, tokens = choice.take(_TOKENS_PER_MESSAGE)
        if tokens:
            self._clock.tokens(choice.index, len(tokens), time.monotonic())
        if choice.tokens:
            self._unread.stalled()
        shown: list[int] = []
        texts: list[str] = []
        logprobs: list[sampling_pb2.TokenLogprobs] = []
        for position, token in enumerate(tokens, first):
            text = output.push(token)
            entry = choice.logprobs.pop(position, None)
            if position >= sent.before:
                shown.append(token)
                texts.append(text)
                if entry is not None:
                    logprobs.append(entry)
            if output.finish_reason is not None:
                break
        if output.finish_reason is None and choice.finished is not None and not choice.tokens:
            texts.append(output.finish(choice.finished))
        if output.finish_reason is not None and output.num_tokens < sent.before:
            raise beyond_the_end("from_index", index, sent.before, output.num_tokens)
        delta = pb.Delta(
            choice=index,
            first_index=max(first, sent.before),
            token_ids=shown,
            text="".join(texts),
            logprobs=logprobs,
        )
        if index == 0 and not self._prompt_logprobs_sent and (shown or delta.text):
            self._prompt_logprobs_sent = True
            found = choice.prompt_logprobs
            delta.prompt_logprobs.extend(found[position] for position in sorted(found))
        return delta

    def _finished(self, index: int, output: ChoiceOutput) -> pb.ChoiceFinished:
        reason = sampling_pb2.FinishReason.Value(f"FINISH_REASON_{(output.finish_reason or 'error').upper()}")
        finished = output.finished
        usage = pb.Usage(
            num_prompt_tokens=len(self._generation.submit.prompt_token_ids) // 4,
            num_cached_tokens=finished.num_cached_tokens if finished is not None else 0,
            num_output_tokens=output.num_tokens,
        )
        result = pb.ChoiceFinished(choice=index, reason=reason, usage=usage)
        if isinstance(output.stop_reason, str):
            result.stop_string = output.stop_reason
        elif output.stop_reason is not None:
            result.stop_token_id = output.stop_reason
        if finished is not None and finished.HasField("error"):
            result.error.CopyFrom(finished.error)
        return result
