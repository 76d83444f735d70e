"""Hypothesis drives pool, index, planner and fold against a naive model: the tokens that each sequence must give.

The strict simulated worker checks every KV position that a step reads, so wrong block accounting cannot pass.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler.core_harness import CoreHarness

from kvern.v1 import sampling_pb2
from kvern_scheduler.core.cell import MAX_LOSSES
from kvern_scheduler.core.eviction import POLICIES
from kvern_scheduler.core.requests import Request, State
from kvern_worker.sim import SimConfig

BASE = [(7 * i) % 23 + 3 for i in range(40)]


class CoreMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(10, 40),
        budget=st.sampled_from([3, 8, 16, 64]),
        slots=st.integers(1, 6),
        caching=st.booleans(),
        max_preemptions=st.integers(0, 2),
        state_blocks=st.sampled_from([None, None, (0, 8), (1, 4), (3, 8), (20, 4), (20, 12)]),
        tiers=st.sampled_from([(0, 0), (1, 0), (3, 5), (8, 30), (50, 0)]),
        policy=st.sampled_from(POLICIES),
    )
    def start(
        self,
        num_blocks: int,
        budget: int,
        slots: int,
        caching: bool,
        max_preemptions: int,
        state_blocks: tuple[int, int] | None,
        tiers: tuple[int, int],
        policy: str,
    ) -> None:
        num_state_blocks, state_block_size = state_blocks or (0, 0)
        config = SimConfig(
            num_blocks=num_blocks,
            block_size=4,
            num_state_blocks=num_state_blocks,
            state_block_size=state_block_size,
            max_num_seqs=slots,
            max_num_batched_tokens=budget,
            max_model_len=40,
            vocab_size=29,
            num_memory_blocks=tiers[0],
            num_disk_blocks=tiers[1],
            bad_disk_blocks=3,
            strict=True,
        )
        self.core = CoreHarness(
            config,
            enable_prefix_caching=caching,
            max_preemptions=max_preemptions,
            kv_offloading_policy=policy,
        )
        self.requests: list[Request] = []

    @rule(
        shared=st.integers(0, 20),
        own=st.lists(st.integers(0, 28), max_size=6),
        max_tokens=st.integers(1, 14),
        n=st.sampled_from([1, 1, 2, 3]),
        priority=st.sampled_from([0, 0, 1, -1]),
        stops=st.lists(st.integers(0, 28), max_size=2),
        min_tokens=st.integers(0, 3),
        temperature=st.sampled_from([0.0, 1.0]),
        salt=st.sampled_from(["", "s"]),
    )
    def submit(
        self, shared: int, own: list[int], max_tokens: int, stops: list[int], min_tokens: int, **fields: Any
    ) -> None:
        prompt = BASE[:shared] + own or [1]
        request = self.core.submit(
            prompt,
            max_tokens,
            name=f"r{len(self.requests)}",
            stop_token_ids=stops,
            min_tokens=min(min_tokens, max_tokens),
            **fields,
        )
        self.requests.append(request)

    @rule()
    def plan(self) -> None:
        self.core.plan()

    @precondition(lambda self: self.core.results)
    @rule()
    def fold(self) -> None:
        self.core.fold()
        self.core.now += 1

    @rule()
    def transfer(self) -> None:
        self.core.transfer()

    @precondition(lambda self: self.core.results)
    @rule()
    def fold_and_plan(self) -> None:
        self.core.fold()
        while self.core.plan() is not None:
            pass

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), stopped=st.booleans())
    def cancel(self, data: st.DataObject, stopped: bool) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.core.cell.cancel(data.draw(st.sampled_from(request.sequences)), self.core.now, stopped=stopped)

    @rule(keep_blocks=st.booleans())
    def lose_worker(self, keep_blocks: bool) -> None:
        self.core.lose(keep_blocks=keep_blocks)

    @invariant()
    def accounting_holds(self) -> None:
        if hasattr(self, "core"):
            self.core.cell.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.run()
        self.core.cell.check_integrity()
        for pool in self.core.group.pools:
            assert pool.num_available == pool.num_blocks
        for request in self.requests:
            for sequence in request.sequences:
                self.check(sequence)

    def check(self, sequence: Any) -> None:
        assert sequence.state is State.FINISHED and sequence.finish is not None
        params = sequence.request.submission.params
        whole, got = self.core.expected(sequence), self.core.output(sequence)
        assert got == whole[: len(got)]
        assert sequence.finish.num_output_tokens == len(got)
        ends = [
            i + 1 for i, t in enumerate(whole) if t in params.stop_token_ids and i + 1 >= params.min_tokens
        ]
        reason = sequence.finish.reason
        if sequence.num_losses >= MAX_LOSSES:
            assert reason == sampling_pb2.FINISH_REASON_ERROR
        elif sequence.finish.stop_token_id is not None:
            assert reason == sampling_pb2.FINISH_REASON_STOP
            assert len(got) == ends[0] and got[-1] == sequence.finish.stop_token_id
        elif reason == sampling_pb2.FINISH_REASON_LENGTH:
            assert len(got) == params.max_tokens and not ends
        else:  # cancelled before its natural end
            assert len(got) < (ends[0] if ends else params.max_tokens)
            assert reason in (sampling_pb2.FINISH_REASON_ABORT, sampling_pb2.FINISH_REASON_STOP)


CoreMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCoreMachine = CoreMachine.TestCase
