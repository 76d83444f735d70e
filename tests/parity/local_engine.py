"""The scheduler's core and an executor in one process, two plans in flight, every plan and result through its message."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvern.block_hash import hash_prompt, split_hashes
from kvern.media import keys_of
from kvern.v1 import media_pb2, sampling_pb2, worker_pb2
from kvern_scheduler.convert import failed_positions, plan_to_pb, result_from_pb
from kvern_scheduler.core.cell import Cell
from kvern_scheduler.core.fold import fold_step
from kvern_scheduler.core.group import Limits
from kvern_scheduler.core.planner import plan_step
from kvern_scheduler.core.requests import Request, State, Submission
from kvern_worker.executor import ModelExecutor


class LocalEngine:
    """``num_blocks`` restricts the pool that the scheduler believes in."""

    def __init__(
        self, executor: ModelExecutor, limits: Limits | None = None, num_blocks: int | None = None
    ) -> None:
        description = executor.describe()
        limits = limits or Limits()
        self.cell = Cell(
            replace(
                limits,
                max_num_batched_tokens=min(limits.max_num_batched_tokens, description.max_num_batched_tokens),
            )
        )
        self.group = self.cell.add_group(
            description.model,
            num_blocks or description.num_blocks,
            description.block_size,
            description.max_num_seqs,
            description.max_num_batched_tokens,
            description.num_state_blocks,
            num_memory_blocks=description.num_memory_blocks,
            num_disk_blocks=description.num_disk_blocks,
        )
        self._executor = executor
        self._count = 0
        executor.reset()
        self._moved = threading.Event()
        if executor.transfers is not None and self.group.tiers is not None:
            executor.transfers.notify = self._moved.set
            self.group.tiers.restore(*map(split_hashes, executor.transfers.inventory()))

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        seed: int = 0,
        n: int = 1,
        temperature: float = 0.0,
        pooling: bool = False,
        media: Sequence[media_pb2.MediaItem] = (),
    ) -> Request:
        """Everything that a gateway resolves is resolved here; end tokens are ignored."""
        params = sampling_pb2.SamplingParams(
            temperature=temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            seed=seed,
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        self._count += 1
        name = f"request-{self._count}"
        submission = Submission(
            name,
            "",
            hashlib.sha256(name.encode()).digest(),
            np.array(prompt, np.int32),
            params,
            n=n,
            pooling=pooling,
            hashes=hash_prompt(prompt, self.group.block_size, images=keys_of(media)),
            media=list(media),
            images=keys_of(media),
        )
        return self.cell.submit(submission, 0.0)[0]

    def run(self) -> None:
        """Until nothing is left to compute; checks the accounting after every step."""
        plans: deque[worker_pb2.StepPlan] = deque()
        while True:
            while (plan := plan_step(self.group, 0.0)) is not None:
                plans.append(plan_to_pb(plan, 1))
            if not plans:
                if not self._transfer():
                    return
                continue
            result = self._executor.run(worker_pb2.StepPlan.FromString(plans.popleft().SerializeToString()))
            fold_step(self.group, result_from_pb(result), 0.0)
            self._transfer(wait=False)
            self.cell.check_integrity()

    def _transfer(self, wait: bool = True) -> bool:
        """Tells the core what has moved; False where nothing was to move."""
        transfers, tiers = self._executor.transfers, self.group.tiers
        if transfers is None or tiers is None or not tiers.is_moving:
            return False
        if wait:
            assert self._moved.wait(10.0), "nothing moves"
        self._moved.clear()
        for done in transfers.take_done():
            self.group.transferred(done, failed_positions(done))
        return True

    def generate(self, prompts: list[list[int]], max_tokens: int, **how: float) -> list[list[int]]:
        """Output of each prompt, all submitted at once."""
        requests = [self.submit(prompt, max_tokens, **how) for prompt in prompts]  # type: ignore[arg-type]
        self.run()
        return [output for request in requests for output in self.outputs(request)]

    def outputs(self, request: Request) -> list[list[int]]:
        """One list for each choice of a finished request."""
        for sequence in request.sequences:
            assert sequence.state is State.FINISHED and sequence.finish is not None
            assert sequence.finish.error is None, sequence.finish.error
        return [sequence.output.tolist() for sequence in request.sequences]
