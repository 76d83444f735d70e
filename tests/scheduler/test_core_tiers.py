"""KV tiers in the core: what is evicted from the device is loaded, not computed; nothing is used before it has come."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import pytest
from scheduler.core_harness import CoreHarness

from kvern.v1 import operations_pb2, worker_pb2
from kvern_scheduler.core.errors import ProtocolError
from kvern_scheduler.core.eviction import Arc, Lru
from kvern_scheduler.core.requests import State
from kvern_scheduler.timelines import timeline
from kvern_worker.sim import SimConfig

PROMPT = [(11 * i) % 23 + 3 for i in range(33)]
OTHER = [(5 * i) % 19 + 4 for i in range(60)]


def harness(
    num_memory: int = 64, num_disk: int = 0, num_blocks: int = 20, policy: str = "lru", **more: Any
) -> CoreHarness:
    config = SimConfig(
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=80,
        vocab_size=29,
        strict=True,
        num_memory_blocks=num_memory,
        num_disk_blocks=num_disk,
        **more,
    )
    return CoreHarness(config, kv_offloading_policy=policy)


def ask(core: CoreHarness, prompt: list[int]) -> int:
    """Runs it to its end and checks what it says; returns the tokens that were computed of its prompt and output."""
    before = core.executor.num_prefilled
    request = core.submit(prompt, 4)
    core.run()
    core.cell.check_integrity()
    sequence = request.sequences[0]
    assert sequence.state is State.FINISHED and core.output(sequence) == core.expected(sequence)
    return core.executor.num_prefilled - before


def test_what_was_evicted_is_loaded() -> None:
    core = harness()
    assert ask(core, PROMPT) == len(PROMPT)
    assert ask(core, OTHER) == len(OTHER)  # 16 of 20 blocks
    assert len(core.group.pool.match(core.cell.requests[1].sequences[0].hashes, 8)) == 3
    # All but the token whose logits are wanted.
    assert ask(core, PROMPT) == 1
    assert core.cell.requests[3].sequences[0].num_cached_tokens == len(PROMPT) - 1
    (choice,) = timeline(core.cell.journal, core.cell.requests[3].key[1], None, core.now).choices
    assert [w.reason for w in choice.phases[0].waits if w.seconds] == [operations_pb2.WAIT_REASON_LOADING]


def test_a_new_worker_finds_what_the_old_one_left_on_disk() -> None:
    core = harness(num_disk=64)
    ask(core, PROMPT)
    core.lose(keep_blocks=False)
    assert core.group.tiers is not None and core.group.tiers.sizes() == {"memory": 0, "disk": 9}
    assert ask(core, PROMPT) == 1
    # It is in memory again, too.
    assert core.group.tiers.sizes()["memory"] == 9


def test_what_cannot_be_read_is_computed() -> None:
    core = harness(num_disk=64, bad_disk_blocks=1)
    ask(core, PROMPT)
    core.lose(keep_blocks=False)
    assert ask(core, PROMPT) == len(PROMPT)


def test_requests_that_need_the_same_blocks_wait_for_one_load() -> None:
    core = harness()
    ask(core, PROMPT)
    ask(core, OTHER)
    before = core.executor.num_prefilled
    requests = [core.submit([*PROMPT, last], 4) for last in (3, 4)]
    assert core.plan() is not None
    assert core.group.tiers is not None and core.group.tiers.num_loading == 1
    assert [request.sequences[0].state for request in requests] == [State.WAITING] * 2
    core.run()
    assert core.executor.num_prefilled - before == 4


def test_others_run_while_one_waits_for_its_blocks() -> None:
    core = harness()
    ask(core, PROMPT)
    ask(core, OTHER)
    core.submit(PROMPT, 4, name="loads")
    runs = core.submit([9, 9, 9], 4, name="runs").sequences[0]
    core.plan()
    assert runs.state is State.RUNNING
    core.run()


def test_a_request_may_end_while_its_blocks_come() -> None:
    core = harness()
    ask(core, PROMPT)
    ask(core, OTHER)
    sequence = core.submit(PROMPT, 4, name="cancelled").sequences[0]
    core.plan()
    core.cell.cancel(sequence, core.now)
    core.cell.check_integrity()
    core.run()
    core.cell.check_integrity()
    assert core.group.pool.num_available == core.group.pool.num_blocks


def test_prompt_logprobs_are_not_answered_from_a_tier() -> None:
    core = harness()
    ask(core, PROMPT)
    ask(core, OTHER)
    before = core.executor.num_prefilled
    core.submit(PROMPT, 4, name="asks", prompt_logprobs=1)
    core.run()
    assert core.executor.num_prefilled - before == len(PROMPT)


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("capacities", [(1, 0), (3, 2), (7, 40)])
def test_random_loads_end_with_the_right_tokens(policy: str, capacities: tuple[int, int]) -> None:
    """The simulated worker checks that neither tier holds more than it can, and all that is read."""
    core = harness(*capacities, bad_disk_blocks=4, policy=policy)
    draw = random.Random(repr((policy, capacities)))
    prompts = [[draw.randrange(3, 29) for _ in range(24)] for _ in range(5)]
    for _ in range(40):
        request = core.submit([*draw.choice(prompts)[: draw.choice([8, 16, 24])], draw.randrange(29)], 5)
        if draw.random() < 0.5:
            core.run()
            sequence = request.sequences[0]
            assert core.output(sequence) == core.expected(sequence)
    core.run()
    core.cell.check_integrity()


def test_an_answer_to_nothing_is_refused() -> None:
    core = harness()
    with pytest.raises(ProtocolError):
        core.group.transferred(worker_pb2.TransferDone(id=7), set())


def naive_arc(capacity: int, keys: list[int]) -> list[bool]:
    """The paper's figure 4, line by line, on plain lists with the least recently used first."""
    t1: list[int] = []
    t2: list[int] = []
    b1: list[int] = []
    b2: list[int] = []
    p, hits = 0.0, []

    def replace(x: int) -> None:
        if t1 and (len(t1) > p or (x in b2 and len(t1) == p)):
            b1.append(t1.pop(0))
        else:
            b2.append(t2.pop(0))

    for x in keys:
        hits.append(x in t1 or x in t2)
        if hits[-1]:
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
        elif x in b1:
            p = min(capacity, p + max(1, len(b2) / len(b1)))
            replace(x)
            b1.remove(x)
            t2.append(x)
        elif x in b2:
            p = max(0, p - max(1, len(b1) / len(b2)))
            replace(x)
            b2.remove(x)
            t2.append(x)
        else:
            if len(t1) + len(b1) == capacity:
                if len(t1) < capacity:
                    b1.pop(0)
                    replace(x)
                else:
                    t1.pop(0)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= capacity:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * capacity:
                    b2.pop(0)
                replace(x)
            t1.append(x)
    return hits


@pytest.mark.parametrize("capacity", [1, 2, 5, 16])
def test_arc_is_the_papers(capacity: int) -> None:
    draw = random.Random(capacity)
    keys = [int(draw.paretovariate(0.7)) % (4 * capacity) for _ in range(500)]
    keys += list(range(100, 100 + 3 * capacity)) + [int(draw.paretovariate(0.7)) for _ in range(500)]
    cache, hits = Arc(capacity), []
    for key in keys:
        name = key.to_bytes(4, "big")
        hits.append(name in cache)
        cache.touch(name) if hits[-1] else cache.insert(name)
        assert len(cache) <= capacity
    assert hits == naive_arc(capacity, keys)


def test_lru_drops_the_least_recently_used() -> None:
    cache, model = Lru(4), OrderedDict[bytes, None]()
    draw = random.Random(0)
    for _ in range(300):
        key = bytes([draw.randrange(9)])
        if key in model:
            model.move_to_end(key)
            cache.touch(key)
            continue
        left = model.popitem(last=False)[0] if len(model) == 4 else None
        model[key] = None
        assert cache.insert(key) == left
