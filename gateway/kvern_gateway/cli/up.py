"""`kvern up`: store, worker, scheduler and gateway on this machine, supervised."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from kvern_gateway.cli.load_client import Pool, Target
from kvern_gateway.cli.ports import claim_port
from kvern_gateway.cli.stack import StackOptions, UsageError, choose_run_dir, stack_specs
from kvern_gateway.cli.supervisor import ChildFailed, Supervisor

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

POLL_S = 0.1


def _process_start() -> float:
    """When this process began, on the clock of perf_counter, to 10 ms: importing Python counts too."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return perf_counter() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


@dataclass
class StartTimes:
    """Seconds since the command began; 0 until reached."""

    started: float = field(default_factory=_process_start)
    worker_listening: float = 0.0
    weights_loaded: float = 0.0
    serving: float = 0.0
    first_token: float = 0.0

    def mark(self, phase: str) -> None:
        if not getattr(self, phase):
            setattr(self, phase, perf_counter() - self.started)


# Awaited once all serves; the stack stops when it returns.
WhileServing = Callable[[StackOptions], Awaitable[None]]


async def up(
    options: StackOptions, console: Console, times: StartTimes, while_serving: WhileServing | None = None
) -> int:
    """Runs until a signal, or until ``while_serving`` is done. Returns the exit code: 2 when a child cannot work as
    configured.

    Raises PortInUse and UsageError before anything is started.
    """
    if options.http_port == options.grpc_port != 0:
        raise UsageError(
            f"--http-port and --grpc-port are both {options.http_port}; give them different ones"
        )
    options = replace(
        options,
        http_port=claim_port(options.host, options.http_port, "--http-port"),
        grpc_port=claim_port(options.host, options.grpc_port, "--grpc-port"),
    )
    if metrics_port := options.flags.get("metrics_port"):
        claim_port("127.0.0.1", cast("int", metrics_port), "--metrics-port")
    stop, kill = _signals()
    say = partial(console.print, markup=False, soft_wrap=True)
    with _data_dir(options.data_dir), _run_dir(options) as options:
        supervisor = Supervisor(stack_specs(options), say)
        try:
            supervisor.start()
            say(f"Kvern starts {options.served_model_name} ({options.model})")
            if options.store == "memory":
                say(
                    "Store: memory only. A restart of the scheduler loses all requests; --store redis keeps them."
                )
            await _serve(options, console, times, supervisor, stop, while_serving)
            say("Stopping; Ctrl-C once more stops at once")
        except ChildFailed as failure:
            say(f"{failure}\nLogs: {options.data_dir / 'logs'}", style="red")
            return 2
        finally:
            await supervisor.stop(kill)
        say("Stopped")
        return 0


async def _serve(
    options: StackOptions,
    console: Console,
    times: StartTimes,
    supervisor: Supervisor,
    stop: asyncio.Event,
    while_serving: WhileServing | None,
) -> None:
    """Returns when ``stop`` is set or ``while_serving`` is done; raises ChildFailed."""
    serving = asyncio.create_task(_until_serving(options, console, times))
    stopping = asyncio.create_task(stop.wait())
    failing = asyncio.ensure_future(supervisor.failed)
    waiting: set[asyncio.Future[Any]] = {serving, stopping, failing}
    working: asyncio.Future[None] | None = None
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
            supervisor.mark_ready()
            waiting.remove(serving)
            if while_serving:
                working = asyncio.ensure_future(while_serving(options))
                waiting.add(working)
            else:
                _greet(options, console, times)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if working is not None and working.done():
                working.result()
        if failing.done():
            raise failing.result()
    finally:
        started = [task for task in (serving, stopping, working) if task is not None]
        for task in started:
            task.cancel()
        await asyncio.gather(*started, return_exceptions=True)


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Events of the first and of the second signal to end."""
    stop, kill = asyncio.Event(), asyncio.Event()

    def receive() -> None:
        (kill if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, receive)
    # nohup's wish is respected.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, receive)
    return stop, kill


@contextlib.contextmanager
def _data_dir(data_dir: Path) -> Iterator[None]:
    """Holds the directory's lock, so that two servers do not write one store."""
    # The store in it holds what users wrote.
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = open(data_dir / "lock", "a+")  # noqa: SIM115  closed below
    except OSError as error:
        raise UsageError(
            f"{data_dir} cannot be used ({error.strerror}); choose another with --data-dir"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise UsageError(
                f"{data_dir} is in use by another kvern up (pid {lock.read().strip() or 'unknown'}); "
                "stop that or choose another with --data-dir"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


@contextlib.contextmanager
def _run_dir(options: StackOptions) -> Iterator[StackOptions]:
    run_dir, temporary = choose_run_dir(options.data_dir)
    try:
        yield replace(options, run_dir=run_dir)
    finally:
        if temporary:
            shutil.rmtree(run_dir, ignore_errors=True)


async def _until_serving(options: StackOptions, console: Console, times: StartTimes) -> None:
    """Shows the loading until the gateway's /health says 200. Raises ChildFailed when the worker reports a failure."""
    async with _load_progress(options, console, times) as progress:
        pool = Pool(Target(options.host, options.http_port))
        try:
            while not await pool.is_healthy():
                if progress.done():
                    # Raises what the worker said.
                    progress.result()
                await asyncio.sleep(POLL_S / 2)
        finally:
            pool.close()
    times.mark("serving")


@contextlib.asynccontextmanager
async def _load_progress(
    options: StackOptions, console: Console, times: StartTimes
) -> AsyncIterator[asyncio.Task[None]]:
    """A progress bar, fed by the worker's Describe, for as long as the block runs."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with bar:
        watch = asyncio.create_task(_watch_worker(options, bar, times))
        try:
            yield watch
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)


async def _watch_worker(options: StackOptions, bar: Progress, times: StartTimes) -> None:
    import grpc.aio

    from kvern.rpc.channel import create_channel
    from kvern.v1 import worker_pb2, worker_pb2_grpc

    row = bar.add_task("starting the worker", total=None)
    async with create_channel(f"unix:{options.socket('worker')}") as channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                state = await worker.Describe(worker_pb2.DescribeRequest(), timeout=1)
                times.mark("worker_listening")
                if state.phase == worker_pb2.WORKER_PHASE_FAILED:
                    raise ChildFailed(f"worker: {state.error.message}")
                if state.phase == worker_pb2.WORKER_PHASE_READY:
                    times.mark("weights_loaded")
                    bar.update(row, description="weights loaded", completed=state.total_bytes)
                    return
                bar.update(
                    row,
                    description="loading weights",
                    total=state.total_bytes or None,
                    completed=state.loaded_bytes,
                )
            await asyncio.sleep(POLL_S)


def _greet(options: StackOptions, console: Console, times: StartTimes) -> None:
    host = f"[{options.host}]" if ":" in options.host else options.host
    base = f"http://{host}:{options.http_port}"
    body = f'{{"model": "{options.served_model_name}", "temperature": 0, "max_tokens": 32, "messages": [{{"role": "user", "content": "Name three colors."}}]}}'
    lines = [
        f"Ready in {times.serving:.1f} s (worker up {times.worker_listening:.1f}, weights {times.weights_loaded:.1f})",
        "",
        f"  OpenAI HTTP  {base}/v1",
        f"  gRPC         {host}:{options.grpc_port}",
        f"  logs         {options.data_dir / 'logs'}",
        "",
        f"  try          curl {base}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        f"  chat         {sys.argv[0]} chat --base-url {base}",
        "  stop         Ctrl-C",
    ]
    console.print("\n".join(lines), markup=False, soft_wrap=True)
