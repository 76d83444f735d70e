"""What goes wrong, and when: drawn from the seed. Each seed has a few kinds of faults only, so that rare combinations
of the others come up too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from simulation.network import Weather
from simulation.nodes import Cluster, Node, SchedulerNode
from simulation.stores import StoreWeather


class Faults:
    """Strikes at random moments until ``end``, when everything is mended. ``only``: kinds of faults; empty: some."""

    def __init__(self, cluster: Cluster, end: float, only: Collection[str] = ()) -> None:
        self.cluster, self.world, self.end = cluster, cluster.world, end
        self.counts: Counter[str] = Counter()
        self.over = False
        draw = self.world.random
        kinds: dict[str, Callable[[], None]] = {
            "scheduler dies": lambda: self._kill(self._some_scheduler()),
            "scheduler dies at an effect": self._arm_scheduler,
            "scheduler freezes": lambda: self._freeze(self._some_scheduler(), 2.5),
            "scheduler stops": self._stop,
            "scheduler dies with a commit under way": self._doom,
            "leader loses the store": self._cut_off,
            "worker dies": lambda: self._kill(draw.choice(cluster.workers)),
            "worker dies at an effect": lambda: self._arm(draw.choice(cluster.workers), 12),
            "worker stops": self._stop_worker,
            "worker freezes": lambda: self._freeze(draw.choice(cluster.workers), 2.0),
            "gateway dies": lambda: self._kill(draw.choice(cluster.gateways)),
            "gateway freezes": lambda: self._freeze(draw.choice(cluster.gateways), 3.0),
            "store refuses": self._refuse,
            "store stalls": self._stall_store,
            "link stalls": self._stall_link,
            "stream breaks": self._break,
            "bad weather": self._weather,
            "bad weather at the store": self._store_weather,
        }
        chosen = only or draw.sample(sorted(kinds), draw.choice([1, 2, 2, 3, 5]))
        self._kinds = {name: kinds[name] for name in chosen}
        self._pause = draw.uniform(0.05, 0.3 if only else 0.8)
        self.world.after(draw.uniform(0.02, 0.5), self._strike)
        self.world.after(end, self.mend)

    def _strike(self) -> None:
        if self.over:
            return
        name = self.world.random.choice(list(self._kinds))
        self.counts[name] += 1
        self.cluster.oracle.blames_workers = self.counts.total() >= 5
        self.world.note("FAULT", name)
        self._kinds[name]()
        self.world.after(self.world.random.expovariate(1 / self._pause), self._strike)

    def mend(self) -> None:
        """No faults from here on."""
        self.over = True
        self.world.note("FAULT", "all is mended")
        cluster = self.cluster
        self._clear_weather()
        cluster.store.doomed = None
        cluster.store.down, cluster.store.stalled_until = False, 0.0
        cluster.network.stalled.clear()
        for node in cluster.nodes:
            node.process.fuse = None
            if node.process.frozen:
                node.process.thaw()

    # -- processes ----------------------------------------------------------------------------------------------

    def _some_scheduler(self) -> SchedulerNode:
        """Mostly the leader."""
        leader = self.cluster.leader
        if leader is not None and self.world.random.random() < 0.8:
            return leader
        return self.world.random.choice(self.cluster.schedulers)

    def _kill(self, node: Node) -> None:
        node.process.kill("killed")

    def _arm(self, node: Node, effects: int) -> None:
        node.process.fuse = self.world.random.randint(1, effects)

    def _arm_scheduler(self) -> None:
        self._arm(self._some_scheduler(), 40)

    def _freeze(self, node: Node, seconds: float) -> None:
        process = node.process
        if not process.alive or process.frozen:
            return
        self.world.note(node.name, "freezes")
        process.freeze()

        def thaw() -> None:
            if process.frozen:
                self.world.note(node.name, "thaws")
                process.thaw()

        draw = self.world.random.random
        self.world.after(0.05 + seconds * (draw() if draw() < 0.5 else 0.5 + 0.5 * draw()), thaw)

    def _doom(self) -> None:
        """The commit may arrive when another one leads already."""
        self.cluster.store.doomed = self._some_scheduler().process

    def _cut_off(self) -> None:
        """It goes on computing, until long after its lease has run out."""
        name = self._some_scheduler().name
        self.world.note("FAULT", f"{name}")
        self.cluster.network.stall(name, "world", 0.8 + 2.0 * self.world.random.random())

    def _stop(self) -> None:
        scheduler = self._some_scheduler()
        if scheduler.process.alive:
            scheduler.process.call(scheduler.stop.set)

    def _stop_worker(self) -> None:
        worker = self.world.random.choice(self.cluster.workers)
        process = worker.process
        if process.alive:
            process.call(worker.servicer.drain)
            self.world.after(0.05 + 0.1 * self.world.random.random(), process.kill, "stopped")

    # -- the store and the network ------------------------------------------------------------------------------

    def _refuse(self) -> None:
        self.cluster.store.down = True

        def mended() -> None:
            self.cluster.store.down = False

        self.world.after(0.05 + 1.5 * self.world.random.random(), mended)

    def _stall_store(self) -> None:
        self.cluster.store.stalled_until = self.world.now + 1.5 * self.world.random.random()

    def _stall_link(self) -> None:
        names = [node.name for node in self.cluster.nodes] + ["world"]
        a, b = self.world.random.sample(names, 2)
        self.world.note("FAULT", f"{a} and {b}")
        self.cluster.network.stall(a, b, 2.0 * self.world.random.random())

    def _break(self) -> None:
        streams = sorted(self.cluster.network.streams, key=lambda stream: stream.number)
        if streams:
            stream = self.world.random.choice(streams)
            self.world.note("FAULT", f"{stream.path} of {stream.client.name} to {stream.server.name}")
            stream.break_off("connection reset")

    def _weather(self) -> None:
        draw = self.world.random.random
        self.cluster.network.weather = Weather(
            spike=0.2 * draw(), lose=0.02 * draw(), repeat=0.02 * draw(), suspend=0.5 * draw()
        )
        self.world.after(0.5 * draw(), self._clear_weather)

    def _store_weather(self) -> None:
        draw = self.world.random.random
        self.cluster.store.weather = StoreWeather(
            lose=0.3 * draw(), mute=0.3 * draw(), repeat=0.3 * draw(), linger=0.2 * draw()
        )
        self.world.after(0.8 * draw(), self._clear_weather)

    def _clear_weather(self) -> None:
        self.cluster.network.weather = Weather()
        self.cluster.store.weather = StoreWeather()
