"""``kvern-scheduler``: acquires the leadership of its cell, recovers, serves gateways, drives workers."""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import logging
import os
import socket
import sys
import time
import uuid
from typing import Any

import uvloop

from kvern.rpc import logs, spellings, tls, tracing
from kvern.rpc.channel import create_channel
from kvern.rpc.flags import (
    cell_name,
    dialable,
    endpoint,
    lora_module,
    not_negative,
    port,
    positive,
    redis_url,
    seconds,
)
from kvern.rpc.metrics import serve_metrics
from kvern.rpc.server import Server, stop_on_signals
from kvern.v1 import operations_pb2_grpc, session_pb2_grpc
from kvern_scheduler.adapters import Adapters
from kvern_scheduler.address import advertised
from kvern_scheduler.committer import Committer, Fenced
from kvern_scheduler.core.eviction import POLICIES
from kvern_scheduler.core.group import Limits
from kvern_scheduler.core.journal import MAX_REQUESTS
from kvern_scheduler.engine import Engine
from kvern_scheduler.metrics import Metrics
from kvern_scheduler.operations import SERVICE_NAME as OPERATIONS
from kvern_scheduler.operations import OperationsServicer
from kvern_scheduler.recovery import Archive, acquire, adopt, load
from kvern_scheduler.service import SERVICE_NAME, SchedulerServicer
from kvern_scheduler.store.base import Store, StoreRefused, StoreUnavailable
from kvern_scheduler.store.memory import MemoryStore
from kvern_scheduler.traces import Traces
from kvern_scheduler.workers import Worker

log = logging.getLogger("kvern_scheduler")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvern-scheduler", description=__doc__)
    parser.add_argument(
        "--listen", type=endpoint, required=True, metavar="ADDR", help="host:port or unix:/path"
    )
    parser.add_argument(
        "--advertise-address",
        type=dialable,
        metavar="HOST:PORT",
        help="where standbys find this scheduler; default: --listen, or this machine's own address for a wildcard",
    )
    parser.add_argument(
        "--worker", action="append", type=endpoint, required=True, metavar="ADDR", help="repeat for several"
    )
    parser.add_argument(
        "--redis-url", type=redis_url, metavar="URL", help="redis://…, or unix:///path/to.sock"
    )
    parser.add_argument(
        "--store", choices=["memory", "redis"], help="default: redis with --redis-url, else memory"
    )
    parser.add_argument("--cell", type=cell_name, default="default", help="names the keys in Redis")
    parser.add_argument("--max-num-batched-tokens", type=positive, default=2048, metavar="N")
    parser.add_argument("--max-num-seqs", type=positive, default=256, metavar="N")
    parser.add_argument(
        "--long-prefill-token-threshold",
        type=not_negative,
        default=0,
        metavar="N",
        help="longer prompts get at most this many tokens of a step that others need; 0: a quarter of the budget",
    )
    parser.add_argument("--max-long-partial-prefills", type=positive, default=2, metavar="N")
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--enable-lora",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="serve LoRA adapters; workers need it too",
    )
    parser.add_argument(
        "--lora-modules",
        type=lora_module,
        action="append",
        default=[],
        metavar="NAME=PATH",
        help='adapters to serve from the start; also {"name": …, "path": …}; paths are the workers\'; repeat for several',
    )
    parser.add_argument(
        "--kv-offloading-policy",
        choices=POLICIES,
        default="lru",
        help="which KV blocks leave the memory below a worker's device (its --kv-offloading-size) when that is full",
    )
    parser.add_argument("--max-queued-requests", type=positive, default=2048, metavar="N")
    parser.add_argument("--max-queued-tokens", type=positive, default=2_000_000, metavar="N")
    parser.add_argument(
        "--retention-s", type=not_negative, default=600, metavar="S", help="of finished, named requests"
    )
    parser.add_argument(
        "--orphan-grace-s", type=seconds, default=30.0, metavar="S", help="for requests whose gateway is gone"
    )
    parser.add_argument(
        "--max-timelines",
        type=not_negative,
        default=MAX_REQUESTS,
        metavar="N",
        help="requests whose timelines are kept for `kvern explain`; 0: none",
    )
    parser.add_argument("--lease-s", type=seconds, default=1.0, metavar="S")
    parser.add_argument("--metrics-port", type=port, default=0, metavar="PORT", help="0: none")
    parser.add_argument("--metrics-host", default="127.0.0.1", metavar="HOST")
    parser.add_argument(
        "--enable-log-requests",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="a record when a request is admitted and when it ends; no text and no tokens",
    )
    parser.add_argument(
        "--enable-logging-iteration-details",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="a record of each step; `kvern logging` switches both while it runs",
    )
    logs.add_flags(parser)
    tls.add_flags(parser)
    tracing.add_flags(parser)
    args = spellings.parse(parser, argv)
    args.tls = tls.from_flags(parser, args)
    args.tracing = tracing.from_flags(parser, args, "kvern-scheduler")
    if args.store == "redis" and not args.redis_url:
        parser.error("--store redis needs --redis-url")
    if args.store == "memory" and args.redis_url:
        parser.error("--store memory contradicts --redis-url; give one of them")
    if args.lora_modules and not args.enable_lora:
        parser.error("--lora-modules has no effect without --enable-lora")
    names = [name for name, _ in args.lora_modules]
    if len(set(names)) < len(names):
        parser.error(f"--lora-modules names {next(n for n in names if names.count(n) > 1)!r} twice")
    if args.lease_s < 0.1:
        parser.error(f"--lease-s {args.lease_s:g} would lapse between two commits; use at least 0.1")
    return args


