"""`kvern bench tiers`: time to the first token of a prompt whose blocks were evicted, from memory, from disk, and computed.

The scheduler's core drives a worker in this process, on a device that holds one prompt; another prompt evicts it.
"""

from __future__ import annotations

import json
import tempfile
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from kvern.errors import KvernError
from kvern_gateway.cli.report import fail

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvern.v1 import worker_pb2
    from kvern_worker.executor import ModelExecutor

BLOCK_SIZE = 16
SPARE_BLOCKS = 4
# For blocks on their way; far more than they take.
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Times:
    """Median seconds to the first token of a prompt of ``tokens``; ``recomputed``: tokens of it that were computed again,
    at most one, whose logits are wanted."""

    tokens: int
    compute: float
    memory: float
    disk: float
    recomputed: int


def tiers(
    model: Annotated[Path, typer.Argument(help="Folder or .gguf file; see make-model")],
    length: Annotated[list[int], typer.Option(help="Prompt tokens; may be repeated")] = [1024, 4096],  # noqa: B006
    runs: Annotated[int, typer.Option(min=1, help="Of each length")] = 3,
    dtype: Annotated[str, typer.Option(help="As kvern up's")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="As kvern up's")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="[default: physical cores]")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """First tokens after an eviction: blocks loaded from memory and from disk, beside computing them again."""
    try:
        from kvern_worker.loading import LoadOptions
    except ImportError as error:
        fail(error)
    options = LoadOptions(model=str(model), dtype=dtype, kv_cache_dtype=kv_cache_dtype, threads=threads)
    try:
        results = [measure(options, tokens, runs) for tokens in length]
    except (KvernError, OSError) as error:
        fail(error)
    if as_json:
        print(json.dumps([asdict(times) for times in results]))
        return
    print(f"{'tokens':>8} {'compute':>10} {'memory':>10} {'disk':>10}   times as fast")
    for t in results:
        print(
            f"{t.tokens:8d} {t.compute * 1e3:7.1f} ms {t.memory * 1e3:7.1f} ms {t.disk * 1e3:7.1f} ms   "
            f"{t.compute / t.memory:.1f} from memory, {t.compute / t.disk:.1f} from disk"
        )


def measure(options: object, tokens: int, runs: int) -> Times:
    """``options``: LoadOptions. Raises KvernError."""
    from dataclasses import replace

    from kvern_worker.loading import LoadOptions, Progress, load
    from kvern_worker.service import Progress as Silent

    assert isinstance(options, LoadOptions)
    blocks = -(-(tokens + 1) // BLOCK_SIZE) + SPARE_BLOCKS
    with tempfile.TemporaryDirectory(prefix="kvern-bench-", dir="/tmp") as folder:
        chosen = replace(
            options,
            block_size=BLOCK_SIZE,
            max_model_len=blocks * BLOCK_SIZE,
            max_num_seqs=4,
            kv_offloading_gib=2.0,
            kv_offloading_dir=folder,
        )
        silent: Progress = Silent()
        prompts = [_prompt(run, tokens) for run in range(runs + 1)]
        # Each prompt evicts the one before it.
        engine = Engine(load(chosen, silent), blocks)
        engine.ask(prompts.pop())
        compute = [engine.ask(prompt) for prompt in prompts]
        memory = [engine.ask(prompt) for prompt in prompts]
        # A new worker has nothing in memory.
        engine = Engine(load(chosen, silent), blocks)
        disk = [engine.ask(prompt) for prompt in prompts]
    compute_s, memory_s, disk_s = (median(each for each, _ in asked) for asked in (compute, memory, disk))
    return Times(tokens, compute_s, memory_s, disk_s, max(computed for _, computed in memory + disk))


def _prompt(seed: int, tokens: int) -> list[int]:
    import numpy as np

    return np.random.default_rng(seed).integers(3, 250, tokens).tolist()


class Engine:
    """The core and one worker, of whose blocks ``num_blocks`` are used."""

    def __init__(self, executor: ModelExecutor, num_blocks: int) -> None:
        import threading

        from kvern.block_hash import split_hashes
        from kvern_scheduler.core.cell import Cell
        from kvern_scheduler.core.group import Limits

        description = executor.describe()
        self._executor = executor
        self._cell = Cell(Limits())
        self._group = self._cell.add_group(
            description.model,
            num_blocks,
            description.block_size,
            description.max_num_seqs,
            description.max_num_batched_tokens,
            num_memory_blocks=description.num_memory_blocks,
            num_disk_blocks=description.num_disk_blocks,
        )
        self._moved = threading.Event()
        executor.reset()
        assert executor.transfers is not None and self._group.tiers is not None
        executor.transfers.notify = self._moved.set
        self._group.tiers.restore(*map(split_hashes, executor.transfers.inventory()))

    def ask(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token, and how much of the prompt was computed; then waits until all is stored."""
        import numpy as np

        from kvern.block_hash import hash_prompt
        from kvern.v1 import sampling_pb2
        from kvern_scheduler.core.requests import Submission

        name = str(self._group.step)
        params = sampling_pb2.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        hashes = hash_prompt(prompt, BLOCK_SIZE)
        submission = Submission(name, "", b"", np.array(prompt, np.int32), params, hashes=hashes)
        started = perf_counter()
        request, _ = self._cell.submit(submission, started)
        [sequence] = request.sequences
        self._run(lambda: sequence.finish is not None)
        seconds = perf_counter() - started
        assert sequence.finish is not None
        if sequence.finish.error is not None:
            raise sequence.finish.error
        self._run(lambda: not self._tiers_move)
        return seconds, len(prompt) - sequence.finish.num_cached_tokens

    @property
    def _tiers_move(self) -> bool:
        tiers = self._group.tiers
        return tiers is not None and (tiers.is_moving or tiers.has_work)

    def _run(self, until: Callable[[], bool]) -> None:
        from kvern_scheduler.convert import failed_positions, plan_to_pb, result_from_pb
        from kvern_scheduler.core.fold import fold_step
        from kvern_scheduler.core.planner import plan_step

        transfers = self._executor.transfers
        plans: deque[worker_pb2.StepPlan] = deque()
        assert transfers is not None
        while not until():
            while (plan := plan_step(self._group, perf_counter())) is not None:
                plans.append(plan_to_pb(plan, 1))
            if plans:
                fold_step(self._group, result_from_pb(self._executor.run(plans.popleft())), perf_counter())
            elif not self._moved.wait(PATIENCE_S):
                raise TimeoutError("no block has come for a minute")
            self._moved.clear()
            for done in transfers.take_done():
                self._group.transferred(done, failed_positions(done))
            self._cell.take_changes()
