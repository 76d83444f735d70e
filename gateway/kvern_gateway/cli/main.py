"""The `kvern` command line. Commands import what they need when they run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvern_gateway.cli import (
    bench_engine,
    bench_load,
    bench_observe,
    bench_routing,
    bench_tiers,
    command_up,
    explain,
    profile,
    top,
)
from kvern_gateway.cli.command_up import Fsync, Store
from kvern_gateway.cli.report import fail, print_result, run_fast

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    # KVERN_UP_MAX_MODEL_LEN is --max-model-len of `kvern up`.
    context_settings={"auto_envvar_prefix": "KVERN"},
)
bench = typer.Typer(
    help="Measure a server, the scheduler, or the whole path.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(bench, name="bench")
app.command("up")(command_up.up)
app.command("explain")(explain.explain)
app.command("top")(top.top)
app.command("profile")(profile.profile)
app.command("logging")(explain.logging)
bench.command("engine")(bench_engine.engine)
bench.command("observe")(bench_observe.observe)
bench.command("routing")(bench_routing.routing)
bench.command("tiers")(bench_tiers.tiers)
bench.command("fit-profile")(bench_engine.fit_profile)
bench.command("overload")(bench_load.overload)
bench.command("slow-clients")(bench_load.slow_clients)
bench.command("sweep")(bench_load.sweep)


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        print(f"kvern {importlib.metadata.version('kvern')}")
        raise typer.Exit


@app.callback()
def _kvern(
    version: Annotated[
        bool,
        # No variable: images and pipelines have a KVERN_VERSION of their own.
        typer.Option(
            "--version",
            allow_from_autoenv=False,
            callback=_print_version,
            is_eager=True,
            help="Print the version",
        ),
    ] = False,
) -> None:
    """Serve large language models, talk to them, and measure them."""


@app.command()
def chat(
    base_url: Annotated[str, typer.Option(help="Any OpenAI-compatible server")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="[default: the server's first]")] = None,
    system: Annotated[str, typer.Option(help="System message")] = "",
    temperature: Annotated[float | None, typer.Option()] = None,
    max_tokens: Annotated[int | None, typer.Option()] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY")] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(help="File or URL that the first question is about; repeat for several"),
    ] = None,
) -> None:
    """Talk to a model in the terminal."""
    import httpx

    from kvern_gateway.cli import chat as chatting

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=base_url.removesuffix("/").removesuffix("/v1"), headers=headers) as client:
        try:
            session = chatting.Chat(client, model, system, temperature=temperature, max_tokens=max_tokens)
            images = [chatting.image_url(each) for each in image or ()]
        except chatting.ChatFailed as error:
            fail(error)
        if not chatting.converse(session, images=images):
            raise typer.Exit(1)


@bench.command("serve")
def bench_serve(
    more_goodput: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    base_url: Annotated[str | None, typer.Option(help="Instead of --host and --port")] = None,
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option()] = 8000,
    endpoint: Annotated[
        str, typer.Option(help="/v1/completions or /v1/chat/completions")
    ] = "/v1/completions",
    model: Annotated[str | None, typer.Option(help="[default: the server's first]")] = None,
    dataset_name: Annotated[
        str, typer.Option(help="random, prefix_repetition, or a trace to replay: mooncake, burstgpt")
    ] = "random",
    dataset_path: Annotated[
        Path | None, typer.Option(help="The trace: Mooncake's JSONL, BurstGPT's CSV")
    ] = None,
    trace_speed: Annotated[float, typer.Option(help="2 replays a trace in half its time")] = 1.0,
    length_scale: Annotated[float, typer.Option(help="0.5 halves a trace's lengths")] = 1.0,
    prefix_repetition_prefix_len: Annotated[int, typer.Option(min=1)] = 256,
    prefix_repetition_suffix_len: Annotated[int, typer.Option(min=1)] = 256,
    prefix_repetition_num_prefixes: Annotated[int, typer.Option(min=1)] = 10,
    prefix_repetition_output_len: Annotated[int, typer.Option(min=1)] = 128,
    random_input_len: Annotated[int, typer.Option("--random-input-len", "--input-len")] = 1024,
    random_output_len: Annotated[int, typer.Option("--random-output-len", "--output-len")] = 128,
    random_range_ratio: Annotated[float, typer.Option(help="Lengths vary by this share", min=0, max=1)] = 0.0,
    random_prefix_len: Annotated[int, typer.Option(help="Tokens that all prompts share", min=0)] = 0,
    random_vocab_size: Annotated[int, typer.Option(help="Random token ids stay below it", min=2)] = 16_384,
    num_prompts: Annotated[int, typer.Option(min=1)] = 1000,
    request_rate: Annotated[float, typer.Option(help="Requests per second; inf sends all at once")] = float(
        "inf"
    ),
    burstiness: Annotated[float, typer.Option(help="1 is a Poisson process; less is burstier")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(min=1)] = None,
    num_warmups: Annotated[int, typer.Option(min=0)] = 0,
    seed: Annotated[int, typer.Option()] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos/--no-ignore-eos")] = True,
    temperature: Annotated[float | None, typer.Option()] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    extra_body: Annotated[str, typer.Option(help="JSON object added to each request")] = "{}",
    header: Annotated[list[str] | None, typer.Option(help="KEY=VALUE added to each request")] = None,
    percentile_metrics: Annotated[str, typer.Option()] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option()] = "99",
    goodput: Annotated[list[str] | None, typer.Option(help="ttft:MS tpot:MS e2el:MS")] = None,
    save_result: Annotated[bool, typer.Option("--save-result")] = False,
    save_detailed: Annotated[bool, typer.Option("--save-detailed")] = False,
    result_dir: Annotated[Path | None, typer.Option()] = None,
    result_filename: Annotated[str | None, typer.Option()] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON")] = False,
    compare: Annotated[
        str | None,
        typer.Option(help="transformers-cb: the same load through transformers' continuous batching"),
    ] = None,
    compare_model: Annotated[
        str | None, typer.Option(help="Weights for --compare [default: SmolLM2]")
    ] = None,
    compare_dtype: Annotated[str, typer.Option(help="Data type for --compare")] = "bfloat16",
) -> None:
    """Load an OpenAI-compatible server and report latencies and throughput (flags and keys of vLLM's bench serve)."""
    import json

    from kvern_gateway.cli import bench_serve as benchmark
    from kvern_gateway.cli.bench_workload import DATASETS

    try:
        if dataset_name not in DATASETS:
            raise ValueError(f"--dataset-name {dataset_name!r}: choose from {', '.join(DATASETS)}")
        if min(request_rate, burstiness, trace_speed, length_scale) <= 0:
            raise ValueError("--request-rate, --burstiness, --trace-speed and --length-scale must be above 0")
        if compare not in (None, "transformers-cb"):
            raise ValueError(f"--compare {compare!r}: only transformers-cb is there")
        sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
        options = benchmark.ServeOptions(
            base_url=(base_url or f"http://{host}:{port}").removesuffix("/").removesuffix("/v1"),
            endpoint=endpoint,
            model=model,
            dataset_name=dataset_name,
            dataset_path=dataset_path,
            trace_speed=trace_speed,
            length_scale=length_scale,
            prefix_repetition_prefix_len=prefix_repetition_prefix_len,
            prefix_repetition_suffix_len=prefix_repetition_suffix_len,
            prefix_repetition_num_prefixes=prefix_repetition_num_prefixes,
            prefix_repetition_output_len=prefix_repetition_output_len,
            num_prompts=num_prompts,
            random_input_len=random_input_len,
            random_output_len=random_output_len,
            random_range_ratio=random_range_ratio,
            random_prefix_len=random_prefix_len,
            random_vocab_size=random_vocab_size,
            request_rate=request_rate,
            burstiness=burstiness,
            max_concurrency=max_concurrency,
            num_warmups=num_warmups,
            seed=seed,
            ignore_eos=ignore_eos,
            metrics=benchmark.parse_metrics(percentile_metrics),
            percentiles=benchmark.parse_percentiles(metric_percentiles),
            goodput_ms=benchmark.parse_goodput([*(goodput or []), *(more_goodput or [])]),
            extra_body={
                **{name: value for name, value in sampling.items() if value is not None},
                **json.loads(extra_body),
            },
            headers=tuple((name, value) for name, _, value in (word.partition("=") for word in header or [])),
            save_detailed=save_detailed,
        )
        result = run_fast(benchmark.run(options))
        if compare:
            from kvern_gateway.cli import bench_compare

            print(
                f"{result['output_throughput']:.1f} output tokens/s; now the same load through transformers' "
                "continuous batching",
                file=sys.stderr,
                flush=True,
            )
            result["compare"] = bench_compare.run(options, compare_model, compare_dtype)
    except (ValueError, ConnectionError) as error:
        fail(error)
    save_to = None
    if save_result:
        save_to = (result_dir or Path()) / (result_filename or benchmark.default_filename(options, result))
    raise typer.Exit(benchmark.report(options, result, as_json, save_to))


@bench.command("control")
def bench_control(
    sequences: Annotated[int, typer.Option(min=1, help="Sequences that decode all the time")] = 256,
    store: Annotated[Store, typer.Option()] = Store.memory,
    appendfsync: Annotated[Fsync, typer.Option()] = Fsync.always,
    step_us: Annotated[int, typer.Option(min=0, help="What the simulated worker takes for a step")] = 5000,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure")] = 1000,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Cost of a scheduler step, split into plan, fold and commit, on a simulated worker."""
    from kvern_gateway.cli import bench_control as benchmark

    options = benchmark.ControlOptions(sequences, store, appendfsync, step_us, steps)
    print_result(benchmark.run(options), benchmark.render, as_json)


@bench.command("path")
def bench_path(
    streams: Annotated[int, typer.Option(min=1, help="Requests at once")] = 64,
    input_len: Annotated[int, typer.Option(min=1)] = 32,
    output_len: Annotated[int, typer.Option(min=1)] = 128,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="[default: 8 per stream]")] = None,
    store: Annotated[Store, typer.Option()] = Store.memory,
    appendfsync: Annotated[Fsync, typer.Option()] = Fsync.always,
    step_us: Annotated[int, typer.Option(min=0, help="What the simulated worker takes for a step")] = 0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Output tokens per second through client, gateway, scheduler and a simulated worker, and CPU time of each."""
    from kvern_gateway.cli import bench_path as benchmark

    options = benchmark.PathOptions(streams, input_len, output_len, num_prompts, store, appendfsync, step_us)
    print_result(benchmark.run(options), benchmark.render, as_json)


@bench.command("start")
def bench_start(
    model: Annotated[str | None, typer.Argument(help="[default: SmolLM2-135M-Instruct]")] = None,
    store: Annotated[Store, typer.Option()] = Store.redis,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Time from `kvern up` to the first token, by phase."""
    from kvern_gateway.cli import bench_start as benchmark

    print_result(benchmark.run(model, store), benchmark.render, as_json)


@bench.command("recovery")
def bench_recovery(
    blocks: Annotated[int, typer.Option(min=1, help="In the worker's prefix index")] = 200_000,
    requests: Annotated[int, typer.Option(min=1, help="Live ones")] = 1000,
    finished: Annotated[int, typer.Option(min=0, help="Ended and retained ones")] = 10_000,
    appendfsync: Annotated[Fsync, typer.Option()] = Fsync.always,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Time from the start of a scheduler's process, with a full store, to the tokens that clients wait for."""
    from kvern_gateway.cli import bench_recovery as benchmark

    options = benchmark.RecoveryOptions(blocks, requests, finished, appendfsync)
    print_result(benchmark.run(options), benchmark.render, as_json)


@bench.command("chaos")
def bench_chaos(
    kind: Annotated[str, typer.Option(help="scheduler, worker, gateway, store, or all")] = "all",
    kills: Annotated[
        int | None,
        typer.Option(min=0, help="Of each kind; freezes come on top [default: 20, or 0 with --restarts]"),
    ] = None,
    restarts: Annotated[int, typer.Option(min=0, help="SIGTERM, as in a rolling upgrade; of each kind")] = 0,
    model: Annotated[
        Path | None, typer.Option(help="Folder or .gguf file [default: a simulated model]")
    ] = None,
    sim: Annotated[bool, typer.Option("--sim", help="Simulated model; the default")] = False,
    clients: Annotated[int, typer.Option(min=1, help="Requests at once")] = 8,
    workers: Annotated[int, typer.Option(min=1)] = 2,
    seed: Annotated[int, typer.Option(help="Of targets, moments and requests")] = 0,
    keep_logs: Annotated[bool, typer.Option("--keep-logs", help="Also where nothing went wrong")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Kill and freeze services under load; check that no client loses, repeats or sees a changed token."""
    from kvern_gateway.cli import bench_chaos as benchmark
    from kvern_gateway.cli.chaos_faults import KINDS

    if kind not in (*KINDS, "all"):
        fail(ValueError(f"--kind {kind!r}: one of {', '.join(KINDS)}, all"))
    if model is not None and (sim or not model.exists()):
        fail(ValueError("--model contradicts --sim" if sim else f"--model {str(model)!r} is not there"))
    kinds = KINDS if kind == "all" else (kind,)
    options = benchmark.ChaosOptions(
        kinds,
        kills if kills is not None else 0 if restarts else 20,
        restarts,
        model.resolve() if model else None,
        clients=clients,
        workers=workers,
        seed=seed,
        keep_logs=keep_logs,
    )
    result = print_result(benchmark.run(options), benchmark.render, as_json)
    raise typer.Exit(benchmark.exit_code(result))


@bench.command("make-model")
def bench_make_model(
    folder: Annotated[Path, typer.Argument(help="Where to write it")],
    like: Annotated[str, typer.Option(help="qwen3-0.6b, qwen3-toy or qwen3-moe-toy")] = "qwen3-0.6b",
    quantization: Annotated[str, typer.Option(help="none (bfloat16), gptq, awq or w8a8")] = "none",
    seed: Annotated[int, typer.Option(help="Of the weights")] = 0,
) -> None:
    """Write a model with a known shape and random weights, to measure with."""
    from kvern_gateway.cli.make_model import make_model

    try:
        made = make_model(folder, like, quantization, seed)
    except (ValueError, OSError) as error:
        fail(error)
    print(f"{made.path}: {made.parameters / 1e6:.1f} M parameters, {made.num_bytes / 1e9:.2f} GB")


@bench.command("kernels")
def bench_kernels(
    only: Annotated[str | None, typer.Option(help="Kernels whose name contains this")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Time of each kernel, the share of this machine's limit that it reaches, and the ratio to torch's own op."""
    import json

    try:
        from kvern_kernels import bench as benchmark
    except ImportError as error:
        fail(error)
    if as_json:
        print(json.dumps(benchmark.run(only)))
    else:
        benchmark.report(only)


def main() -> None:
    # A supervisor forks and execs; gRPC's own fork handlers would only get in the way, and say so each time.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    if sys.argv[1:2] == ["up"]:
        sys.argv[2:] = command_up.translate(typer.main.get_command(app), sys.argv[2:])
    app()


if __name__ == "__main__":
    main()
