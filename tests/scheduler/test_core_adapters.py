"""Adapters in a group's slots: never more in a step than there are, and nobody's tokens or cached blocks are another's."""

from __future__ import annotations

import random
from typing import Any

import pytest
from scheduler.core_harness import CoreHarness, adapter_path

from kvern.errors import KvernError
from kvern.v1 import error_pb2, sampling_pb2, worker_pb2
from kvern_scheduler.core.group import Group
from kvern_scheduler.core.plan import Plan
from kvern_scheduler.core.requests import Request, State
from kvern_worker.sim import SimConfig, SimExecutor, adapter_seed, continue_greedily

SIM = SimConfig(
    num_blocks=256, block_size=4, max_model_len=400, vocab_size=997, max_num_seqs=16, strict=True, max_loras=2
)


class Harness(CoreHarness):
    """Slots are filled when ``fill`` is called, which ``run`` does after every plan."""

    def __init__(self, config: SimConfig = SIM, **limits: Any) -> None:
        self.loading: list[tuple[int, int]] = []
        self.num_fills = 0
        super().__init__(config, **limits)

    def connect(self) -> Group:
        self.executor = SimExecutor(self.config)
        d = self.executor.describe()
        sizes = (d.num_blocks, d.block_size, d.max_num_seqs, d.max_num_batched_tokens)
        return self.cell.add_group(d.model, *sizes, max_loras=d.max_loras)

    def plan(self) -> Plan | None:
        plan = super().plan()
        self.loading += self.group.adapters.take_loads()
        if plan is not None:
            slots = set(self.group.batch.adapter_slot.tolist()) - {0}
            assert len(slots) <= self.config.max_loras
        return plan

    def fill(self) -> None:
        """The worker does what it was asked for."""
        loading, self.loading = self.loading, []
        for slot, number in loading:
            self.num_fills += 1
            place = worker_pb2.PlaceAdapterRequest(path=adapter_path(number), slot=slot + 1)
            self.executor.place_adapter(place)
            self.group.adapter_placed(slot, number)

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            while self.plan() is not None:
                pass
            self.group.check_integrity()
            if self.loading:
                self.fill()
                continue
            if not self.results:
                assert not self.cell.num_waiting, "sequences wait, and nothing runs: a deadlock"
                return
            self.fold()
            self.now += 1.0
        raise AssertionError("no end in sight")

    def check(self, request: Request) -> None:
        adapter = request.submission.adapter
        seed = adapter_seed(adapter_path(adapter)) if adapter else 0
        prompt, count = request.submission.prompt.tolist(), request.submission.params.max_tokens
        assert request.sequences[0].state is State.FINISHED
        assert self.output(request.sequences[0]) == continue_greedily(prompt, count, self.config, seed)


def test_more_adapters_than_slots_take_turns() -> None:
    harness = Harness()
    rng = random.Random(1)
    requests = [
        harness.submit([rng.randrange(3, 900) for _ in range(9)], rng.randint(3, 30), adapter=i % 5)
        for i in range(40)
    ]
    harness.run()
    for request in requests:
        harness.check(request)
    assert harness.num_fills >= 4


def test_a_popular_adapter_does_not_keep_its_slot_for_ever() -> None:
    """Adapters 1 and 2 hold both slots and always have someone new; the third gets its turn all the same."""
    harness = Harness()
    late = None
    waited = 0
    for turn in range(400):
        for adapter in (1, 2):
            if harness.cell.num_waiting < 4:
                harness.submit([turn % 900, adapter], 12, adapter=adapter)
        if turn == 20:
            late = harness.submit([5, 6, 7], 4, adapter=3)
        while harness.plan() is not None:
            pass
        harness.fill()
        if harness.results:
            harness.fold()
        if late is not None and late.num_unfinished == 0:
            waited = turn - 20
            break
    assert 0 < waited < 100


def test_while_an_adapter_loads_no_step_of_others_waits() -> None:
    harness = Harness()
    running = harness.submit([4, 5, 6], 60)
    for _ in range(3):
        harness.plan()
        harness.fold()
    waiting = harness.submit([7, 8, 9], 5, adapter=1)
    base = harness.submit([9, 9, 9], 5)  # behind it in the queue
    steps = harness.group.step
    for _ in range(20):
        assert harness.plan() is not None
        harness.fold()
    assert harness.group.step == steps + 20
    assert base.num_unfinished == 0
    assert waiting.sequences[0].state is State.WAITING
    assert harness.loading == [(0, 1)]
    harness.fill()
    harness.run()
    for request in (running, waiting, base):
        harness.check(request)


def test_a_slot_in_flight_is_not_given_away() -> None:
    harness = Harness(SimConfig(**{**vars(SIM), "max_loras": 1}))
    first = harness.submit([4, 5, 6], 200, adapter=1)
    harness.plan()
    harness.fill()
    assert harness.plan() is not None
    assert harness.plan() is not None  # two plans are in flight, both with adapter 1
    second = harness.submit([4, 5, 6], 5, adapter=2)
    harness.cell.cancel(first.sequences[0], harness.now)
    assert harness.plan() is None
    assert not harness.loading
    harness.fold()
    harness.plan()
    assert not harness.loading  # the second plan may still be computing
    harness.fold()
    harness.run()
    harness.check(second)