def limits_of(args: argparse.Namespace) -> Limits:
    return Limits(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        max_long_prefills=args.max_long_partial_prefills,
        enable_prefix_caching=args.enable_prefix_caching,
        kv_offloading_policy=args.kv_offloading_policy,
        max_queued_requests=args.max_queued_requests,
        max_queued_tokens=args.max_queued_tokens,
    )


def make_store(args: argparse.Namespace) -> Store:
    if args.redis_url:
        from kvern_scheduler.store.redis import RedisStore

        return RedisStore(args.redis_url, args.cell, lease_s=args.lease_s)
    log.warning(
        "--store memory: a restart of this scheduler loses all requests; give --redis-url to keep them"
    )
    return MemoryStore(args.lease_s)


async def serve(args: argparse.Namespace, store: Store, stop: asyncio.Event | None = None) -> None:
    """Runs until SIGTERM or ``stop``. Raises Fenced when another scheduler takes over, OSError when the address is
    taken, StoreRefused when the store will not have us."""
    stop = stop or stop_on_signals()
    started = time.monotonic()
    owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
    servicer = SchedulerServicer(args.cell, store.name, owner)
    operations = OperationsServicer(servicer.status)
    server = Server([SERVICE_NAME, OPERATIONS], tls=args.tls)
    dial = functools.partial(create_channel, tls=args.tls)
    session_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server.grpc)
    operations_pb2_grpc.add_OperationsServiceServicer_to_server(operations, server.grpc)
    metrics = Metrics()
    if args.metrics_port:
        # A standby's too: it must not find the port taken when it is to lead.
        serve_metrics(metrics.registry, args.metrics_host, args.metrics_port)
    bound = await server.start(args.listen)
    address = args.advertise_address or advertised(args.listen, bound)
    engine: Engine | None = None
    starting: list[asyncio.Task[Any]] = []
    computing: list[asyncio.Task[None]] = []
    committing: list[asyncio.Task[None]] = []
    stopping = asyncio.create_task(stop.wait())
    # Now, not when it is to lead: a collection takes as long as all the rest of a take-over.
    gc.collect()
    try:
        leading = asyncio.create_task(acquire(store, owner, address, dial))
        starting.append(leading)
        await asyncio.wait([leading, stopping], return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return
        leadership = leading.result()
        engine = Engine(
            *(args.cell, limits_of(args), metrics, args.retention_s, args.orphan_grace_s),
            max_timelines=args.max_timelines,
        )
        metrics.watch(engine)
        engine.events.requests = args.enable_log_requests
        engine.events.steps = args.enable_logging_iteration_details
        if args.tracing is not None:
            engine.ended.append(Traces(args.tracing).finished)
        engine.committer = Committer(
            *(store, leadership, engine.release, engine.instances.__getitem__, engine.timings),
            retention_s=args.retention_s,
            lease_s=args.lease_s,
        )
        committing.append(asyncio.create_task(engine.committer.run()))
        loading = asyncio.create_task(load(store))
        starting.append(loading)
        await asyncio.wait([loading, stopping, *committing], return_when=asyncio.FIRST_COMPLETED)
        if committing[0].done():
            committing[0].result()  # fenced already
        if stop.is_set():
            return
        state = loading.result()
        adopt(engine, state, leadership)
        workers = [
            Worker(engine, address, leadership.epoch, state.instances, store.load_index, dial)
            for address in args.worker
        ]
        computing += [asyncio.create_task(worker.run()) for worker in workers]
        adapters = Adapters(
            engine,
            lambda: [worker.host for worker in workers if worker.host is not None],
            dict(args.lora_modules),
            args.enable_lora,
        )
        servicer.lead(engine, workers, leadership.epoch, Archive(engine, store, state.retained_s), adapters)
        operations.lead(engine, workers)
        starting.append(asyncio.create_task(adapters.run()))
        computing.append(asyncio.create_task(engine.tick()))
        computing.append(asyncio.create_task(_watch_workers(server, engine, workers, state.instances)))
        log.info(
            "leads cell %s in epoch %d after %.2f s, with %d requests; listens on %s, known as %s",
            args.cell,
            leadership.epoch,
            time.monotonic() - started,
            len(engine.cell.requests),
            args.listen,
            address,
        )
        starting.append(asyncio.create_task(_name_concerns(store)))
        _calm_gc()
        done, _ = await asyncio.wait([*committing, *computing, stopping], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task is not stopping:
                task.result()
    finally:
        servicer.drain()
        await _cancel(*starting, *computing, stopping)
        if engine is not None:
            engine.draining = True
            await engine.committer.flush(0.5 if committing and not committing[0].done() else 0.0)
        await server.drain(0.2)
        await _cancel(*committing)
        if engine is not None:
            await engine.committer.resign()
        await store.close()
        if args.tracing is not None:
            await asyncio.to_thread(args.tracing.close)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _watch_workers(server: Server, engine: Engine, workers: list[Worker], indexed: set[str]) -> None:
    """SERVING while a worker is ready. Once all are, instances in ``indexed`` that none of them is are no more."""
    serving = False
    while True:
        if indexed and all(worker.ready for worker in workers):
            for instance in sorted(indexed):
                engine.committer.drop_instance(instance)
            indexed.clear()
        if all(worker.ready for worker in workers) and not engine.cell.max_loras:
            engine.cell.end_without_slots(engine.clock())
        if any(worker.ready for worker in workers) != serving:
            serving = not serving
            await server.set_serving(serving)
        await asyncio.sleep(0.05)


async def _name_concerns(store: Store) -> None:
    try:
        for concern in await store.concerns():
            log.warning("store: %s", concern)
    except StoreUnavailable:
        log.info("the store does not tell its configuration; see that it writes every commit to its disk")


def _calm_gc() -> None:
    """What start-up made lives for ever; and no cycle collection may pause a step for long."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    logs.configure(args)
    try:
        uvloop.run(serve(args, make_store(args)))
    except Fenced as error:
        log.error("stops leading: %s", error)
        sys.exit(3)
    except StoreRefused as error:
        log.error("the store refuses us: %s", error)
        sys.exit(1)
    except OSError as error:
        log.error("%s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
