"""Seeds of the simulation: whatever dies, freezes or gets lost, every promise holds. And the simulation notices when
one does not: bugs that are planted are found."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from simulation.oracle import model_output
from simulation.runs import run_seeds, summary
from simulation.scenario import VOCABULARY, run_seed

from kvern.v1 import sampling_pb2, session_pb2
from kvern_scheduler import server
from kvern_scheduler.committer import Committer
from kvern_scheduler.core.changes import Changes
from kvern_scheduler.core.group import Group
from kvern_scheduler.core.tiers import STORE, Tiers
from kvern_scheduler.engine import Engine
from kvern_scheduler.recovery import Archive
from kvern_scheduler.store.memory import MemoryStore
from kvern_scheduler.workers import Worker
from kvern_worker.service import WorkerServicer
from kvern_worker.sim import SimConfig, continue_greedily

SEEDS = int(os.environ.get("KVERN_SIMULATION_SEEDS", "300"))
"""10,000 take some minutes a core."""
JOBS = int(os.environ.get("KVERN_SIMULATION_JOBS", "1"))
CHUNK = 50
BUDGET_S = float(os.environ.get("KVERN_SIMULATION_BUDGET_S", "60"))
"""No new seeds are begun after this, so that a busy machine does not fail for being busy."""
FEWEST = 100


@pytest.mark.timeout(3600)
def test_whatever_fails_every_promise_holds() -> None:
    started = time.perf_counter()
    reports = []
    for first in range(0, SEEDS, CHUNK):
        reports += run_seeds(range(first, min(first + CHUNK, SEEDS)), JOBS)
        seconds = time.perf_counter() - started
        if len(reports) >= FEWEST and seconds > BUDGET_S and "KVERN_SIMULATION_SEEDS" not in os.environ:
            break
    print(summary(reports, seconds))
    broken = {report.seed: report.violations for report in reports if report.violations}
    assert not broken, "replay with: python -m simulation --seed N"
    assert sum(report.fenced for report in reports), "no zombie ever committed: the faults are too mild"
    assert sum(report.leaders for report in reports) > len(reports), "hardly any leader was replaced"


def test_without_faults_the_first_leader_stays() -> None:
    """Standbys start at the same time, and see a leader that still loads."""
    for seed in range(20):
        report = run_seed(seed, quiet=True)
        assert not report.violations
        assert report.leaders == 1


def test_the_same_seed_gives_the_same_trace() -> None:
    for seed in range(3):
        first, second = run_seed(seed, tracing=True), run_seed(seed, tracing=True)
        assert first.trace and first == second


def test_the_oracle_knows_what_the_model_says() -> None:
    """It shares no code with the simulated executor."""
    prompt = [5, 900, 17]
    for seed, temperature in ((0, 0.0), (2**63 + 5, 1.0)):
        params = sampling_pb2.SamplingParams(max_tokens=40, seed=seed, temperature=temperature)
        expected = continue_greedily(prompt, 40, SimConfig(vocab_size=VOCABULARY), seed)
        assert model_output(prompt, params, 0, VOCABULARY) == expected


Plant = Callable[[pytest.MonkeyPatch], None]


def skip_the_generation_check(patch: pytest.MonkeyPatch) -> None:
    """Recovery believes the whole committed index, whatever the worker's inventory says."""
    restore = Worker._restore_index

    def restore_all(worker: Any, group: Any, generations: Any, entries: Any) -> None:
        if entries is not None:
            generations = generations.copy()
            generations[entries.blocks] = entries.generations
        restore(worker, group, generations, entries)

    patch.setattr(Worker, "_restore_index", restore_all)


def expose_before_commit(patch: pytest.MonkeyPatch) -> None:
    """Gateways are told when a step is folded, not when its commit is acknowledged. A request's admission and end
    still wait."""
    make, add = Committer.__init__, Committer.add

    def make_hasty(
        committer: Any, store: Any, leadership: Any, release: Any, *rest: Any, **more: Any
    ) -> None:
        def release_rest(changes: Changes) -> None:
            changes.tokens = []
            release(changes)

        make(committer, store, leadership, release_rest, *rest, **more)
        committer.release_at_once = release

    def add_hastily(committer: Any, changes: Changes) -> None:
        committer.release_at_once(Changes(tokens=list(changes.tokens)))
        add(committer, changes)

    patch.setattr(Committer, "__init__", make_hasty)
    patch.setattr(Committer, "add", add_hastily)


def accept_a_stale_commit(patch: pytest.MonkeyPatch) -> None:
    """The store does not compare the epoch."""
    commit = MemoryStore.commit_now
    patch.setattr(
        MemoryStore,
        "commit_now",
        lambda store, epoch, *rest: commit(store, max(epoch, store._epoch), *rest),
    )


