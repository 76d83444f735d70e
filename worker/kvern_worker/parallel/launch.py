"""Starts the other ranks of this machine, and forms the group with all of them."""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvern.errors import KvernError, invalid
from kvern_worker.parallel.topology import Topology

if TYPE_CHECKING:
    from kvern_worker.parallel.group import WorkerGroup

LOOPBACK = "127.0.0.1"
# What must be equal on all ranks: all that says what is computed, and nothing that says where.
_OWN = ("listen", "node_rank", "local_rank", "master_addr", "master_port", "model", "threads")
_PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


@dataclass
class Launch:
    """This process's place in its group, before the group is formed."""

    topology: Topology
    local_rank: int
    local_world: int
    host: str
    port: int
    timeout_s: float
    listen: str
    listener: socket.socket | None = None
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)


def prepare(args: argparse.Namespace, argv: Sequence[str]) -> Launch | None:
    """Before anything is loaded: None where one rank is all. Rank 0 takes the master port; the first rank of a node starts
    the node's others, which die with it. Raises KvernError."""
    world = args.tensor_parallel_size
    if world == 1:
        return None
    local_world = world // args.nnodes
    local_rank = args.local_rank or 0
    rank = args.node_rank * local_world + local_rank
    one_host = args.nnodes == 1
    host = args.master_addr or LOOPBACK
    port = args.master_port if args.master_port is not None else (0 if one_host else 29501)
    launch = Launch(
        Topology(
            args.tensor_parallel_size, rank, args.enable_expert_parallel, args.expert_placement_strategy
        ),
        *(local_rank, local_world, host, port),
        timeout_s=args.distributed_timeout_seconds,
        listen=_listen(args.listen, local_rank),
    )
    if args.local_rank is not None:
        # The first rank of the node is the parent; without it there is no group.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        return launch
    if rank == 0:
        from kvern_worker.parallel.rendezvous import listen

        launch.listener = listen(host, port)
        launch.port = launch.listener.getsockname()[1]
    for local in range(1, local_world):
        words = [*argv, "--local-rank", str(local), "--master-port", str(launch.port)]
        launch.children.append(subprocess.Popen([sys.executable, "-m", "kvern_worker.server", *words]))
    return launch


def watch_children(launch: Launch) -> None:
    """Ends this process when one of the ranks that it started has ended."""

    def watch() -> None:
        while True:
            for local, child in enumerate(launch.children, 1):
                if (code := child.poll()) is not None:
                    leave(f"rank {launch.topology.rank + local} ended with {code}")
            time.sleep(0.1)

    if launch.children:
        threading.Thread(target=watch, name="children", daemon=True).start()


def leave(reason: str) -> None:
    """A group lives and dies as one: whoever starts processes here starts it anew."""
    log.error("this group is lost: %s", reason)
    sys.stderr.flush()
    os._exit(1)


def check(args: argparse.Namespace) -> None:
    """Raises KvernError where the flags of a group contradict each other."""
    world = args.tensor_parallel_size
    if args.device == "sim" and world > 1:
        raise _refused("tensor_parallel_size", world, "a simulated device is one rank; use --device cpu")
    if args.enable_lora and world > 1:
        raise _refused(
            "tensor_parallel_size", world, "adapters (--enable-lora) are not split over ranks yet; use 1"
        )
    if args.kv_offloading_size and world > 1:
        raise _refused("kv_offloading_size", args.kv_offloading_size, "ranks have no tiers yet; leave it out")
    if world % args.nnodes:
        raise _refused("nnodes", args.nnodes, f"{world} ranks do not divide into {args.nnodes} nodes")
    if args.node_rank >= args.nnodes:
        raise _refused("node_rank", args.node_rank, f"it must be below --nnodes {args.nnodes}")
    if args.nnodes > 1 and not args.master_addr:
        raise _refused("nnodes", args.nnodes, "nodes meet at --master-addr, an address of node 0; give it")
    if args.enable_expert_parallel and world == 1:
        raise _refused(
            "enable_expert_parallel", True, "experts are spread over ranks; give --tensor-parallel-size"
        )
    if args.expert_placement_strategy != "linear" and not args.enable_expert_parallel:
        raise _refused(
            "expert_placement_strategy", args.expert_placement_strategy, "it needs --enable-expert-parallel"
        )


def form(launch: Launch, args: argparse.Namespace, digest: str, port: int) -> WorkerGroup:
    """Meets the other ranks, checks that all are alike, and connects them: a group.WorkerGroup. ``digest``: the model's.
    ``port``: what this process serves on. Raises KvernError naming the rank at fault."""
    import torch
    import torch.distributed as dist

    from kvern_worker.parallel import rendezvous
    from kvern_worker.parallel.group import Clock, TensorParallel, WorkerGroup

    topology = launch.topology
    meeting = rendezvous.Meeting(
        *(topology.rank, topology.world, launch.host, launch.port, launch.timeout_s, launch.listener)
    )
    interface, address = rendezvous.interface_to(launch.host)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    flags = {key: value for key, value in vars(args).items() if key not in _OWN}
    store, said = rendezvous.meet(
        meeting,
        {
            "version": _version(),
            "torch version": torch.__version__,
            "flags": json.dumps(flags, sort_keys=True, default=str),
            "model": digest,
            "address": _advertised(launch.listen, port, "" if args.nnodes == 1 else address),
        },
    )
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("gloo", store),
        rank=topology.rank,
        world_size=topology.world,
        # A rank waits for the next plan as long as none comes; one that is gone is the watch's to find.
        timeout=datetime.timedelta(days=30),
    )
    rendezvous.Watch(store, meeting, leave)
    clock = Clock()
    log.info(
        "rank %d in world size %d is assigned as TP rank %d, over %s %s",
        *(topology.rank, topology.world, topology.rank, dist.get_backend(), interface),
    )
    tp = TensorParallel(
        *(topology.tensor, topology.rank, dist.group.WORLD, clock),
        *(topology.expert_parallel, topology.placement),
    )
    return WorkerGroup(topology, [one["address"] for one in said], tp, clock)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvern")
    except PackageNotFoundError:
        return "unknown"


def _listen(listen: str, local_rank: int) -> str:
    """Where a local rank serves: the first where it is told, the others beside it."""
    if not local_rank:
        return listen
    if listen.startswith("unix:"):
        return f"{listen}.{local_rank}"
    host, _, port = listen.rpartition(":")
    return f"{host}:{int(port) + local_rank if int(port) else 0}"


def _advertised(listen: str, port: int, host: str) -> str:
    """The address for the scheduler; without a host where that is the one at which it reached the first rank."""
    if listen.startswith("unix:"):
        return listen
    own = listen.rpartition(":")[0]
    return f"{host or ('' if own in ('', '0.0.0.0', '[::]') else own)}:{port}"


def _refused(field: str, value: object, why: str) -> KvernError:
    return invalid(field, f"--{field.replace('_', '-')} {value}: {why}", value=value)
