"""`kvern bench engine`: its options. What it does is in kvern_worker.bench, which this process imports only then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvern.errors import KvernError
from kvern_gateway.cli.report import fail

PROFILED = ["1x32x16", "4x256x16", "16x64x32", "32x512x16", "1x2048x8", "2x900x8"]
LOADS = ["1x32x128", "8x128x64", "32x128x64", "1x1024x1"]


def engine(
    model: Annotated[Path, typer.Argument(help="Folder or .gguf file; see make-model")],
    load: Annotated[list[str], typer.Option(help="SEQUENCESxINPUTxOUTPUT; may be repeated")] = LOADS,
    runs: Annotated[int, typer.Option(min=1, help="Of each load, in turns; one more warms up")] = 5,
    dtype: Annotated[str, typer.Option(help="As kvern up's")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="As kvern up's")] = "auto",
    kv_cache_memory_bytes: Annotated[int, typer.Option(min=1, help="As kvern up's")] = 1 << 30,
    threads: Annotated[int | None, typer.Option(min=1, help="[default: physical cores]")] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens per step")] = 2048,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Tokens per second of a model in this process, without services, and the share of what the memory allows."""
    try:
        from kvern_worker import bench as benchmark
        from kvern_worker.loading import LoadOptions
    except ImportError as error:
        fail(error)
    try:
        loads = [benchmark.Load(*_numbers(text)) for text in load]
        longest = max(one.input_len + one.output_len for one in loads)
        slots = max(one.batch for one in loads)
        options = LoadOptions(
            model=str(model),
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            max_model_len=longest,
            max_num_seqs=slots,
            max_num_batched_tokens=max_num_batched_tokens,
            threads=threads,
        )
        if as_json:
            print(json.dumps(list(benchmark.measure(options, loads, runs))))
        else:
            benchmark.report(options, loads, runs)
    except (KvernError, ValueError) as error:
        fail(error)


def fit_profile(
    model: Annotated[Path, typer.Argument(help="Folder or .gguf file; see make-model")],
    output: Annotated[Path, typer.Option(help="Where to write the profile, JSON")],
    load: Annotated[list[str], typer.Option(help="SEQUENCESxINPUTxOUTPUT; may be repeated")] = PROFILED,
    runs: Annotated[int, typer.Option(min=1, help="Of each load; one more warms up")] = 2,
    dtype: Annotated[str, typer.Option(help="As kvern up's")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="As kvern up's")] = "auto",
    kv_cache_memory_bytes: Annotated[int, typer.Option(min=1, help="As kvern up's")] = 1 << 30,
    threads: Annotated[int | None, typer.Option(min=1, help="[default: physical cores]")] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens per step")] = 2048,
) -> None:
    """Fit a model's step time to what a step computes, for `--device sim --sim-profile`."""
    try:
        from kvern_worker import bench as benchmark
        from kvern_worker.loading import LoadOptions
    except ImportError as error:
        fail(error)
    try:
        loads = [benchmark.Load(*_numbers(text)) for text in load]
        options = LoadOptions(
            model=str(model),
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            max_model_len=max(one.input_len + one.output_len for one in loads),
            max_num_seqs=max(one.batch for one in loads),
            max_num_batched_tokens=max_num_batched_tokens,
            threads=threads,
        )
        profile, about = benchmark.fit_profile(options, loads, runs)
        profile.write(output, about)
    except (KvernError, ValueError, OSError) as error:
        fail(error)
    print(
        f"step = {profile.fixed_us:.0f} µs + {profile.token_us:.2f} a prompt token + {1e3 * profile.pair_us:.2f} a 1,000 of its keys"
        f" + {profile.sequence_us:.1f} a decoding sequence + {1e3 * profile.key_us:.2f} a 1,000 keys\n"
        f"{output}: {about['steps']} steps, half of them within {about['error_p50']:.1%}, nine of ten within {about['error_p90']:.1%}"
    )


def _numbers(text: str) -> tuple[int, int, int]:
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"--load {text!r}: three numbers, such as 8x128x64")
    batch, input_len, output_len = map(int, parts)
    return batch, input_len, output_len
