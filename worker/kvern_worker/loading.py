"""From flags to a running executor, one logged phase after another."""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

from kvern.errors import invalid
from kvern.rpc import logs
from kvern.v1 import model_pb2
from kvern_kernels import kv_cache
from kvern_worker import start_log
from kvern_worker.adapters.library import AdapterLibrary
from kvern_worker.adapters.slots import AdapterSlots
from kvern_worker.config import unsupported
from kvern_worker.device import Host
from kvern_worker.executor import Limits, ModelExecutor
from kvern_worker.gpu import loading as gpu_loading
from kvern_worker.gpu.device import Gpu, open_gpu
from kvern_worker.images import BatchImages, Seeing
from kvern_worker.layers.attention import KvCache, block_bytes, warm_up_step
from kvern_worker.machine import freed_memory_returned, has_fast_bfloat16, physical_cores
from kvern_worker.models import registry
from kvern_worker.parallel.executor import GroupExecutor
from kvern_worker.parallel.group import ALONE, WorkerGroup
from kvern_worker.parallel.topology import ALL_IN_ONE, Topology
from kvern_worker.pooling import PoolingConfig, choose_pooling
from kvern_worker.quantization import Asked
from kvern_worker.sizing import GIB, KvSize, kv_bytes, size_hybrid, size_kv
from kvern_worker.tiers.opening import open_tiers
from kvern_worker.weights.checkpoint import Checkpoint, open_checkpoint
from kvern_worker.weights.loader import WeightLoader

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# GGUF weights become --dtype up to this size: that computes prompts and large batches several times faster.
# Beyond it, memory and single streams matter more, and they stay quantized.
_CONVERT_UP_TO = 2 * GIB

log = logging.getLogger(__name__)


class Progress(Protocol):
    """Who is told how far loading is."""

    def start(self, total_bytes: int) -> None: ...

    def add(self, num_bytes: int) -> None: ...


@dataclass(frozen=True)
class LoadOptions:
    """See the flags of kvern-worker. None: chosen from model and machine."""

    model: str
    # "cpu", "cuda", or "interpreter": what a GPU would do, on the CPU, by Triton's interpreter.
    device: str = "cpu"
    attention_backend: str | None = None
    exact: bool | None = None
    enforce_eager: bool = False
    cudagraph_capture_sizes: Sequence[int] | None = None
    served_model_name: str | None = None
    load_format: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    mamba_block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    threads: int | None = None
    keep_quantized: bool | None = None
    quantization: str | None = None
    gptq_bits: int | None = None
    gptq_group_size: int | None = None
    awq_bits: int | None = None
    safetensors_load_strategy: str = "auto"
    trust_remote_code: bool = False
    kv_offloading_gib: float = 0.0
    kv_offloading_dir: str | None = None
    kv_offloading_disk_gib: float | None = None
    runner: str = "auto"
    pooler_config: str | None = None
    mm_processor_cache_gb: float = 1.0
    max_loras: int = 0
    max_cpu_loras: int | None = None
    max_lora_rank: int = 16
    topology: Topology = ALL_IN_ONE
    # Ranks of the group on this machine, which share its memory and cores.
    local_world: int = 1


# Meets the other ranks of the group; told the digest of the model.
Join = Callable[[str], WorkerGroup]


