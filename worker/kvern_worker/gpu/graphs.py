"""Decode steps as CUDA graphs: a step's hundreds of launches become one.

A graph holds addresses and sizes, so there is one for each of some numbers of sequences, and a step is padded to the next
of them. A padding row is a sequence without a query: it attends to nothing, is stored nowhere (slot −1), and its
results are never looked at.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from kvern.errors import invalid
from kvern_worker.gpu.staging import Staging
from kvern_worker.layers.attention import StepInputs
from kvern_worker.models.registry import Model

# Without a flag: all of these up to --max-num-seqs, and that.
_DEFAULT_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 512, 32), 512)

log = logging.getLogger(__name__)


def capture_sizes(asked: Sequence[int] | None, max_num_seqs: int) -> list[int]:
    """Numbers of sequences to capture, ascending. Raises KvernError for one that is not positive."""
    if asked is None:
        return sorted({*(size for size in _DEFAULT_SIZES if size < max_num_seqs), min(max_num_seqs, 512)})
    if asked and min(asked) <= 0:
        raise invalid(
            "cudagraph_capture_sizes",
            f"cudagraph-capture-sizes must be positive, {min(asked)} is not",
            value=min(asked),
        )
    beyond = [size for size in asked if size > max_num_seqs]
    if beyond:
        why = f"--max-num-seqs {max_num_seqs} never needs it"
        log.warning("phase=graphs size=%d dropped, reason=%r", max(beyond), why)
    return sorted({size for size in asked if size <= max_num_seqs})


def padded(step: StepInputs, size: int, num_blocks: int) -> StepInputs:
    """A step of S sequences with a token each (on the host) as one of ``size`` ≥ S, block tables ``num_blocks`` wide."""
    count = step.seq_lens.shape[0]
    more = (0, size - count)
    tables = step.block_tables.new_zeros(size, num_blocks)
    tables[:count, : step.block_tables.shape[1]] = step.block_tables
    return replace(
        step,
        token_ids=F.pad(step.token_ids, more),
        positions=F.pad(step.positions, more),
        slot_mapping=F.pad(step.slot_mapping, more, value=-1),
        block_tables=tables,
        query_start=F.pad(step.query_start, more, value=count),
        seq_lens=F.pad(step.seq_lens, more),
        state_rows=F.pad(step.state_rows, more, value=-1),
        fresh=F.pad(step.fresh, more, value=True),
    )


class DecodeGraphs:
    """Captures ``model.forward`` for each of ``sizes``; block tables are ``num_blocks`` wide.

    On another ``place`` than a GPU nothing is captured: a "replay" runs the padded step (for tests in the interpreter).
    """

    def __init__(self, place: torch.device, sizes: Sequence[int], num_blocks: int) -> None:
        self._place = place
        self._sizes = sorted(sizes)
        self._num_blocks = num_blocks
        self._staging = Staging(place)
        self._pool: Any = torch.cuda.graph_pool_handle() if place.type == "cuda" else None
        self._replays: dict[int, Callable[[], Any]] = {}

    def capture(self, model: Model, empty_step: StepInputs) -> None:
        """The largest first, whose memory the others share. ``empty_step``: one token that is stored nowhere.

        What cannot be captured runs as it is: one warning says why.
        """
        started = time.perf_counter()
        for size in reversed(self._sizes):
            step = self._staging.put_step(padded(empty_step, size, self._num_blocks))
            try:
                self._replays[size] = self._capture(model, step)
            except RuntimeError as error:
                log.warning("phase=graphs size=%d not captured, decode runs eagerly: %s", size, error)
                self._sizes, self._replays = [], {}
                return
        log.info("phase=graphs seconds=%.3f sizes=%s", time.perf_counter() - started, self._sizes)

    def forward(self, step: StepInputs) -> Any:
        """What the model returns for a step of the host, with padding rows behind; None where no graph fits it."""
        count = step.seq_lens.shape[0]
        at = bisect.bisect_left(self._sizes, count)
        if step.token_ids.shape[0] != count or at == len(self._sizes) or step.images is not None:
            return None
        size = self._sizes[at]
        self._staging.put_step(padded(step, size, self._num_blocks))
        return self._replays[size]()

    def _capture(self, model: Model, step: StepInputs) -> Callable[[], Any]:
        if self._place.type != "cuda":
            return lambda: model.forward(step)
        model.forward(step)  # compiles the kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            states = model.forward(step)

        def replay() -> Any:
            graph.replay()
            return states

        return replay
