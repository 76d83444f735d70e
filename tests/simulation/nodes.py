"""The services in simulated processes, each kept up by a supervisor that starts it again.

Real code runs in all of them: ``kvern_scheduler.server.serve`` whole, ``WorkerServicer`` over the strict simulated
executor, and the gateway's ``SchedulerClient``.
"""

from __future__ import annotations

import argparse
import asyncio

from simulation.network import Network, SimChannel, SimServer
from simulation.oracle import Oracle
from simulation.stores import SimStore, StoreServer
from simulation.world import Process, World

from kvern.v1 import worker_pb2, worker_pb2_grpc
from kvern_gateway.scheduler_client import SchedulerClient
from kvern_scheduler.committer import Fenced
from kvern_scheduler.engine import Engine
from kvern_scheduler.server import parse_args, serve
from kvern_worker.service import Progress, WorkerServicer
from kvern_worker.sim import Content, SimConfig, SimExecutor

_ARGUMENTS = parse_args(["--listen", "unix:s", "--worker", "unix:w", "--store", "memory"])


class Node:
    """A service that comes back after its process has ended, ``restart_s`` later, while ``wanted``."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.name = name
        self.wanted = True
        self.restart_s = (0.05, 0.4)
        self.num_starts = 0
        self.process: Process
        self.start()

    def start(self) -> None:
        self.num_starts += 1
        process = self.process = self.world.process(self.name)
        process.at_death.append(lambda: self.cluster.network.sever(process))
        process.at_death.append(self._died)
        process.call(self._main)

    def _died(self) -> None:
        low, high = self.restart_s
        self.world.after(low + (high - low) * self.world.random.random(), self._revive)

    def _revive(self) -> None:
        if self.wanted and not self.process.alive:
            self.start()

    def _main(self) -> None:
        raise NotImplementedError


class SchedulerNode(Node):
    """``kvern-scheduler``: waits for the leadership, leads until fenced."""

    engine: Engine | None = None

    def _main(self) -> None:
        self.engine = None
        self.stop = asyncio.Event()
        self.process.spawn(self._serve(self.process))

    async def _serve(self, process: Process) -> None:
        cluster = self.cluster
        args = argparse.Namespace(**vars(_ARGUMENTS))
        args.listen = self.name
        args.worker = [worker.name for worker in cluster.workers]
        args.max_num_seqs, args.max_num_batched_tokens = (
            cluster.sim.max_num_seqs,
            cluster.sim.max_num_batched_tokens,
        )
        if cluster.oracle.forgets:
            args.retention_s, args.orphan_grace_s = 1, 0.6
        why = "it has stopped"
        try:
            await serve(args, SimStore(cluster.store, process), self.stop)
        except Fenced as error:
            why = f"fenced: {error}"
        except Exception as error:
            why = f"{error!r}"
            cluster.oracle.violated(f"{self.name} failed: {error!r}")
        process.kill(why)

    @property
    def leads(self) -> bool:
        """As far as it knows."""
        return self.process.alive and self.engine is not None


class WorkerNode(Node):
    """``kvern-worker --device sim``. A new process is a new instance with empty blocks; its disk is the old one's."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.disk: dict[bytes, Content] = {}
        super().__init__(cluster, name)

    def _main(self) -> None:
        cluster, process = self.cluster, self.process
        self.servicer = WorkerServicer(Progress())
        self.servicer.instance_id = f"{self.name}.{self.num_starts}"
        executor = WatchedExecutor(cluster.sim, self.servicer.instance_id, cluster.oracle, self.disk)
        self.servicer.attach(executor)
        self.server = SimServer(cluster.network, process)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.servicer, self.server.grpc)  # type: ignore[arg-type]
        self.server.listen(self.name)


class WatchedExecutor(SimExecutor):
    """Whatever a plan makes it raise is a violation: a scheduler never sends such a plan."""

    def __init__(self, config: SimConfig, name: str, oracle: Oracle, disk: dict[bytes, Content]) -> None:
        super().__init__(config, disk)
        self._name, self._oracle = name, oracle

    def run(self, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
        self._oracle.ran(self._name, plan.epoch)
        try:
            return super().run(plan)
        except Exception as error:
            self._oracle.violated(f"{self._name}, step {plan.step} of epoch {plan.epoch}: {error}")
            raise


class GatewayNode(Node):
    """The session part of ``kvern-gateway``; clients call ``client.submit`` in its process."""

    client: SchedulerClient | None = None

    def _main(self) -> None:
        addresses = [scheduler.name for scheduler in self.cluster.schedulers]
        self.world.random.shuffle(addresses)
        self.client = SchedulerClient(addresses, self.name, dial=self._dial)
        self.process.spawn(self.client.run())

    def _dial(self, target: str) -> SimChannel:
        return SimChannel(self.cluster.network, target)

    @property
    def ready(self) -> bool:
        return self.process.alive and self.client is not None and self.client.connected.is_set()


class Cluster:
    """Two or three schedulers on one store, workers, gateways."""

    def __init__(
        self, world: World, network: Network, store: StoreServer, oracle: Oracle, sim: SimConfig
    ) -> None:
        self.world, self.network, self.store, self.oracle, self.sim = world, network, store, oracle, sim
        self.workers: list[WorkerNode] = []
        self.schedulers: list[SchedulerNode] = []
        self.gateways: list[GatewayNode] = []

    def start(self, num_schedulers: int, num_workers: int, num_gateways: int) -> None:
        self.workers = [WorkerNode(self, f"worker{i}") for i in range(num_workers)]
        for i in range(num_schedulers):
            self.schedulers.append(SchedulerNode(self, f"scheduler{i}"))
        self.gateways = [GatewayNode(self, f"gateway{i}") for i in range(num_gateways)]

    @property
    def nodes(self) -> list[Node]:
        return [*self.schedulers, *self.workers, *self.gateways]

    def note_engine(self, engine: Engine) -> None:
        """The running process has become a leader."""
        for scheduler in self.schedulers:
            if scheduler.process is self.world.current:
                scheduler.engine = engine

    @property
    def leader(self) -> SchedulerNode | None:
        """The one whose epoch is the newest, if it is alive and leads already."""
        leading = [s for s in self.schedulers if s.leads and hasattr(s.engine, "committer")]
        return max(leading, key=lambda s: s.engine.committer.epoch, default=None)  # type: ignore[union-attr]
