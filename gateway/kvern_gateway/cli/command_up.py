"""`kvern up`: its flags, from wherever they come. What is started is in up.py."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvern_gateway.cli.report import fail


class Store(StrEnum):
    redis = "redis"
    memory = "memory"


class Fsync(StrEnum):
    always = "always"
    everysec = "everysec"
    no = "no"


def up(
    model: Annotated[
        str | None, typer.Argument(help="Hugging Face folder or .gguf file [default: SmolLM2-135M-Instruct]")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            callback=_use_config, is_eager=True, help="YAML file of these flags; the command line wins"
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            callback=_use_profile, is_eager=True, help="throughput, latency or long-context: sets defaults"
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be started, and stop")] = False,
    http_port: Annotated[
        int, typer.Option(min=0, max=65_535, help="OpenAI HTTP; 0 takes any free port")
    ] = 8000,
    grpc_port: Annotated[int, typer.Option(min=0, max=65_535, help="gRPC; 0 takes any free port")] = 50051,
    host: Annotated[str, typer.Option(help="Address to serve on")] = "127.0.0.1",
    data_dir: Annotated[
        Path | None, typer.Option(help="Store and logs [default: ~/.local/share/kvern]")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name that requests use [default: the file's]")
    ] = None,
    store: Annotated[
        Store, typer.Option(help="Where requests are kept: a private durable store, or memory")
    ] = Store.redis,
    redis_url: Annotated[
        str | None, typer.Option(help="Your own Redis 7+ or Valkey instead of a private one")
    ] = None,
    appendfsync: Annotated[
        Fsync,
        typer.Option(
            help="When the private store writes to disk; everysec and no may lose what was acknowledged"
        ),
    ] = Fsync.always,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Key that clients must send; repeat for several. Or KVERN_API_KEY, with spaces"),
    ] = None,
    api_keys: Annotated[
        Path | None, typer.Option(help="File of keys with limits; see gateway/README.md")
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(help="Where spans of requests go, OTLP over HTTP: http://host:4318/v1/traces"),
    ] = None,
    max_timelines: Annotated[
        int | None, typer.Option(min=0, help="Requests that `kvern explain` knows [default: 4096]")
    ] = None,
    enable_log_requests: Annotated[
        bool | None, typer.Option(help="The scheduler logs each request; see `kvern logging`")
    ] = None,
    enable_logging_iteration_details: Annotated[
        bool | None, typer.Option(help="The scheduler logs each step; see `kvern logging`")
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16")] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="auto (as --dtype), fp32, bf16, fp16, fp8, fp8_e5m2, int8")
    ] = None,
    max_model_len: Annotated[str | None, typer.Option(help="Prompt plus output tokens, or auto")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per KV block")] = None,
    mamba_block_size: Annotated[
        int | None, typer.Option(help="Of hybrid models: tokens between checkpoints of a state")
    ] = None,
    kv_cache_memory_bytes: Annotated[int | None, typer.Option(help="Bytes of KV cache")] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of memory to use where no bytes are given")
    ] = None,
    kv_offloading_size: Annotated[
        float | None, typer.Option(help="GiB of memory for KV blocks that the device has no room for")
    ] = None,
    kv_offloading_dir: Annotated[
        str | None, typer.Option(help="Keep them on disk too, where they outlive the worker")
    ] = None,
    kv_offloading_disk_size: Annotated[
        float | None, typer.Option(help="GiB of disk (default: four times --kv-offloading-size)")
    ] = None,
    kv_offloading_policy: Annotated[
        str | None, typer.Option(help="Which blocks leave that memory first: lru or arc")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences in a step")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens in a step")] = None,
    long_prefill_token_threshold: Annotated[
        int | None, typer.Option(help="Most tokens of one prompt in a step")
    ] = None,
    enable_prefix_caching: Annotated[
        bool | None,
        typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Reuse KV of equal prefixes"),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=1, max=65_535, help="The scheduler's metrics; the gateway's are on the HTTP port"),
    ] = None,
    attention_backend: Annotated[
        str | None,
        typer.Option(help="TRITON_ATTN, FLASH_ATTN, FLASHINFER, TORCH_SDPA or CPU_ATTN"),
    ] = None,
    exact: Annotated[
        bool | None,
        typer.Option(
            "--exact/--no-exact", help="On a GPU: bits that depend on nothing but a sequence's tokens"
        ),
    ] = None,
    enforce_eager: Annotated[
        bool | None,
        typer.Option("--enforce-eager/--no-enforce-eager", help="On a GPU: no CUDA graphs of decode steps"),
    ] = None,
    cudagraph_capture_sizes: Annotated[
        str | None, typer.Option(help="On a GPU: batch sizes to capture decode steps for, as in 1,2,4,8")
    ] = None,
    load_format: Annotated[str | None, typer.Option(help="auto, safetensors, gguf, dummy …")] = None,
    safetensors_load_strategy: Annotated[
        str | None, typer.Option(help="auto, lazy, eager (whole files), or prefetch (read ahead)")
    ] = None,
    trust_remote_code: Annotated[
        bool | None,
        typer.Option(
            "--trust-remote-code/--no-trust-remote-code", help="Run code that the model's folder brings"
        ),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            help="Quantize at load: fp8, fp8_per_channel, fp8_per_block, int8; a checkpoint says itself"
        ),
    ] = None,
    gptq_bits: Annotated[int | None, typer.Option(help="Checked against the checkpoint")] = None,
    gptq_group_size: Annotated[int | None, typer.Option(help="Checked against the checkpoint")] = None,
    awq_bits: Annotated[int | None, typer.Option(help="Checked against the checkpoint")] = None,
    runner: Annotated[
        str | None,
        typer.Option(help="auto, generate, or pooling (embeddings by the last token of a decoder)"),
    ] = None,
    pooler_config: Annotated[
        str | None, typer.Option(help='{"pooling_type": "MEAN", "CLS" or "LAST", "normalize": true or false}')
    ] = None,
    enable_lora: Annotated[
        bool | None, typer.Option("--enable-lora/--no-enable-lora", help="Serve LoRA adapters")
    ] = None,
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH", help='Adapters to serve; also {"name": …, "path": …}; repeat for several'
        ),
    ] = None,
    max_loras: Annotated[int | None, typer.Option(help="Adapters in one step")] = None,
    max_lora_rank: Annotated[int | None, typer.Option(help="Largest rank of an adapter")] = None,
    max_cpu_loras: Annotated[
        int | None, typer.Option(help="Adapters kept in memory, at least --max-loras")
    ] = None,
    allow_runtime_lora_updating: Annotated[
        bool | None,
        typer.Option(
            "--allow-runtime-lora-updating/--no-allow-runtime-lora-updating",
            help="Let clients load and unload adapters",
        ),
    ] = None,
    limit_mm_per_prompt: Annotated[
        str | None, typer.Option(help='Images that a request may have: {"image": 2}')
    ] = None,
    mm_processor_kwargs: Annotated[
        str | None, typer.Option(help="Instead of what the model's image processor says, a JSON object")
    ] = None,
    allowed_media_domains: Annotated[
        list[str] | None, typer.Option(help="Host that images may be fetched from; repeat for several")
    ] = None,
    allowed_local_media_path: Annotated[
        Path | None, typer.Option(help="Folder under which file:// URLs may name images")
    ] = None,
    mm_processor_cache_gb: Annotated[
        float | None, typer.Option(help="GiB for what the vision tower has made of images")
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="Processes that share every layer of the model")
    ] = None,
    data_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="Copies of the model, between which requests are routed")
    ] = None,
    enable_expert_parallel: Annotated[
        bool | None,
        typer.Option(
            "--enable-expert-parallel/--no-enable-expert-parallel",
            help="Whole experts on each process, instead of a part of every expert",
        ),
    ] = None,
    expert_placement_strategy: Annotated[str | None, typer.Option(help="linear or round_robin")] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda, or sim (no model, random tokens)")
    ] = None,
    sim_step_us: Annotated[int | None, typer.Option(help="Microseconds of a step on --device sim")] = None,
    sim_profile: Annotated[
        str | None, typer.Option(help="Step times on --device sim, from `kvern bench fit-profile`")
    ] = None,
    sim_speed: Annotated[
        float | None, typer.Option(help="Simulated seconds in a second on --device sim")
    ] = None,
    sim_groups: Annotated[
        int | None, typer.Option(min=1, help="Worker groups on --device sim, in one process")
    ] = None,
    sim_num_blocks: Annotated[int | None, typer.Option(help="KV blocks on --device sim")] = None,
    sim_vocab_size: Annotated[int | None, typer.Option(help="Vocabulary on --device sim")] = None,
) -> None:
    """Serve a model from this machine: store, worker, scheduler and gateway, restarted when they die."""
    flags = {name: value for name, value in locals().items() if value is not None}
    import asyncio

    from rich.console import Console

    from kvern_gateway.cli import stack
    from kvern_gateway.cli.ports import PortInUse
    from kvern_gateway.cli.up import StartTimes
    from kvern_gateway.cli.up import up as run

    times = StartTimes()
    try:
        stack.check_flags(flags)
        path, name = stack.resolve_model(model)
        directory = (data_dir or _default_data_dir()).expanduser().resolve()
        options = stack.StackOptions(
            model=path,
            served_model_name=served_model_name or name,
            data_dir=directory,
            run_dir=directory / "run",
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            store=store,
            redis_url=redis_url,
            appendfsync=appendfsync,
            api_key=api_key or (),
            flags=flags,
        )
        if dry_run or any(name in flags for names in stack.SERVICE_FLAGS.values() for name in names):
            # Where no flag is given, nothing is wrong and the start need not wait for it.
            stack.check(options)
        if dry_run:
            print(stack.describe(options))
            return
        if redis_url:
            stack.check_store(redis_url)
        code = asyncio.run(run(options, Console(highlight=False), times))
    except (stack.UsageError, PortInUse) as error:
        fail(error)
    raise typer.Exit(code)


def _default_data_dir() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "kvern"


def _use_config(context: typer.Context, path: str | None) -> str | None:
    """Eager: its values become the defaults of what is not given otherwise."""
    from kvern_gateway.cli.settings import SettingsError, read_file

    if path is not None:
        try:
            settings, notes = read_file(path, *_options(context.command.params))
            _check_types(path, settings, context)
        except SettingsError as error:
            fail(error)
        for note in notes:
            print(f"kvern up: --config: {note}", file=sys.stderr)
        context.default_map = {**(context.default_map or {}), **settings}
    return path


def _check_types(path: str, settings: dict[str, Any], context: typer.Context) -> None:
    """click would name the flag only. Raises SettingsError."""
    from kvern_gateway.cli.settings import SettingsError

    for parameter in context.command.params:
        if parameter.name in settings and parameter.callback is None:
            try:
                parameter.process_value(context, settings[parameter.name])
            except typer.BadParameter as error:
                said = f"--{parameter.name}".replace("_", "-") + f" is {settings[parameter.name]!r}"
                raise SettingsError(f"--config {path}: {said}: {error.message}") from error


def _check_variables(command: Any) -> None:
    """click would name the flag only. Raises SettingsError."""
    from kvern_gateway.cli.settings import ENVIRONMENT, SettingsError

    context = command.context_class(command)
    for parameter in command.params:
        variable = f"{ENVIRONMENT}{parameter.name.upper()}"
        value = os.environ.get(variable)
        if value and parameter.callback is None and parameter.nargs == 1 and not parameter.multiple:
            try:
                parameter.process_value(context, value)
            except typer.BadParameter as error:
                raise SettingsError(f"{variable} is {value!r}: {error.message}") from error


def _use_profile(context: typer.Context, name: str | None) -> str | None:
    """Eager, and weaker than a file."""
    from kvern_gateway.cli.settings import SettingsError, profile

    if name is not None:
        try:
            settings = profile(name)
        except SettingsError as error:
            fail(error)
        print(f"kvern up: --profile {name}: {' '.join(f'{key}={value}' for key, value in settings.items())}")
        context.default_map = {**settings, **(context.default_map or {})}
    return name


def translate(command: Any, words: list[str]) -> list[str]:
    """The flags of `kvern up`, in any spelling, as ``command``, the whole program, knows them. A refusal exits with 2."""
    from kvern.rpc import spellings
    from kvern_gateway.cli.settings import check_environment

    parameters = command.commands["up"].params
    try:
        translation = spellings.translate(words, *_options(parameters))
        _check_variables(command.commands["up"])
    except ValueError as error:
        print(f"kvern up: {error}", file=sys.stderr)
        sys.exit(2)
    for note in (*translation.notes, *check_environment(os.environ, [p.name for p in parameters])):
        print(f"kvern up: {note}", file=sys.stderr)
    return [word.removeprefix("--model=") for word in translation.argv if word != "--model"]


def _options(parameters: list[Any]) -> tuple[set[str], set[str]]:
    """All option strings of a command that are known, and those that take no value."""
    options = [p for p in parameters if p.param_type_name == "option"]
    known = {name for option in options for name in (*option.opts, *option.secondary_opts)}
    switches = {
        name for option in options if option.is_flag for name in (*option.opts, *option.secondary_opts)
    }
    return known | {"--help", "--model"}, switches
