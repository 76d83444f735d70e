"""A core and a strict simulated worker, in lockstep, without any service between them."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from kvern.block_hash import adapter_keys, hash_prompt, split_hashes
from kvern.v1 import sampling_pb2, worker_pb2
from kvern_scheduler.convert import failed_positions, plan_to_pb, result_from_pb
from kvern_scheduler.core.cell import Cell
from kvern_scheduler.core.fold import fold_step
from kvern_scheduler.core.group import Group, Limits
from kvern_scheduler.core.journal import Journal
from kvern_scheduler.core.plan import Plan
from kvern_scheduler.core.planner import plan_step
from kvern_scheduler.core.requests import Request, Sequence, Submission, sequence_seed
from kvern_worker.sim import Content, SimConfig, SimExecutor, continue_greedily


def adapter_path(adapter: int) -> str:
    """Adapter 1 is the simulated one at /, adapter 2 the one at /., and so on: any path that exists is one."""
    return "/" + "./" * (adapter - 1)


class CoreHarness:
    """The worker runs each plan at once, but its result is folded only when the test says so: plans overlap."""

    def __init__(self, config: SimConfig, **limits: Any) -> None:
        self.config = config
        self.now = 0.0
        self.cell = Cell(
            Limits(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                **limits,
            ),
            Journal(lambda: self.now),
        )
        for number in range(1, 6):
            self.cell.load_adapter(f"adapter-{number}", adapter_path(number), bytes([number]), 8)
        # What the worker has on disk survives it.
        self.disk: dict[bytes, Content] = {}
        self.group = self.connect()
        self.results: deque[worker_pb2.StepResult] = deque()
        self.num_plans = 0
        self.largest_batch = 0
        self.largest_step = 0

    def connect(self) -> Group:
        """A worker with nothing in its blocks."""
        self.executor = SimExecutor(self.config, self.disk)
        d = self.executor.describe()
        self.group = self.cell.add_group(
            *(d.model, d.num_blocks, d.block_size, d.max_num_seqs, d.max_num_batched_tokens),
            d.num_state_blocks,
            num_memory_blocks=d.num_memory_blocks,
            num_disk_blocks=d.num_disk_blocks,
        )
        self.restore_tiers()
        return self.group

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        name: str = "",
        n: int = 1,
        priority: int = 0,
        deadline: float = 0.0,
        salt: str = "",
        adapter: int = 0,
        **params: Any,
    ) -> Request:
        lora = adapter_keys(self.cell.adapters.adapters[adapter]) if adapter else None
        values = {"temperature": 0.0, "seed": 7, "max_tokens": max_tokens, **params}
        submission = Submission(
            request_id=name or f"r{len(self.cell.requests)}",
            tenant="",
            body_digest=b"",
            prompt=np.array(prompt, np.int32),
            params=sampling_pb2.SamplingParams(**values),
            n=n,
            hashes=hash_prompt(prompt, self.config.block_size, salt, lora),
            adapter=adapter,
            cache_salt=salt,
            priority=priority,
            deadline=deadline,
        )
        return self.cell.submit(submission, self.now)[0]

    def plan(self) -> Plan | None:
        plan = plan_step(self.group, self.now)
        if plan is not None:
            self.num_plans += 1
            self.largest_batch = max(self.largest_batch, self.group.batch.num_running)
            self.largest_step = max(self.largest_step, plan.num_computed_tokens)
            wire = plan_to_pb(plan, 1).SerializeToString()
            self.results.append(self.executor.run(worker_pb2.StepPlan.FromString(wire)))
        return plan

    def fold(self) -> None:
        plan = fold_step(self.group, result_from_pb(self.results.popleft()), self.now)
        self.cell.journal.stepped(self.group.index, plan, self.group.queue.num_waiting, 0, 0, 0, 0)

    def transfer(self) -> int:
        """What has ended is told to the core; returns how much that was."""
        transfers = self.executor.transfers
        ended = [] if transfers is None else transfers.take_done()
        for done in ended:
            self.group.transferred(done, failed_positions(done))
        return len(ended)

    def lose(self, *, keep_blocks: bool) -> None:
        """The worker is gone and comes back, with or without its blocks."""
        self.disconnect(keep_blocks=keep_blocks)
        if keep_blocks:
            self.executor.reset()
            self.restore_tiers()
            self.cell.readmit_group(self.group)
        else:
            self.group = self.connect()

    def restore_tiers(self) -> None:
        """As at a claim."""
        if self.executor.transfers is not None and self.group.tiers is not None:
            memory, disk = self.executor.transfers.inventory()
            self.group.tiers.restore(split_hashes(memory), split_hashes(disk))

    def disconnect(self, *, keep_blocks: bool = False) -> None:
        """The worker is gone."""
        self.results.clear()
        self.cell.lose_group(self.group, keep_blocks=keep_blocks, now=self.now)

    def run(self, limit: int = 5000) -> None:
        """Until nothing is left, two plans in flight."""
        for _ in range(limit):
            while self.plan() is not None:
                pass
            if not self.results and (self.transfer() or self.transfer()):
                continue
            if not self.results:
                assert not self.cell.num_waiting, "sequences wait, and nothing runs: a deadlock"
                return
            self.fold()
            self.transfer()
            self.now += 1.0
        raise AssertionError("no end in sight")

    def expected(self, sequence: Sequence) -> list[int]:
        """All that the model would say, to max_tokens."""
        submission = sequence.request.submission
        seed = sequence_seed(submission.params.seed, sequence.choice) if submission.params.temperature else 0
        return continue_greedily(submission.prompt.tolist(), submission.params.max_tokens, self.config, seed)

    def output(self, sequence: Sequence) -> list[int]:
        return self.cell.output_tokens(sequence).tolist()
