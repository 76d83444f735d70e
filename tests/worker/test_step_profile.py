"""Step times fitted to measured steps, and simulated workers that take as long."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from e2e.running import run_kvern

from kvern.errors import KvernError
from kvern.rpc.flags import group_addresses
from kvern.rpc.packing import pack_i32, pack_u32
from kvern.v1 import worker_pb2
from kvern.v1.sampling_pb2 import SamplingParams
from kvern_worker.sim import SimConfig, SimExecutor
from kvern_worker.step_profile import StepProfile, Work, fit, read_profile, relative_errors

TRUE = StepProfile(fixed_us=4000, token_us=35, pair_us=0.02, sequence_us=60, key_us=0.3)


def works(count: int) -> list[Work]:
    """Random steps: prompts, decodes, or both."""
    random = np.random.default_rng(0)
    made = []
    for kind in random.integers(0, 3, count):
        chunks = random.integers(1, 4) if kind != 0 else 0
        starts = random.integers(0, 1000, chunks)
        ends = starts + random.integers(1, 500, chunks)
        contexts = random.integers(1, 2000, random.integers(1, 64) if kind != 1 else 0)
        made.append(Work.of(starts, ends, contexts))
    return made


def test_work_counts_every_pair_of_a_query_and_a_key() -> None:
    """Against counting them one by one."""
    work = Work.of(np.array([0, 7]), np.array([5, 9]), np.array([3, 11]))
    pairs = sum(position + 1 for start, end in ((0, 5), (7, 9)) for position in range(start, end))
    assert (work.tokens, work.pairs, work.sequences, work.keys) == (7, pairs, 2, 14)


def test_the_terms_are_found_again_under_noise() -> None:
    steps = works(300)
    noise = np.random.default_rng(1).normal(1, 0.05, 300)
    measured = [TRUE.us(work) * factor for work, factor in zip(steps, noise, strict=True)]
    found = fit(steps, measured)
    others = works(400)[300:]
    assert np.median(relative_errors(found, others, [TRUE.us(work) for work in others])) < 0.02
    assert found.fixed_us == pytest.approx(TRUE.fixed_us, rel=0.1)


def test_no_term_is_negative() -> None:
    steps = works(100)
    measured = [5000 - 0.5 * work.sequences for work in steps]
    found = fit(steps, measured)
    assert min(found.fixed_us, found.token_us, found.pair_us, found.sequence_us, found.key_us) >= 0


def test_a_simulated_step_takes_what_the_profile_says(tmp_path: Path) -> None:
    """Nine steps of the fewest: a neighbour on the machine only adds to them."""
    profile = StepProfile(fixed_us=10_000, token_us=100, key_us=10)
    path = tmp_path / "profile.json"
    profile.write(path, {"model": "none"})
    executor = SimExecutor(SimConfig(profile=read_profile(str(path)), speed=0.5, num_blocks=64))
    new = worker_pb2.NewSequence(
        slot=0,
        token_ids=pack_i32(np.arange(3, 103)),
        num_prompt_tokens=100,
        params=SamplingParams(temperature=0),
        block_ids=pack_u32(np.arange(8)),
        block_generations=pack_u32(np.ones(8, np.uint32)),
    )
    zero = pack_u32([0])

    def seconds(plan: worker_pb2.StepPlan) -> float:
        start = time.perf_counter()
        executor.run(plan)
        return time.perf_counter() - start

    prompt = seconds(
        worker_pb2.StepPlan(new_sequences=[new], prefill_slots=zero, prefill_lengths=pack_u32([100]))
    )
    decodes = [seconds(worker_pb2.StepPlan(decode_slots=zero)) for _ in range(9)]
    assert prompt >= 2 * 0.020
    assert 2 * 0.011 <= min(decodes) < 2 * 0.016


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no fixed_us"),
        ('{"fixed_us": -1}', "fixed_us must be a number of at least 0, is -1"),
        ('{"fixed_us": 1, "key_us": "x"}', "key_us must be"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(KvernError, match=message):
        read_profile(str(path))


def test_groups_in_one_process_have_addresses_of_their_own() -> None:
    assert group_addresses("unix:/x/w.sock", 3) == ["unix:/x/w.sock", "unix:/x/w.sock.1", "unix:/x/w.sock.2"]
    assert group_addresses("127.0.0.1:50061", 2) == ["127.0.0.1:50061", "127.0.0.1:50062"]


@pytest.mark.slow
def test_a_hundred_groups_serve_on_one_machine(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(
        json.dumps({"fixed_us": 20_000, "token_us": 50, "sequence_us": 200})
    )
    flags = ("--device", "sim", "--sim-profile", str(tmp_path / "profile.json"), "--sim-groups", "100")
    with run_kvern(
        tmp_path / "run", *flags, "--sim-num-blocks", "512", "--max-num-seqs", "8", "--store", "memory"
    ) as running:
        prompts = [f"Prompt {index}" for index in range(100)]
        answer = running.complete(prompts, max_tokens=4, ignore_eos=True)
        assert len(answer["choices"]) == 100
        log = (running.data_dir / "logs" / "worker.log").read_text()
        assert log.count("worker is ready") == 100
        used = running.client.get("/metrics").text
        assert "vllm:generation_tokens_total" in used
