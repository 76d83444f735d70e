"""One seed: a cluster, requests, faults, and what must hold in the end."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from simulation.callers import Caller
from simulation.faults import Faults
from simulation.network import Network, SimChannel, SimServer
from simulation.nodes import Cluster
from simulation.oracle import Oracle, Spec, model_output
from simulation.stores import StoreServer
from simulation.world import World

from kvern.rpc import channel
from kvern.rpc import server as rpc_server
from kvern.v1 import sampling_pb2
from kvern_gateway import leaders, open_requests, scheduler_client
from kvern_scheduler import committer, engine, metrics, recovery, server, service, sessions, workers
from kvern_scheduler.core.errors import IntegrityError
from kvern_scheduler.core.requests import State
from kvern_worker import service as worker_service
from kvern_worker import sim as worker_sim
from kvern_worker.sim import SimConfig

_SIMULATED = (
    *(committer, engine, recovery, server, service, sessions, workers),
    *(worker_service, worker_sim, leaders, open_requests, scheduler_client),
)
MAX_EVENTS = 200_000
PATIENCE_S, PATIENCE_STEPS = 6.0, 20
"""Virtual seconds, and steps beside them, that may go by without progress once nothing fails any more. A step whose
answer was lost is waited for for 3 s, and so may the claim after it be; computing a preempted sequence again shows no
token for 8 steps."""
CHECK_S = 0.05
VOCABULARY = 997
# A model that also keeps states.
HYBRID = {"num_state_blocks": 3, "state_block_size": 8}
# One with tiers below its device.
TIERS = {"num_memory_blocks": 8, "num_disk_blocks": 20, "bad_disk_blocks": 5}


@dataclass
class Report:
    """What a seed showed. ``violations`` is empty, or there is a bug."""

    seed: int
    violations: list[str] = field(default_factory=list)
    events: int = 0
    messages: int = 0
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    pause: float = 0.0
    """The longest virtual time without progress after the last fault."""
    leaders: int = 0
    fenced: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)


class Progress:
    """Knows when nothing has moved for ``patience`` seconds after ``last``, which may lie ahead: faults may last so
    long."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.last = self.longest = 0.0
        self._achieved = 0

    def stalled(self, now: float, achieved: int) -> bool:
        self.longest = max(self.longest, now - self.last)
        if achieved != self._achieved:
            self._achieved, self.last = achieved, max(self.last, now)
        return now - self.last > self.patience


