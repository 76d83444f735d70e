"""From a choice's tokens to what its client is told: text, finish reason, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from kvern.v1 import generation_pb2, sampling_pb2, session_pb2
from kvern_gateway.generation import Choice
from kvern_gateway.text.detokenizer import DecoderFactory, StopMatcher, TextStream

FINISH_REASONS = {
    sampling_pb2.FINISH_REASON_STOP: "stop",
    sampling_pb2.FINISH_REASON_LENGTH: "length",
    sampling_pb2.FINISH_REASON_ABORT: "abort",
    sampling_pb2.FINISH_REASON_ERROR: "error",
}
# JSON has no −∞; what vLLM writes for it.
LOWEST_LOGPROB = -9999.0


class TextOptions:
    """How a request's tokens become text. Shared by its choices."""

    __slots__ = ("_decoders", "end_ids", "include_stop", "matcher", "min_tokens", "skip_special", "stops")

    def __init__(
        self,
        decoders: DecoderFactory,
        stops: Sequence[str],
        *,
        include_stop: bool,
        skip_special: bool,
        end_ids: frozenset[int],
        min_tokens: int,
    ) -> None:
        self._decoders = decoders
        self.stops = stops
        self.matcher = StopMatcher(stops) if stops else None
        self.include_stop = include_stop
        self.skip_special = skip_special
        # Tokens that end a choice; their text is shown only with include_stop.
        self.end_ids = frozenset() if include_stop else end_ids
        self.min_tokens = min_tokens

    def context(self, model: str = "") -> bytes:
        """What another gateway needs to make the same text of the same tokens (`Submit.gateway_context`), and the name
        of the adapter that was asked for."""
        return generation_pb2.GenerateRequest(
            model=model,
            stop=self.stops,
            include_stop_in_output=self.include_stop,
            keep_special_tokens=not self.skip_special,
        ).SerializeToString()

    def create_stream(self) -> TextStream:
        decoder = self._decoders.create(self.skip_special)
        return TextStream(decoder, self.matcher, self.include_stop, self.min_tokens)


class ChoiceOutput:
    """One choice as its client sees it so far."""

    __slots__ = ("_choice", "_end_ids", "_stream", "finish_reason", "finished", "stop_reason")

    def __init__(self, choice: Choice, options: TextOptions) -> None:
        self._choice = choice
        self._end_ids = options.end_ids
        self._stream = options.create_stream()
        # One of FINISH_REASONS' values once the choice has ended.
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.finished: session_pb2.Finished | None = None

    @property
    def num_tokens(self) -> int:
        return self._stream.num_tokens

    def push(self, token_id: int) -> str:
        """The text to show for one more token. May end the choice, when a stop string is complete."""
        if token_id in self._end_ids:
            return self._stream.skip()
        text = self._stream.push(token_id)
        if self._stream.stopped is not None:
            self._stop()
        return text

    def _stop(self) -> None:
        self.finish_reason = "stop"
        self.stop_reason = self._stream.stopped
        self.finished = self._choice.finished
        self._choice.generation.stop(self._choice)

    def end_before(self, num_tokens: int) -> None:
        """An earlier response has told its client everything of this choice."""
        self._stream.num_tokens = num_tokens
        self.finish_reason = "stop"
        if not self._choice.done:
            self._choice.generation.stop(self._choice)

    def finish(self, finished: session_pb2.Finished) -> str:
        """The text still held when the scheduler ended the choice."""
        text = self._stream.finish()
        self.finished = finished
        if self._stream.stopped is not None:
            self._stop()
            return text
        self.finish_reason = FINISH_REASONS.get(finished.reason, "error")
        if finished.HasField("stop_token_id"):
            self.stop_reason = finished.stop_token_id
        return text


def clamp_logprob(value: float) -> float:
    return max(value, LOWEST_LOGPROB)