def test_cached_blocks_are_of_one_adapter() -> None:
    harness = Harness()
    prompt = list(range(3, 43))
    for adapter in (0, 1, 2):
        for again in (False, True):
            request = harness.submit(prompt, 8, adapter=adapter)
            harness.run()
            harness.check(request)
            assert (request.sequences[0].num_cached_tokens > 0) == again
        # What was decoded is found, too, by those who go on from it.
        longer = harness.submit(prompt + harness.output(request.sequences[0]) + [5], 1, adapter=adapter)
        harness.run()
        assert longer.sequences[0].num_cached_tokens == 44


def test_a_lost_worker_forgets_its_slots() -> None:
    for keep_blocks in (True, False):
        harness = Harness()
        requests = [harness.submit([3 + i, 4, 5], 30, adapter=i % 4) for i in range(8)]
        for _ in range(12):
            harness.plan()
            harness.fill()
            if harness.results:
                harness.fold()
        harness.loading.clear()
        harness.lose(keep_blocks=keep_blocks)
        harness.executor._adapters[:] = 0  # whatever a worker that comes back has in its slots
        harness.run()
        for request in requests:
            harness.check(request)


def test_an_adapter_that_does_not_load_ends_only_its_requests() -> None:
    harness = Harness()
    broken = harness.submit([4, 5], 5, adapter=1)
    fine = harness.submit([4, 5], 5, adapter=2)
    harness.plan()
    error = KvernError(error_pb2.ERROR_CODE_INVALID_ARGUMENT, "broken")
    assert harness.loading.pop(0) == (0, 1)
    harness.group.adapter_failed(0, 1, error, harness.now)
    harness.run()
    harness.check(fine)
    finish = broken.sequences[0].finish
    assert finish is not None
    assert finish.reason == sampling_pb2.FINISH_REASON_ERROR
    assert finish.error is error


def test_a_cancelled_wait_for_a_slot_is_no_wait() -> None:
    harness = Harness()
    request = harness.submit([4, 5], 5, adapter=1)
    harness.plan()
    harness.cell.cancel(request.sequences[0], harness.now)
    assert harness.cell.num_waiting == 0
    harness.fill()
    harness.run()
    harness.cell.check_integrity()


@pytest.mark.parametrize("seed", range(5))
def test_random_loads_end_with_the_right_tokens(seed: int) -> None:
    rng = random.Random(seed)
    tight = {"num_blocks": 40, "max_num_seqs": 6, "max_num_batched_tokens": rng.choice([6, 32])}
    harness = Harness(SimConfig(**{**vars(SIM), **tight, "max_loras": rng.randint(1, 3)}))
    requests = []
    for _ in range(60):
        if rng.random() < 0.6:
            prompt = [rng.randrange(3, 6)] * rng.randint(1, 20)
            requests.append(harness.submit(prompt, rng.randint(1, 25), adapter=rng.randrange(5)))
        harness.plan()
        if rng.random() < 0.4:
            harness.fill()
        if harness.results and rng.random() < 0.8:
            harness.fold()
        harness.cell.check_integrity()
    harness.run()
    for request in requests:
        harness.check(request)


def test_requests_prefer_the_group_that_has_their_adapter() -> None:
    """Not at any price: a wait that is longer than loading it is not worth it."""
    harness = Harness()
    near, far = harness.group, harness.connect()
    far.adapters.assign([1], 0)
    far.adapters.ready(*far.adapters.take_loads()[0])

    def placed(prompt: list[int], adapter: int) -> object:
        return harness.submit(prompt, 4, adapter=adapter).sequences[0].group

    assert placed([4, 5, 6], 2) is near
    assert placed([4, 5, 6], 1) is far
    assert [placed([9] * 390, 1) for _ in range(3)] == [far, far, near]


def test_adapters_that_no_worker_has_slots_for_are_refused() -> None:
    harness = Harness()
    request = harness.submit([4, 5], 5, adapter=1)
    harness.cell.lose_group(harness.group, keep_blocks=False, now=1.0)
    d = harness.executor.describe()
    harness.cell.add_group(d.model, d.num_blocks, d.block_size, d.max_num_seqs, d.max_num_batched_tokens)
    with pytest.raises(KvernError, match="no worker has slots"):
        harness.submit([4, 5], 5, adapter=1)
    assert request.sequences[0].state is State.WAITING  # another worker may have some
    harness.cell.end_without_slots(2.0)
    finish = request.sequences[0].finish
    assert finish is not None and finish.error is not None
    assert finish.error.code == error_pb2.ERROR_CODE_UNIMPLEMENTED
    harness.cell.check_integrity()


def test_a_drained_adapter_is_kept_while_someone_has_it() -> None:
    harness = Harness()
    request = harness.submit([4, 5], 5, adapter=1)
    assert harness.cell.unload_adapter("adapter-1")[1] == 1
    with pytest.raises(KvernError, match="unloaded"):
        harness.submit([4, 5], 5, adapter=1)
    harness.run()
    harness.check(request)
    assert harness.cell.adapters.adapters[1].draining
    harness.cell.forget(request)
    assert 1 not in harness.cell.adapters.adapters


def test_an_ordinary_end_says_nothing_new_of_adapters() -> None:
    harness = Harness()
    request = harness.submit([4, 5], 5, adapter=1)
    harness.run()
    harness.cell.take_changes()
    harness.cell.forget(request)
    assert harness.cell.take_changes().adapters is None