class Simulation:
    """``quiet``: no faults. ``only``: kinds of faults; empty: what the seed chooses."""

    def __init__(
        self, seed: int, *, tracing: bool = False, quiet: bool = False, only: Collection[str] = ()
    ) -> None:
        self.seed = seed
        world = self.world = World(seed, tracing=tracing)
        draw = world.random
        self.network = Network(world)
        self.store = StoreServer(self.network, lease_s=1.0)
        self.oracle = Oracle(world.note)
        self.store.committed = self.oracle.committed
        self.store.acquired = self.oracle.acquired
        self.network.watchers.requested = self.oracle.requested
        self.network.watchers.responded = self.oracle.exposed
        self.network.watchers.broke = self._broke
        self.sim = SimConfig(
            vocab_size=VOCABULARY,
            num_blocks=draw.choice([10, 12, 16, 24]),
            block_size=4,
            max_model_len=64,
            max_num_seqs=draw.choice([2, 4, 8]),
            max_num_batched_tokens=draw.choice([8, 16, 32]),
            strict=True,
            **random.Random(f"states {seed}").choice([{}, TIERS, HYBRID]),
        )
        self.network.step_s = draw.choice([0.005, 0.02, 0.02, 0.08, 0.2])
        self.cluster = Cluster(world, self.network, self.store, self.oracle, self.sim)
        self.oracle.forgets = draw.random() < 0.15
        self.callers: list[Caller] = []
        self.progress = Progress(PATIENCE_S + PATIENCE_STEPS * self.network.step_s)
        self.faults: Faults | None = None
        self.quiet = quiet
        self.only = only

    def _broke(self, who: str, error: Exception) -> None:
        self.oracle.violated(f"unforeseen error in a handler of {who}: {error!r}")

    def run(self) -> Report:
        world, draw = self.world, self.world.random
        self.cluster.start(draw.randint(2, 3), draw.choice([1, 1, 2]), draw.choice([1, 2, 2]))
        window = draw.uniform(0.3, 1.5) + 5 * self.network.step_s
        self._make_callers(window)
        if not self.quiet:
            self.faults = Faults(self.cluster, window + 0.3, self.only)
        self.progress.last = window + 0.3
        world.after(CHECK_S, self._check_now)
        finished = world.run(self._finished, math.inf, MAX_EVENTS)
        if not finished and not self.oracle.violations:
            self.oracle.violated(f"no end in sight after {MAX_EVENTS} events; {self._waiting()}")
        if not self.oracle.violations:
            self._check_end()
        return self._report()

    def _make_callers(self, window: float) -> None:
        draw = self.world.random
        burst = draw.choice([1, 1, 4])
        roots = [[draw.randrange(3, VOCABULARY) for _ in range(16)] for _ in range(2)]
        capacity = min(self.sim.max_model_len, self.sim.num_blocks * self.sim.block_size)
        for number in range(draw.randint(3, 10)):
            prompt = draw.choice(roots)[: draw.choice([4, 8, 12, 16])]
            prompt += [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, 12))]
            params = sampling_pb2.SamplingParams(
                temperature=draw.choice([0.0, 0.0, 1.0]),
                seed=draw.randrange(2**63),
                max_tokens=min(draw.choice([1, 4, 8, 16, 24, 32]), capacity - len(prompt)),
            )
            n = draw.choice([1, 1, 1, 2, 3])
            if draw.random() < 0.2:
                said = model_output(prompt, params, 0, VOCABULARY)
                params.stop_token_ids.append(draw.choice(said))
            if draw.random() < 0.25:
                params.logprobs = draw.choice([0, 2])
            if draw.random() < 0.15:
                params.prompt_logprobs = 1
            start = 0.1 + window * draw.random() ** burst
            deadline = self.world.time() + start + 2 * draw.random() if draw.random() < 0.08 else 0.0
            cancel_after = draw.random() * 0.5 if draw.random() < 0.12 else -1.0
            stop_at = draw.randint(1, 10) if draw.random() < 0.08 else -1
            spec = Spec(
                f"r{number}",
                prompt,
                params,
                n,
                priority=draw.choice([0, 0, 0, 1]),
                resumable=draw.random() < 0.85,
                outputs=[model_output(prompt, params, choice, VOCABULARY) for choice in range(n)],
                cancels=cancel_after >= 0 or stop_at >= 0,
                deadline=deadline,
            )
            self.oracle.specs[spec.request_id] = spec
            caller = Caller(self.cluster, spec, cancel_after, stop_at)
            self.callers.append(caller)
            self.world.after(start, caller.begin)

    def _finished(self) -> bool:
        if self.oracle.violations:
            return True
        if not all(caller.done for caller in self.callers):
            return False
        return self._settled()

    def _settled(self) -> bool:
        """There is a leader that has nothing left to do, and has told it to the store."""
        leader = self.cluster.leader
        if leader is None or leader.engine is None or leader.process.frozen:
            return False
        cell = leader.engine.cell
        groups = cell.groups.values()
        idle = all(group.batch.num_running == 0 and not group.in_flight for group in groups)
        idle &= not any(group.tiers is not None and group.tiers.is_moving for group in groups)
        ended = all(s.announced for request in cell.requests.values() for s in request.sequences)
        stored = self.oracle.stored.values()
        instances = {worker.servicer.instance_id for worker in self.cluster.workers if worker.process.alive}
        if not instances.issuperset(self.store.memory._index):
            return False  # the index of a worker that is no more is to go
        return idle and ended and cell.num_waiting == 0 and all(all(s.finishes) for s in stored)

    # -- checks -------------------------------------------------------------------------------------------------

    def _check_now(self) -> None:
        self.world.after(CHECK_S, self._check_now)
        for scheduler in self.cluster.schedulers:
            if scheduler.engine is not None and scheduler.process.alive:
                self._check_integrity(scheduler.engine, scheduler.name)
        if self.progress.stalled(self.world.now, self._achieved()):
            self.oracle.violated(f"nothing moves since {self.progress.last:.1f} s; {self._waiting()}")

    def _achieved(self) -> int:
        """Grows with each token and end, committed or told, and with nothing else: what repeats is no progress."""
        stored = self.oracle.stored.values()
        told = sum(len(history) for caller in self.callers for history in caller.history)
        ends = sum(finish is not None for request in stored for finish in request.finishes)
        done = sum(caller.done for caller in self.callers)
        return self.oracle.num_committed_tokens + told + ends + done

    def _waiting(self) -> str:
        waiting = [caller.spec.request_id for caller in self.callers if not caller.done]
        return f"{', '.join(waiting)} wait" if waiting else "the last leader is not done"

    def _check_integrity(self, leader: engine.Engine, name: str) -> None:
        try:
            leader.cell.check_integrity()
        except IntegrityError as error:
            self.oracle.violated(f"{name}: {error}")

    def _check_end(self) -> None:
        oracle = self.oracle
        leader = self.cluster.leader
        assert leader is not None and leader.engine is not None
        self._check_integrity(leader.engine, leader.name)
        for group in leader.engine.cell.groups.values():
            leaks = [pool.num_blocks - pool.num_available for pool in group.pools]
            if any(leaks) or group.num_reserved:
                oracle.violated(f"group {group.index}: blocks leak: {leaks} of each pool")
        for request in leader.engine.cell.requests.values():
            for sequence in request.sequences:
                if sequence.state is not State.FINISHED or not sequence.announced:
                    oracle.violated(f"request {request.rid} is not over")
        for stored in oracle.stored.values():
            for choice, finish in enumerate(stored.finishes):
                assert finish is not None
                oracle.check_finish(stored.spec, choice, finish, self.world.time())
        for caller in self.callers:
            stored_request = oracle.stored.get(caller.spec.request_id)
            for choice, history in enumerate(caller.history):
                committed = stored_request.tokens[choice] if stored_request is not None else []
                if history != committed[: len(history)]:
                    oracle.violated(
                        f"{caller.spec.request_id}.{choice}: the client has tokens that are not committed"
                    )

    def _report(self) -> Report:
        oracle = self.oracle
        return Report(
            self.seed,
            list(oracle.violations),
            self.world.num_events,
            self.network.num_messages,
            len(self.callers),
            oracle.num_committed_tokens,
            self.world.now,
            self.progress.longest,
            oracle.num_leaders,
            oracle.num_fenced,
            self.faults.counts if self.faults is not None else Counter(),
            self.world.trace,
        )


