"""Log-probabilities as the two OpenAI surfaces write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvern.v1.sampling_pb2 import TokenLogprobs
from kvern_gateway.output import clamp_logprob
from kvern_gateway.text.detokenizer import DecoderFactory

Entry = tuple[int, TokenLogprobs | None]


class LogprobFormatter:
    """For one request. ``top`` is how many alternatives to show; ``as_ids`` writes "token_id:7" for tokens."""

    def __init__(self, decoders: DecoderFactory, top: int, as_ids: bool = False) -> None:
        self._decoders = decoders
        self._top = top
        self._as_ids = as_ids

    def _token(self, token_id: int) -> tuple[str, bytes]:
        raw = self._decoders.token_bytes(token_id)
        return (f"token_id:{token_id}" if self._as_ids else raw.decode("utf-8", "replace")), raw

    def chat(self, entries: Sequence[Entry]) -> dict[str, Any]:
        return {"content": [self._chat_entry(token_id, value) for token_id, value in entries]}

    def _chat_entry(self, token_id: int, value: TokenLogprobs | None) -> dict[str, Any]:
        entry = self._chat_token(token_id, value.logprob if value is not None else float("-inf"))
        tops = [] if value is None else zip(value.top_token_ids, value.top_logprobs, strict=True)
        entry["top_logprobs"] = [
            self._chat_token(top_id, logprob) for top_id, logprob in list(tops)[: self._top]
        ]
        return entry

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        token, raw = self._token(token_id)
        return {"token": token, "logprob": clamp_logprob(logprob), "bytes": list(raw)}

    def completion(self, entries: Sequence[Entry], offset: int) -> tuple[dict[str, Any], int]:
        """``offset`` is where the first token begins in the choice's text; the end comes back beside it."""
        offsets: list[int] = []
        values: list[float | None] = []
        tokens: list[str] = []
        tops: list[dict[str, float] | None] = []
        for token_id, value in entries:
            token, _ = self._token(token_id)
            tokens.append(token)
            offsets.append(offset)
            offset += len(token)
            if value is None:
                values.append(None)
                tops.append(None)
                continue
            values.append(clamp_logprob(value.logprob))
            shown = {
                self._token(top_id)[0]: clamp_logprob(logprob)
                for top_id, logprob in list(zip(value.top_token_ids, value.top_logprobs, strict=True))[
                    : self._top
                ]
            }
            shown.setdefault(token, clamp_logprob(value.logprob))
            tops.append(shown)
        result = {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}
        return result, offset

    def prompt(self, entries: Sequence[Entry]) -> list[dict[str, Any] | None]:
        """vLLM's prompt_logprobs: per prompt token, ids to value, rank and text; null for the first."""
        rows: list[dict[str, Any] | None] = []
        for token_id, value in entries:
            if value is None:
                rows.append(None)
                continue
            row = {str(token_id): self._prompt_value(token_id, value.logprob, value.rank)}
            for rank, (top_id, logprob) in enumerate(
                zip(value.top_token_ids, value.top_logprobs, strict=True), 1
            ):
                row.setdefault(str(top_id), self._prompt_value(top_id, logprob, rank))
            rows.append(row)
        return rows

    def _prompt_value(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": clamp_logprob(logprob), "rank": rank, "decoded_token": self._token(token_id)[0]}