def load(options: LoadOptions, progress: Progress, join: Join | None = None) -> ModelExecutor:
    """Raises KvernError with what is wrong with the model, the options or the group."""
    _validate(options)
    device = _open_device(options.device)
    threads = options.threads or max(1, physical_cores() // options.local_world)
    start_log.opened(device, threads)
    with _phase("open", model=options.model):
        checkpoint = open_checkpoint(
            *(options.model, options.load_format),
            strategy=options.safetensors_load_strategy,
            trust_remote_code=options.trust_remote_code,
            asked=Asked(options.quantization, options.gptq_bits, options.gptq_group_size, options.awq_bits),
        )
        bidirectional = checkpoint.config.bidirectional
        pooling = choose_pooling(checkpoint.path, bidirectional, options.runner, options.pooler_config)
        if pooling and pooling.max_length and options.max_model_len is None:
            longest = min(checkpoint.config.max_positions, pooling.max_length)
            checkpoint = replace(checkpoint, config=replace(checkpoint.config, max_positions=longest))
        dtype_name = choose_dtype(options.dtype, checkpoint.config.dtype, _multiplies_bfloat16(device))
        progress.start(checkpoint.source.total_bytes)
    if options.topology.world > 1 and options.kv_offloading_gib:
        raise unsupported(
            "--kv-offloading-size: blocks of a group of several ranks are not offloaded yet; leave the flag out",
            field="kv_offloading_size",
            value=options.kv_offloading_gib,
        )
    options.topology.check_model(checkpoint.config, checkpoint.file)
    if options.topology.world > 1 and isinstance(device, Gpu):
        raise unsupported(
            "groups of several ranks run on CPUs; groups of GPUs are not supported yet",
            field="device",
            value="cuda",
        )
    group = None if join is None else join(checkpoint.digest.hex())
    tp = ALONE if group is None else group.tp
    config, dtype = checkpoint.config, DTYPES[dtype_name]
    kv_dtype_name = choose_kv_dtype(options.kv_cache_dtype, dtype_name)
    kv_dtype = kv_cache.DTYPES[kv_dtype_name]
    if isinstance(device, Gpu):
        gpu_loading.check(checkpoint.file, config, kv_dtype_name)
        gpu_loading.use_exact(bool(options.exact))
    kv_heads = tp.num_kv_heads(config.num_kv_heads)
    size = _size(options, checkpoint, dtype, kv_dtype, device)
    if group is not None:
        # The scheduler has one table of blocks for all ranks.
        num_blocks, max_model_len = group.smallest(size.num_blocks, size.max_model_len)
        size = replace(size, num_blocks=num_blocks, max_model_len=max_model_len)
    keep_quantized = options.keep_quantized
    if keep_quantized is None:
        large = weight_bytes(checkpoint, dtype) > _CONVERT_UP_TO
        keep_quantized = large if checkpoint.load_format == "gguf" else True
    with _phase(
        "kv_cache",
        dtype=kv_dtype_name,
        bytes=size.num_bytes,
        bytes_per_block=size.bytes_per_block,
        blocks=size.num_blocks,
        block_size=size.block_size,
        tokens=size.num_tokens,
        max_model_len=size.max_model_len,
        max_concurrency=f"{size.max_concurrency:.2f}",
        **({"states": size.state_slots, "checkpoints": size.num_checkpoints} if size.state_slots else {}),
    ):
        cache = KvCache(
            config.kv_layers,
            size.num_blocks if isinstance(device, Host) else 1,  # until the rest is measured
            kv_heads,
            size.block_size,
            config.head_dim,
            kv_dtype,
            config.states,
            size.state_slots,
            size.num_checkpoints,
            device.place,
        )
    with _phase("weights", format=checkpoint.load_format, dtype=dtype_name, threads=threads) as done:
        torch.set_num_threads(1)
        adapters = _adapters(options, dtype, device.place)
        slots = None if adapters is None else adapters.slots
        loader = WeightLoader(
            *(checkpoint.source, dtype, progress.add, threads, keep_quantized),
            quantization=config.quantization,
            online=checkpoint.online,
            adapters=slots,
            device=device.place,
            tp=tp,
        )
        with freed_memory_returned(), nullcontext() if isinstance(device, Host) else device.place:
            model = checkpoint.file.build(config, loader, cache, size.max_model_len)
        torch.set_num_threads(threads)
        done["bytes"] = loader.num_bytes
    if slots is not None and not slots.targets:
        raise invalid("enable_lora", f"{config.architecture} has no linear layers that take adapters")
    if isinstance(device, Gpu):
        device.adapters = slots
        with _phase("kv_cache") as done:
            size = gpu_loading.fit_cache(
                *(device, model, cache, size),
                asked_bytes=options.kv_cache_memory_bytes,
                asked_len=options.max_model_len,
                utilization=options.gpu_memory_utilization,
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                pooling=pooling is not None,
            )
            done.update(blocks=size.num_blocks, tokens=size.num_tokens, max_model_len=size.max_model_len)
    with _phase("warmup"):
        _warm_up(device, model, pooling)
        if isinstance(device, Gpu) and not options.enforce_eager and pooling is None:
            longest = -(-size.max_model_len // size.block_size)
            gpu_loading.capture_graphs(
                *(device, model, options.cudagraph_capture_sizes, options.max_num_seqs, longest),
                options.attention_backend,
            )
    info = model_pb2.ModelInfo(
        name=options.served_model_name or Path(options.model).stem,
        architecture=config.architecture,
        dtype=dtype_name,
        vocab_size=config.vocab_size,
        max_model_len=size.max_model_len,
        eos_token_ids=config.eos_token_ids,
        num_parameters=loader.num_parameters,
        digest=hashlib.sha256(
            checkpoint.digest + f"{dtype_name} {kv_dtype_name} {pooling}".encode()
        ).digest(),
        kv_cache_dtype=kv_dtype_name,
        state_block_size=size.state_block_size,
        sliding_window=_sliding_window(config),
        pooling=pooling.to_pb(config.hidden_size, bidirectional) if pooling else None,
        images=isinstance(model, Seeing),
    )
    max_num_seqs = size.state_slots or options.max_num_seqs
    sizes = (options.kv_offloading_gib, options.kv_offloading_dir, options.kv_offloading_disk_gib)
    with _phase("tiers") as done:
        transfers, tier_blocks = open_tiers(*sizes, cache, info.digest)
        done["memory_blocks"], done["disk_blocks"] = tier_blocks
    limits = Limits(
        *(max_num_seqs, options.max_num_batched_tokens, size.max_model_len, size.bytes_per_block),
        *tier_blocks,
    )
    # All but the embedding, of which a step reads a row for each token.
    read = loader.num_bytes - config.vocab_size * config.hidden_size * dtype.itemsize
    sparse = hasattr(config, "routing")
    images = None
    if isinstance(model, Seeing):
        cached = int(options.mm_processor_cache_gb * GIB)
        images = BatchImages(model, dtype, checkpoint.path, max_num_seqs, cached)
    start_log.warn_of_low_memory(device)
    parts = (
        model,
        cache,
        info,
        limits,
        threads,
        pooling,
        adapters,
        0 if sparse else read,
        device,
        images,
        transfers,
    )
    if group is None:
        return ModelExecutor(*parts, held_bytes=loader.num_bytes)
    return GroupExecutor(*parts, held_bytes=loader.num_bytes, group=group)


def _open_device(name: str) -> Host | Gpu:
    if name == "interpreter":
        return Gpu(torch.device("cpu"))
    return open_gpu() if name == "cuda" else Host()


def _multiplies_bfloat16(device: Host | Gpu) -> bool:
    return has_fast_bfloat16() if device.place.type == "cpu" else torch.cuda.is_bf16_supported()


def _sliding_window(config: Any) -> int:
    """Of the layer that sees most, where none sees all."""
    windows: Sequence[int] = getattr(config, "windows", ()) or (0,)
    return max(windows) if all(windows) else 0


def _adapters(options: LoadOptions, dtype: torch.dtype, place: torch.device) -> AdapterLibrary | None:
    if not options.max_loras:
        return None
    slots = AdapterSlots(options.max_loras, options.max_lora_rank, dtype, place)
    return AdapterLibrary(slots, max(options.max_cpu_loras or 0, options.max_loras), dtype)


def _validate(options: LoadOptions) -> None:
    for field in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
        if (value := getattr(options, field)) <= 0:
            raise invalid(field, f"{field.replace('_', '-')} must be positive, is {value}", value=value)
    if options.threads is not None and options.threads <= 0:
        raise invalid("threads", f"threads must be positive, is {options.threads}", value=options.threads)
    if options.max_num_batched_tokens < options.max_num_seqs:
        raise invalid(
            "max_num_batched_tokens",
            f"max-num-batched-tokens ({options.max_num_batched_tokens}) must be at least max-num-seqs "
            f"({options.max_num_seqs}), so that all can decode in one step",
            value=options.max_num_batched_tokens,
            limit=options.max_num_seqs,
        )


def choose_dtype(requested: str, checkpoint: str, fast_bfloat16: bool) -> str:
    """ "auto" is the checkpoint's dtype, or float32 where that would be emulated."""
    if requested == "auto":
        if checkpoint == "bfloat16" and not fast_bfloat16:
            log.warning("phase=dtype dtype=float32 reason=%r", "this CPU has no bfloat16 instructions")
            return "float32"
        return checkpoint
    requested = {"half": "float16", "float": "float32"}.get(requested, requested)
    if requested not in DTYPES:
        raise invalid(
            "dtype", f"dtype {requested} is unknown; choose auto, {', '.join(DTYPES)}", value=requested
        )
    return requested


def choose_kv_dtype(requested: str, dtype: str) -> str:
    """A key of kv_cache.DTYPES: "auto" is the model's dtype, "fp8_e4m3" another name of fp8."""
    own = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    chosen = own[dtype] if requested == "auto" else requested
    chosen = {"fp8_e4m3": "fp8", **own}.get(chosen, chosen)
    if chosen not in kv_cache.DTYPES:
        raise invalid(
            "kv_cache_dtype",
            f"kv-cache-dtype {requested} is unknown; choose auto, {', '.join(kv_cache.DTYPES)}",
            value=requested,
        )
    return chosen


def _size(
    options: LoadOptions,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: Host | Gpu,
) -> KvSize:
    """Before the weights are read, so that what cannot fit fails at once."""
    config = checkpoint.config
    if not config.kv_layers:
        raise unsupported(
            f"{config.architecture} without any attention layer is not supported: all {config.num_layers} keep states",
            field="layers_block_type",
        )
    ranks = options.topology.tensor
    available = device.memory()[0] // options.local_world
    weights = weight_bytes(checkpoint, dtype) // ranks + adapter_bytes(checkpoint, options, dtype)
    kv_heads = max(1, config.num_kv_heads // ranks)
    per_block = block_bytes(len(config.kv_layers), kv_heads, options.block_size, config.head_dim, kv_dtype)
    if weights + per_block > available:
        name, parts = str(dtype).removeprefix("torch."), weight_parts(checkpoint, dtype)
        shares = ", ".join(f"{part} {size / GIB:.2f}" for part, size in parts.items())
        raise invalid(
            "model",
            f"too little memory: the weights take {weights / GIB:.2f} GiB as {name} ({shares}), a KV block of "
            f"{options.block_size} tokens {per_block / GIB:.4f} GiB, and {available / GIB:.2f} GiB are free; choose a "
            "smaller --dtype or model, or free memory",
            value=weights + per_block,
            limit=available,
        )
    utilization = options.gpu_memory_utilization
    if utilization is None and isinstance(device, Gpu):
        utilization = 1.0  # a bound, until what a step needs is measured
    pool = kv_bytes(options.kv_cache_memory_bytes, utilization, available, weights)
    if config.bidirectional and options.kv_cache_memory_bytes is None:
        # Two steps in flight, and as much again that waits to be released.
        steps = 4 * (-(-options.max_num_batched_tokens // options.block_size) + options.max_num_seqs)
        pool = min(pool, per_block * max(steps, -(-config.max_positions // options.block_size)))
    if weights + pool > available:
        log.warning(
            "phase=memory weights=%d kv_cache=%d free=%d reason=%r",
            *(
                weights,
                pool,
                available,
                "the KV cache reaches beyond what is free, and may be swapped or killed",
            ),
        )
    lengths = (options.block_size, options.max_model_len, config.max_positions)
    if config.states is None:
        if options.mamba_block_size is not None:
            log.warning(
                "phase=states reason=%r", "--mamba-block-size has no effect: the model keeps no states"
            )
        return size_kv(pool, per_block, *lengths)
    return size_hybrid(
        *(pool, per_block, config.states.num_bytes, options.max_num_seqs, options.mamba_block_size),
        *lengths,
    )


def adapter_bytes(checkpoint: Checkpoint, options: LoadOptions, dtype: torch.dtype) -> int:
    """What all slots would take, were every matrix of every layer adapted."""
    matrices = (
        info.shape
        for name, info in checkpoint.source.infos.items()
        if len(info.shape) == 2 and "layers." in name and ".experts." not in name
    )
    return options.max_loras * options.max_lora_rank * dtype.itemsize * sum(map(sum, matrices))


def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """What the weights will take in memory."""
    return sum(weight_parts(checkpoint, dtype).values())


def weight_parts(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, int]:
    """The same by what they belong to."""
    config = checkpoint.config
    parts = {"embedding and head": 0, "experts": 0, "other layers": 0}
    for name, info in checkpoint.source.infos.items():
        count = prod(info.shape)
        # Integers: quantized, and kept so. One byte an element: float8, that becomes bfloat16 or wider.
        integers = info.dtype is not None and not info.dtype.is_floating_point
        size = info.num_bytes if integers else count * dtype.itemsize
        ends = not re.search(r"\.\d+\.", name) and len(info.shape) > 1
        parts["embedding and head" if ends else "experts" if "experts" in name else "other layers"] += size
    if config.tie_word_embeddings:
        # The packed head, beside the embedding.
        parts["embedding and head"] += config.vocab_size * config.hidden_size * dtype.itemsize
    return parts


@torch.inference_mode()
def _warm_up(device: Host | Gpu, model: registry.Model, pooling: PoolingConfig | None) -> None:
    """Loads and tunes what the first request would else wait for."""
    states = device.forward(model, warm_up_step())
    if pooling is None:
        model.logits(states, slice(0, 1))
        return
    if not isinstance(model, registry.Embedder):
        raise unsupported("this model cannot give embeddings", field="runner", value="pooling")
    model.hidden(states, slice(0, 1))


@contextmanager
def _phase(name: str, **fields: object) -> Iterator[dict[str, object]]:
    """Logs ``phase=NAME seconds=… key=value…`` when the block is over; the block may add fields."""
    started = time.perf_counter()
    yield fields
    logs.event(log, f"phase={name}", seconds=round(time.perf_counter() - started, 3), **fields)