def accept_a_stale_plan(patch: pytest.MonkeyPatch) -> None:
    """Workers follow whoever spoke last."""
    accept = WorkerServicer._accept

    def accept_any(servicer: Any, stream: Any, plan: Any) -> None:
        stream.replaced = False
        servicer._epoch = min(servicer._epoch, plan.epoch)
        accept(servicer, stream, plan)

    patch.setattr(WorkerServicer, "_accept", accept_any)


def believe_a_group_of_another_instance(patch: pytest.MonkeyPatch) -> None:
    """A worker that came back empty, and whose stream breaks while it is claimed, counts as known afterwards."""
    claim = Worker._claim

    async def claim_early(worker: Any, stub: Any, description: Any, entries: Any) -> None:
        try:
            await claim(worker, stub, description, entries)
        except BaseException:
            worker.instance_id = description.instance_id
            raise

    patch.setattr(Worker, "_claim", claim_early)


def load_once(patch: pytest.MonkeyPatch) -> None:
    """A store that goes away between the lease and the load ends the scheduler."""
    patch.setattr(server, "load", lambda store: store.load())


def forget_what_earlier_leaders_ended(patch: pytest.MonkeyPatch) -> None:
    """A request that has ended is begun anew for whoever asks the next leader."""
    patch.setattr(Archive, "may_know", lambda *_: False)


def keep_the_index_of_gone_workers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Committer, "drop_instance", lambda *_: None)


def let_any_gateway_take_over(patch: pytest.MonkeyPatch) -> None:
    """A gateway that was frozen takes a request back from the one that its client has gone to."""
    attach = Engine.attach

    def attach_any(engine: Any, session: Any, pb: session_pb2.Attach) -> None:
        attach(
            engine,
            session,
            session_pb2.Attach(
                **{f.name: v for f, v in pb.ListFields() if f.name not in ("claim", "asked_unix_ms")}
            ),
        )

    patch.setattr(Engine, "attach", attach_any)


def let_moving_blocks_go(patch: pytest.MonkeyPatch) -> None:
    """A block that is being stored to a tier may be handed out and written meanwhile."""
    begin = Tiers._begin

    def begin_unpinned(tiers: Any, kind: Any, *rest: Any, **more: Any) -> Any:
        transfer = begin(tiers, kind, *rest, **more)
        if kind == STORE:
            tiers.release(transfer)
            transfer.pinned = transfer.pinned[:0]
        return transfer

    patch.setattr(Tiers, "_begin", begin_unpinned)


def use_blocks_before_they_come(patch: pytest.MonkeyPatch) -> None:
    """A load counts as done as soon as it is planned."""
    load = Tiers.load

    def load_at_once(tiers: Any, hits: Any, hashes: Any) -> Any:
        transfer = load(tiers, hits, hashes)
        tiers._pool.enter(transfer.blocks, hashes)
        tiers._loads.clear()
        return transfer

    patch.setattr(Tiers, "load", load_at_once)


def trust_what_is_on_disk(patch: pytest.MonkeyPatch) -> None:
    """A load that failed counts as one that came."""
    transferred = Group.transferred
    patch.setattr(Group, "transferred", lambda group, done, failed: transferred(group, done, set()))


@pytest.mark.parametrize(
    ("plant", "symptom", "faults"),
    [
        (skip_the_generation_check, "no longer has the generation", ()),
        (expose_before_commit, "is shown, and is not committed", ()),
        (accept_a_stale_commit, ", while epoch ", ()),
        (accept_a_stale_plan, "computed a plan of epoch", ("leader loses the store",)),
        # The simulation found these.
        (
            believe_a_group_of_another_instance,
            "no longer has the generation",
            ("worker dies", "stream breaks"),
        ),
        (let_moving_blocks_go, "holds another prefix's KV", ()),
        (use_blocks_before_they_come, "holds another prefix's KV", ()),
        (trust_what_is_on_disk, "holds another prefix's KV", ("worker dies",)),
        (load_once, "failed: StoreUnavailable", ("scheduler dies", "store refuses")),
        (keep_the_index_of_gone_workers, "nothing moves", ()),
        (forget_what_earlier_leaders_ended, "was admitted twice", ("scheduler stops", "gateway dies")),
        (
            let_any_gateway_take_over,
            "has taken this one over",
            ("gateway freezes", "scheduler dies"),
        ),
    ],
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Plant, symptom: str, faults: tuple[str, ...]
) -> None:
    """``faults``: kinds to look among; empty: all, as in the test of every promise."""
    plant(monkeypatch)
    for seed in range(400):
        if any(symptom in violation for violation in run_seed(seed, only=faults).violations):
            return
    raise AssertionError("the simulation does not notice")