class _Time:
    """The ``time`` module, for the modules that are simulated."""

    def __init__(self, world: World) -> None:
        self.time = self.monotonic = self.perf_counter = world.time

    def time_ns(self) -> int:
        return int(self.time() * 1e9)

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing may block")


class _NoMetrics:
    """Prometheus metrics are not what is simulated."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@contextlib.contextmanager
def simulated(simulation: Simulation) -> Iterator[None]:
    """Puts virtual time, the seed's randomness and the simulated network into the modules of the services."""
    world, network, cluster = simulation.world, simulation.network, simulation.cluster
    clock = _Time(world)

    def make_engine(*arguments: Any, **options: Any) -> engine.Engine:
        made = engine.Engine(*arguments, **options, clock=world.time)
        cluster.note_engine(made)
        return made

    def make_server(names: Any, tls: None = None) -> SimServer:
        assert world.current is not None
        return SimServer(network, world.current)

    def make_channel(target: str, tls: None = None) -> SimChannel:
        return SimChannel(network, target)

    replaced = {
        id(time): clock,
        id(channel.create_channel): make_channel,
        id(rpc_server.Server): make_server,
        id(metrics.Metrics): _NoMetrics,
    }
    patches: list[tuple[Any, str, Any]] = [
        (module, name, replaced[id(value)])
        for module in _SIMULATED
        for name, value in vars(module).items()
        if id(value) in replaced and getattr(value, "__module__", "") != module.__name__
    ]
    patches += [
        (scheduler_client, "random", drawn := random.Random(simulation.seed)),
        (leaders, "random", drawn),
        (workers, "STEP_TIMEOUT_S", 3.0),
        (server, "Engine", make_engine),
        (server, "gc", mock.Mock()),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, value in patches:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


class _TraceLogs(logging.Handler):
    """The services' logs, under the process that said it."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        current = self._world.current
        self._world.note(
            current.name if current is not None else "", f"{record.levelname}: {record.getMessage()}"
        )


def run_seed(seed: int, *, tracing: bool = False, quiet: bool = False, only: Collection[str] = ()) -> Report:
    """Runs a seed. The same seed gives the same report, trace included."""
    simulation = Simulation(seed, tracing=tracing, quiet=quiet, only=only)
    root = logging.getLogger()
    handler = _TraceLogs(simulation.world)
    level, disabled = root.level, root.manager.disable
    collecting = gc.isenabled()
    gc.disable()  # what it collects, and when, depends on more than the seed
    try:
        if tracing:
            logging.disable(logging.NOTSET)
            root.addHandler(handler)
            root.setLevel(logging.INFO)
        else:
            logging.disable(logging.CRITICAL)
        with simulated(simulation):
            try:
                return simulation.run()
            finally:
                simulation.world.close()
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        logging.disable(disabled)
        if collecting:
            gc.enable()
