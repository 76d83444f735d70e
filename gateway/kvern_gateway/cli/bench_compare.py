"""The load of a `kvern bench serve` run through transformers' continuous batching, without a server around it."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter
from typing import Any

from kvern_gateway.cli import bench_metrics
from kvern_gateway.cli.bench_serve import ServeOptions
from kvern_gateway.cli.bench_workload import draw
from kvern_gateway.cli.load_client import StreamRecord
from kvern_gateway.cli.stack import resolve_model

_PAGE_SIZE = 32
_MAX_BATCH_TOKENS = 1024


def run(options: ServeOptions, model: str | None, dtype: str) -> dict[str, Any]:
    """The same prompts, lengths and concurrency, greedy; the figures of :func:`bench_metrics.summarize`.

    Loading and one warm-up request are not timed. Raises ValueError where the model cannot be loaded.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    path, name = resolve_model(model)
    loaded = AutoModelForCausalLM.from_pretrained(**_source(path), dtype=getattr(torch, dtype)).eval()
    prompts, _ = draw(options)
    concurrency = options.max_concurrency or len(prompts)
    longest = max(len(prompt.token_ids) + prompt.output_len for prompt in prompts)
    pages = concurrency * (longest // _PAGE_SIZE + 2)
    batching = ContinuousBatchingConfig(
        page_size=_PAGE_SIZE, num_blocks=pages, max_batch_tokens=_MAX_BATCH_TOKENS, use_cuda_graph=False
    )
    generation = GenerationConfig(do_sample=False, max_new_tokens=longest, eos_token_id=-1, pad_token_id=0)
    records = [StreamRecord(prompt_len=len(prompt.token_ids), status=200) for prompt in prompts]
    with loaded.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, block=True, timeout=5
    ) as manager:

        def add(index: int, max_new_tokens: int) -> None:
            manager.add_request(
                prompts[index].token_ids,
                request_id=str(index),
                max_new_tokens=max_new_tokens,
                record_timestamps=True,
                eos_token_id=-1,
            )

        def finished() -> Any:
            while (result := manager.get_result(timeout=600)) is not None:
                if result.is_finished():
                    return result
            raise ValueError("transformers' continuous batching stopped without a result")

        add(0, 2)
        finished()
        start = perf_counter()
        waiting = iter(range(len(prompts)))
        running = 0
        while True:
            while running < concurrency and (index := next(waiting, None)) is not None:
                records[index].start = perf_counter()
                add(index, prompts[index].output_len)
                running += 1
            if not running:
                break
            _fill(records, finished())
            running -= 1
        duration = perf_counter() - start
    return {
        "backend": "transformers-cb",
        "model_id": name,
        "dtype": dtype,
        "max_concurrency": options.max_concurrency,
        **bench_metrics.summarize(
            records,
            duration,
            metrics=options.metrics,
            percentiles=options.percentiles,
            goodput_ms=options.goodput_ms,
        ),
    }


def _source(path: Path) -> dict[str, Any]:
    if path.suffix == ".gguf":
        from transformers import GgufConfig

        # Plain dense weights of the asked type, which are what it computes fastest with.
        dense = GgufConfig(dequantize=True)
        return {
            "pretrained_model_name_or_path": str(path.parent),
            "gguf_file": path.name,
            "quantization_config": dense,
        }
    return {"pretrained_model_name_or_path": str(path)}


def _fill(records: list[StreamRecord], result: Any) -> None:
    record = records[int(result.request_id)]
    record.times = list(result.timestamps or [])
    record.counts = [1] * len(record.times)
    record.num_output_tokens = len(result.generated_tokens)
    record.end = perf_counter()
    record.error = result.error or ""
