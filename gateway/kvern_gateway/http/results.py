"""Answers in one piece: collecting a request's choices, and the objects that both ways of answering share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from kvern.errors import KvernError
from kvern.v1.sampling_pb2 import TokenLogprobs
from kvern_gateway.gateway import Gateway
from kvern_gateway.generation import Choice, Generation
from kvern_gateway.http.logprobs import Entry, LogprobFormatter
from kvern_gateway.http.parse import Job, Prompt
from kvern_gateway.metrics import RequestClock
from kvern_gateway.output import ChoiceOutput


def usage_object(job: Job, outputs: Sequence[ChoiceOutput]) -> dict[str, Any]:
    prompt = sum(len(prompt.token_ids) for prompt in job.prompts)
    completion = 0 if job.echo_only else sum(output.num_tokens for output in outputs)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    known = [output.finished.num_cached_tokens for output in outputs if output.finished is not None]
    if known:
        usage["prompt_tokens_details"] = {"cached_tokens": max(known)}
    return usage


def prompt_entries(generation: Generation, token_ids: Sequence[int]) -> list[Entry]:
    """The prompt's tokens with their log-probabilities; the first has none."""
    found: dict[int, TokenLogprobs] = {}
    for choice in generation.choices:
        found.update(choice.prompt_logprobs)
    return [(token_id, found.get(index)) for index, token_id in enumerate(token_ids)]


class Collector:
    """Gathers all choices of a job. ``on_end`` is called once, when all ended or the job failed."""

    def __init__(
        self,
        gateway: Gateway,
        job: Job,
        generations: Sequence[Generation],
        clock: RequestClock,
        on_end: Callable[[], object],
    ) -> None:
        self._gateway = gateway
        self._job = job
        self._clock = clock
        self._on_end = on_end
        self._open = job.num_choices
        self.error: KvernError | None = None
        self._sinks = [_ChoiceCollector(self, generation, job) for generation in generations]
        self._generations = generations

    def start(self) -> None:
        for generation, sink in zip(self._generations, self._sinks, strict=True):
            generation.attach_sink(sink)

    def tokens(self, sink: _ChoiceCollector, choice: Choice, count: int) -> None:
        base = self._sinks.index(sink) * self._job.routing.n
        self._clock.tokens(base + choice.index, count, time.monotonic())

    def fail(self, error: KvernError) -> None:
        if self.error is None:
            self.error = error
            for generation in self._generations:
                generation.cancel()
            self._on_end()

    def choice_ended(self, output: ChoiceOutput) -> None:
        finished = output.finished
        self._clock.choice_finished(output.finish_reason or "error", output.num_tokens, time.monotonic())
        if output.finish_reason == "error" and finished is not None:
            self.fail(KvernError.from_pb(finished.error))
            return
        self._open -= 1
        if not self._open:
            self._on_end()

    def result(self) -> dict[str, Any]:
        job = self._job
        choices: list[dict[str, Any]] = []
        for prompt, sink in zip(job.prompts, self._sinks, strict=True):
            for index, output in enumerate(sink.outputs):
                build = self._chat_choice if job.chat else self._completion_choice
                choice = build(sink, prompt, index, output)
                choices.append({"index": len(choices), **choice})
        outputs = [output for sink in self._sinks for output in sink.outputs]
        result: dict[str, Any] = {
            "id": job.id,
            "object": "chat.completion" if job.chat else "text_completion",
            "created": job.created,
            "model": job.model,
            "choices": choices,
            "usage": usage_object(job, outputs),
        }
        if job.chat:
            if job.prompt_logprobs is not None:
                result["prompt_logprobs"] = self._prompt_logprobs(self._sinks[0], job.prompts[0])
            if job.return_token_ids:
                result["prompt_token_ids"] = job.prompts[0].token_ids
        return result

    def _formatter(self, top: int | None) -> LogprobFormatter:
        return LogprobFormatter(self._gateway.decoders, top or 0, self._job.tokens_as_ids)

    def _prompt_logprobs(self, sink: _ChoiceCollector, prompt: Prompt) -> list[dict[str, Any] | None]:
        return self._formatter(self._job.prompt_logprobs).prompt(
            prompt_entries(sink.generation, prompt.token_ids)
        )

    def _chat_choice(
        self, sink: _ChoiceCollector, prompt: Prompt, index: int, output: ChoiceOutput
    ) -> dict[str, Any]:
        job = self._job
        logprobs = None
        if job.logprobs is not None:
            logprobs = self._formatter(job.logprobs).chat(sink.entries(index))
        choice: dict[str, Any] = {
            "message": {"role": "assistant", "content": "".join(sink.texts[index]), "refusal": None},
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if job.return_token_ids:
            choice["token_ids"] = sink.token_ids[index]
        return choice

    def _completion_choice(
        self, sink: _ChoiceCollector, prompt: Prompt, index: int, output: ChoiceOutput
    ) -> dict[str, Any]:
        job = self._job
        text = "" if job.echo_only else "".join(sink.texts[index])
        entries: list[Entry] = []
        if job.echo:
            shown = prompt.text
            if shown is None:
                shown = self._gateway.text.decode(prompt.token_ids, job.options.skip_special)
            text = shown + text
            if job.logprobs is not None:
                entries.extend(prompt_entries(sink.generation, prompt.token_ids))
        logprobs = None
        if job.logprobs is not None:
            if not job.echo_only:
                entries.extend(sink.entries(index))
            logprobs, _ = self._formatter(job.logprobs).completion(entries, 0)
        choice: dict[str, Any] = {
            "text": text,
            "logprobs": logprobs,
            "finish_reason": "length" if job.echo_only else output.finish_reason,
            "stop_reason": None if job.echo_only else output.stop_reason,
        }
        if job.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(sink, prompt)
        if job.return_token_ids:
            choice["token_ids"] = [] if job.echo_only else sink.token_ids[index]
            choice["prompt_token_ids"] = prompt.token_ids
        return choice


class _ChoiceCollector:
    """The sink of one generation."""

    def __init__(self, collector: Collector, generation: Generation, job: Job) -> None:
        self._collector = collector
        self.generation = generation
        self.outputs = [ChoiceOutput(choice, job.options) for choice in generation.choices]
        self.texts: list[list[str]] = [[] for _ in self.outputs]
        self.token_ids: list[list[int]] = [[] for _ in self.outputs]

    def entries(self, index: int) -> list[Entry]:
        logprobs = self.generation.choices[index].logprobs
        return [(token_id, logprobs.get(i)) for i, token_id in enumerate(self.token_ids[index])]

    def fail(self, error: KvernError) -> None:
        self._collector.fail(error)

    def flush(self, choice: Choice) -> None:
        output = self.outputs[choice.index]
        if output.finish_reason is not None:
            return
        _, tokens = choice.take()
        if tokens:
            self._collector.tokens(self, choice, len(tokens))
        texts, token_ids = self.texts[choice.index], self.token_ids[choice.index]
        for token in tokens:
            token_ids.append(token)
            text = output.push(token)
            if text:
                texts.append(text)
            if output.finish_reason is not None:
                break
        if output.finish_reason is None and choice.finished is not None:
            texts.append(output.finish(choice.finished))
        if output.finish_reason is not None:
            self._collector.choice_ended(output)
