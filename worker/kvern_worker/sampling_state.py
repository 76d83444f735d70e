"""What each slot wants of the sampler, as arrays indexed by slot; the rare things only where asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvern.errors import invalid
from kvern.v1.sampling_pb2 import SamplingParams

# Below this, dividing logits by the temperature overflows before it matters: it is greedy.
MIN_TEMPERATURE = 1e-5

Ints = npt.NDArray[np.int64]


class SamplingState:
    """Parameters per slot, [max_num_seqs] each. ``plain`` slots take the arg max of the raw logits.

    ``counts`` and ``in_prompt`` have a row (``penalty_row``) for each slot with penalties only.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self.plain = np.ones(max_num_seqs, np.bool_)
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.top_p = np.ones(max_num_seqs, np.float64)
        self.min_p = np.zeros(max_num_seqs, np.float64)
        self.repetition = np.ones(max_num_seqs, np.float32)
        self.presence = np.zeros(max_num_seqs, np.float32)
        self.frequency = np.zeros(max_num_seqs, np.float32)
        self.seed = np.zeros(max_num_seqs, np.uint64)
        # Alternatives to report; -1: no log-probabilities.
        self.logprobs = np.full(max_num_seqs, -1, np.int64)
        self.prompt_logprobs = np.full(max_num_seqs, -1, np.int64)
        # Tokens (prompt included) up to which stop ids are masked.
        self.stop_from = np.zeros(max_num_seqs, np.int64)
        self.penalty_row = np.full(max_num_seqs, -1, np.int64)
        self.counts = np.zeros((0, vocab_size), np.int32)
        self.in_prompt = np.zeros((0, vocab_size), np.bool_)
        self._free_rows: list[int] = []
        # Slot → arrays of token ids (and values), present only where asked for.
        self.bias: dict[int, tuple[Ints, npt.NDArray[np.float32]]] = {}
        self.banned: dict[int, Ints] = {}
        self.allowed: dict[int, Ints] = {}
        self.stops: dict[int, Ints] = {}

    def add(self, slot: int, params: SamplingParams, tokens: npt.NDArray[np.int32], num_prompt: int) -> None:
        """``tokens``: prompt and output so far. Raises KvernError naming the parameter at fault."""

        def number(field: str, default: float, low: float, high: float) -> float:
            value = float(getattr(params, field)) if params.HasField(field) else default  # type: ignore[arg-type]
            if not low <= value <= high:
                raise invalid(field, f"{field} must be in [{low:g}, {high:g}], is {value:g}", value=value)
            return value

        self.plain[slot] = False  # so that release() clears what is set before an error
        temperature = number("temperature", 1.0, 0.0, 100.0)
        self.temperature[slot] = temperature if temperature >= MIN_TEMPERATURE else 0.0
        self.top_p[slot] = number("top_p", 1.0, math.ulp(0.0), 1.0)
        self.min_p[slot] = number("min_p", 0.0, 0.0, 1.0)
        self.repetition[slot] = number("repetition_penalty", 1.0, 1e-6, 100.0)
        self.presence[slot] = number("presence_penalty", 0.0, -2.0, 2.0)
        self.frequency[slot] = number("frequency_penalty", 0.0, -2.0, 2.0)
        self.top_k[slot] = min(params.top_k, self._vocab_size)
        self.seed[slot] = params.seed
        self.logprobs[slot] = self._num_logprobs(params, "logprobs")
        self.prompt_logprobs[slot] = self._num_logprobs(params, "prompt_logprobs")
        self.stop_from[slot] = num_prompt + params.min_tokens
        penalized = self.repetition[slot] != 1 or self.presence[slot] != 0 or self.frequency[slot] != 0
        if params.logit_bias:
            ids = self._ids("logit_bias", list(params.logit_bias))
            values = np.fromiter(params.logit_bias.values(), np.float32, len(ids))
            if not np.isfinite(values).all():
                raise invalid("logit_bias", "logit_bias must be finite")
            self.bias[slot] = ids, values
        if params.bad_token_ids:
            self.banned[slot] = self._ids("bad_token_ids", params.bad_token_ids)
        if params.allowed_token_ids:
            self.allowed[slot] = self._ids("allowed_token_ids", params.allowed_token_ids)
        if params.min_tokens:
            stops = self._ids("stop_token_ids", [*params.stop_token_ids, *self._eos])
            if len(stops):
                self.stops[slot] = stops
        if penalized:
            row = self._take_row()
            self.penalty_row[slot] = row
            self.counts[row] = np.bincount(tokens[num_prompt:], minlength=self._vocab_size)
            self.in_prompt[row] = False
            self.in_prompt[row, tokens[:num_prompt]] = True
        self.plain[slot] = not (
            self.temperature[slot] > 0 or penalized or self.logprobs[slot] >= 0 or self.edits(slot)
        )

    def edits(self, slot: int) -> bool:
        """Whether single logits of the slot are changed or masked."""
        return any(slot in table for table in (self.bias, self.banned, self.allowed, self.stops))

    @property
    def any_edits(self) -> bool:
        return bool(self.bias or self.banned or self.allowed or self.stops)

    def release(self, slots: npt.NDArray[np.uint32] | list[int]) -> None:
        """Back to the defaults; to be called before a slot is used again."""
        for slot in np.asarray(slots)[~self.plain[slots]].tolist():
            for table in (self.bias, self.banned, self.allowed, self.stops):
                table.pop(slot, None)
            if self.penalty_row[slot] >= 0:
                self._free_rows.append(int(self.penalty_row[slot]))
        self.penalty_row[slots] = -1
        self.logprobs[slots] = -1
        self.prompt_logprobs[slots] = -1
        self.plain[slots] = True

    def reset(self) -> None:
        self.release(list(range(len(self.plain))))

    def record(self, slots: Ints, token_ids: Ints) -> None:
        """Counts the tokens just sampled, where penalties need to know."""
        if len(self._free_rows) == len(self.counts):
            return
        rows = self.penalty_row[slots]
        held = rows >= 0
        self.counts[rows[held], token_ids[held]] += 1

    def _take_row(self) -> int:
        if not self._free_rows:
            old = len(self.counts)
            grown = max(4, old)
            self.counts = np.concatenate((self.counts, np.zeros((grown, self._vocab_size), np.int32)))
            self.in_prompt = np.concatenate((self.in_prompt, np.zeros((grown, self._vocab_size), np.bool_)))
            self._free_rows = list(range(old, old + grown))
        return self._free_rows.pop()

    def _num_logprobs(self, params: SamplingParams, field: str) -> int:
        if not params.HasField(field):  # type: ignore[arg-type]
            return -1
        return min(int(getattr(params, field)), self._vocab_size)

    def _ids(self, field: str, ids: Iterable[int]) -> Ints:
        array = np.fromiter(ids, np.int64)
        if len(array) and array.max() >= self._vocab_size:
            token = int(array.max())
            raise invalid(
                field,
                f"{field}: token id {token} is not in the vocabulary of {self._vocab_size} tokens",
                value=token,
                limit=self._vocab_size - 1,
            )
        return array
