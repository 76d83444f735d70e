"""What a serving benchmark asks for, and when: drawn at random, or read from a trace of a real service.

Traces hold lengths and no text, so prompts are random token ids; where a trace says which prompts begin alike, they do.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Low ids are often control tokens.
_FIRST_RANDOM_ID = 256
# Tokens that each of Mooncake's hash ids stands for.
_MOONCAKE_BLOCK = 512

DATASETS = ("random", "prefix_repetition", "mooncake", "burstgpt")
TRACES = ("mooncake", "burstgpt")


@dataclass(frozen=True)
class Prompt:
    """Random token ids for completions; as many short words for chat."""

    token_ids: list[int]
    output_len: int


@dataclass(frozen=True)
class LoadOptions:
    """Meanings are those of vLLM's `bench serve` flags of the same names; lengths are tokens.

    ``trace_speed`` and ``length_scale`` shrink a trace to what the server at hand can do: 2 sends it in half the time,
    0.5 halves all its lengths.
    """

    dataset_name: str = "random"
    dataset_path: Path | None = None
    trace_speed: float = 1.0
    length_scale: float = 1.0
    num_prompts: int = 1000
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    random_vocab_size: int = 16_384
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    request_rate: float = float("inf")
    burstiness: float = 1.0
    seed: int = 0


def draw(options: LoadOptions) -> tuple[list[Prompt], list[float]]:
    """Prompts and the seconds from the start at which they are sent; equal options give equal ones.

    A trace's own times hold unless a request rate is given. Raises ValueError for a trace that makes no sense.
    """
    if options.dataset_name not in TRACES:
        make = _random if options.dataset_name == "random" else _prefix_repetition
        return make(options), _arrivals(options, options.num_prompts)
    if options.dataset_path is None:
        raise ValueError(f"--dataset-name {options.dataset_name} needs --dataset-path FILE")
    prompts, times = _trace(options, options.dataset_path)
    if not np.isinf(options.request_rate):
        times = _arrivals(options, len(prompts))
    return prompts, times


def _ids(generator: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    drawn: list[int] = generator.integers(min(_FIRST_RANDOM_ID, vocab_size // 2), vocab_size, count).tolist()
    return drawn


def _random(options: LoadOptions) -> list[Prompt]:
    """Lengths are uniform within ``length × (1 ± range_ratio)``."""
    generator = np.random.default_rng(options.seed)

    def lengths(mean: int) -> list[int]:
        low = max(1, round(mean * (1 - options.random_range_ratio)))
        high = max(low, round(mean * (1 + options.random_range_ratio)))
        drawn: list[int] = generator.integers(low, high + 1, options.num_prompts).tolist()
        return drawn

    prefix = _ids(generator, options.random_prefix_len, options.random_vocab_size)
    return [
        Prompt(prefix + _ids(generator, input_len, options.random_vocab_size), output_len)
        for input_len, output_len in zip(
            lengths(options.random_input_len), lengths(options.random_output_len), strict=True
        )
    ]


def _prefix_repetition(options: LoadOptions) -> list[Prompt]:
    """A few prefixes, each under many suffixes, shuffled."""
    generator = np.random.default_rng(options.seed)
    vocab_size = options.random_vocab_size
    prefixes = [
        _ids(generator, options.prefix_repetition_prefix_len, vocab_size)
        for _ in range(options.prefix_repetition_num_prefixes)
    ]
    order = generator.permutation(options.num_prompts) % len(prefixes)
    return [
        Prompt(
            prefixes[which] + _ids(generator, options.prefix_repetition_suffix_len, vocab_size),
            options.prefix_repetition_output_len,
        )
        for which in order
    ]


def _arrivals(options: LoadOptions, count: int) -> list[float]:
    """Gamma-distributed gaps, scaled so that the mean rate is exact."""
    if np.isinf(options.request_rate):
        return [0.0] * count
    generator = np.random.default_rng(options.seed + 1)
    shape = options.burstiness
    times = np.cumsum(generator.gamma(shape, 1 / (options.request_rate * shape), count))
    scaled: list[float] = (times * (count / options.request_rate / times[-1])).tolist()
    return scaled


def _trace(options: LoadOptions, path: Path) -> tuple[list[Prompt], list[float]]:
    read = _mooncake if options.dataset_name == "mooncake" else _burstgpt
    prompts: list[Prompt] = []
    times: list[float] = []
    try:
        with path.open(newline="") as file:
            for number, (seconds, prompt) in enumerate(read(options, file), 1):
                prompts.append(prompt)
                times.append(seconds)
                if number == options.num_prompts:
                    break
    except OSError as error:
        raise ValueError(f"--dataset-path {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--dataset-path {path} is not text") from error
    if not prompts:
        raise ValueError(f"--dataset-path {path} holds no request")
    start = min(times)
    return prompts, [(seconds - start) / options.trace_speed for seconds in times]


def _scaled(options: LoadOptions, tokens: int) -> int:
    return max(1, round(tokens * options.length_scale))


def _mooncake(options: LoadOptions, file: Iterator[str]) -> Iterator[tuple[float, Prompt]]:
    """Lines of ``{"timestamp": ms, "input_length", "output_length", "hash_ids"}``; prompts whose first hash ids are equal
    begin with the same 512 tokens for each (https://github.com/kvcache-ai/Mooncake, FAST25 release)."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            seconds, hashes = float(row["timestamp"]) / 1000, [int(value) for value in row["hash_ids"]]
            length, output = int(row["input_length"]), int(row["output_length"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"line {number} of the trace is not one of Mooncake's: {error!r}") from None
        block = _scaled(options, _MOONCAKE_BLOCK)
        wanted = _scaled(options, length)
        # What the hashes do not cover is the request's own.
        own = [-number] * max(0, -(-wanted // block) - len(hashes))
        ids = [token for value in hashes + own for token in _block(options, value, block)]
        yield seconds, Prompt(ids[:wanted], _scaled(options, output))


def _block(options: LoadOptions, value: int, count: int) -> list[int]:
    generator = np.random.default_rng([options.seed, value & (2**64 - 1)])
    return _ids(generator, count, options.random_vocab_size)


def _burstgpt(options: LoadOptions, file: Iterator[str]) -> Iterator[tuple[float, Prompt]]:
    """CSV with ``Timestamp`` in seconds, ``Request tokens`` and ``Response tokens``; 0 of these are failed requests, left
    out (https://github.com/HPMLL/BurstGPT)."""
    generator = np.random.default_rng(options.seed)
    for number, row in enumerate(csv.DictReader(file), 2):
        try:
            seconds = float(row["Timestamp"])
            length, output = int(row["Request tokens"]), int(row["Response tokens"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"line {number} of the trace is not one of BurstGPT's: {error!r}") from None
        if output > 0:
            ids = _ids(generator, _scaled(options, length), options.random_vocab_size)
            yield seconds, Prompt(ids, _scaled(options, output))
