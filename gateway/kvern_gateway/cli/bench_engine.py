"""`kvern bench engine`: its options. What it does is in kvern_worker.bench, which this process imports only then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvern.errors import KvernError
from kvern_gateway.cli.report import fail

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


def _numbers(text: str) -> tuple[int, int, int]:
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"--load {text!r}: three numbers, such as 8x128x64")
    batch, input_len, output_len = map(int, parts)
    return batch, input_len, output_len
