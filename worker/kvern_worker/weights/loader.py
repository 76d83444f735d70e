"""Hands a model its weights, checked: fused and packed as they are read, one matrix in memory at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import kvern_kernels as kernels
from kvern.errors import invalid
from kvern_kernels.reference_gguf import GGUF_BLOCK_BYTES
from kvern_worker.parallel.group import ALONE, TensorParallel
from kvern_worker.quantization import Quantization
from kvern_worker.weights.layouts import IGNORED_SUFFIXES, read_matrix
from kvern_worker.weights.quantized import GgufMatrix, QuantizedMatrix, quantize
from kvern_worker.weights.shards import cut
from kvern_worker.weights.source import WHOLE, Part, TensorSource

if TYPE_CHECKING:
    from kvern_worker.adapters.slots import AdapterSlots

# Buffers that some checkpoints carry and no one needs.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".masked_bias")

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Not quantized at load: heads and routers, which are small and whose errors show most.
_KEPT_PLAIN = ("lm_head", "embed_out", "gate", "router", "shared_expert_gate")


def _unadapted(prefix: str) -> bool:
    return "layers." not in prefix or ".experts." in prefix


class WeightLoader:
    """Reads tensors of ``source`` as ``dtype``. ``on_bytes`` hears how many bytes of the file each one took.

    ``threads`` tensors are read at a time by :meth:`side_by_side`, each by one thread: the many short operations of
    dequantising would spend their time at the barriers of a pool.

    ``quantization``: the checkpoint's. ``online``: what plain matrices are quantized to, a value of quantization.ONLINE.
    ``keep_quantized``: quantized matrices stay so where the kernels can multiply by them as they are.

    ``device``: where tensors are made, by models too while :meth:`side_by_side` runs them; files are read on the host.
    ``tp``: the ranks that the matrices are split over. Shapes are those of whole tensors everywhere.
    """

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        on_bytes: Callable[[int], None],
        threads: int = 1,
        keep_quantized: bool = False,
        quantization: Quantization | None = None,
        online: str | None = None,
        adapters: AdapterSlots | None = None,
        device: torch.device | str = "cpu",
        tp: TensorParallel = ALONE,
    ) -> None:
        self._source = source
        self.dtype = dtype
        self._on_bytes = on_bytes
        self._threads = threads
        self._keep_quantized = keep_quantized
        self._quantization = quantization
        self._online = online
        self._adapters = adapters
        self._device = torch.device(device)
        self.tp = tp
        self._lock = threading.Lock()
        self._used: set[str] = set()
        self.num_parameters = 0
        self.num_bytes = 0

    def side_by_side(self, *builds: Callable[[], Any]) -> list[Any]:
        """What each of ``builds`` returns, in their order. Raises what the first failing one raised."""

        def here(build: Callable[[], Any]) -> Any:
            if self._device.type == "cpu":
                return build()
            with self._device:
                return build()

        with ThreadPoolExecutor(self._threads, "load") as pool:
            return [future.result() for future in [pool.submit(here, build) for build in builds]]

    def tensor(self, name: str, *shape: int, part: Part = WHOLE) -> Tensor:
        """One tensor, or a part of it, kept as it is. Raises KvernError when it is missing or has another shape."""
        out = torch.empty(part.shape(*shape), dtype=self.dtype)
        self._fill(name, out, shape, part)
        self._count(num_bytes=out.nbytes)
        return out

    def wide(self, name: str, *shape: int) -> Tensor:
        """One small tensor in float32 (norms, biases, router corrections): it costs nothing to keep its precision."""
        out = torch.empty(shape, dtype=torch.float32)
        self._fill(name, out)
        self._count(num_bytes=out.nbytes)
        return out

    def read(self, name: str, *shape: int, part: Part = WHOLE) -> Tensor:
        """One tensor that the caller rearranges before it is packed; a quantized matrix is dequantized."""
        out = torch.empty(part.shape(*shape), dtype=self.dtype)
        if self._quantization is not None and len(shape) == 2 and name.endswith(".weight"):
            matrix = self._matrix(name.removesuffix(".weight"), *shape)
            if matrix is not None:
                return out.copy_(part.of(matrix.dequantize()))
        self._fill(name, out, shape, part)
        return out

    def bytes(self, name: str, *shape: int) -> Tensor:
        """One tensor of uint8, as it is quantized."""
        out = torch.empty(shape, dtype=torch.uint8)
        self._fill(name, out)
        return out

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor; a dummy one has all."""
        return self._source.has(name)

    def holds(self, name: str) -> bool:
        """Whether the tensor is there to be read; in a dummy checkpoint none is."""
        return name in self._source.infos

    def stored(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """See layouts.Reader."""
        info = self._source.infos.get(name)
        return None if info is None or info.dtype is None else (info.shape, info.dtype)

    def raw(self, name: str, *shape: int) -> Tensor:
        """See layouts.Reader."""
        self._check(name, shape)
        out = torch.empty(shape, dtype=self._source.infos[name].dtype)
        self._read_into(name, out)
        self._done(name, 0)
        return out

    def linear(
        self,
        prefixes: Sequence[str],
        sizes: Sequence[int],
        in_size: int,
        bias: bool,
        *,
        rows: Sequence[Sequence[slice]] | None = None,
        columns: slice | None = None,
    ) -> kernels.PackedLinear:
        """``prefix.weight`` [size, in_size] (and ``prefix.bias``) of each prefix, stacked by rows and packed.

        Of each prefix only ``rows`` (outputs), and of all only ``columns`` (inputs), where the ranks share a matrix; the
        bias is the first rank's then, whose product is added to the others'.

        Matrices that are quantized alike stay so; others of one stack are dequantized. Adapters may change what it gives,
        but for the output layer and experts.
        """
        parts = [Part(of, columns) for of in (rows if rows is not None else [None] * len(prefixes))]
        if columns is not None and self.tp.rank:
            self._used.update(f"{prefix}.bias" for prefix in prefixes)
            bias = False
        packed = self._linear(prefixes, sizes, in_size, bias, parts)
        if self._adapters is None or any(_unadapted(prefix) for prefix in prefixes):
            return packed
        return self._adapters.adapt(packed, prefixes, sizes, in_size)

    def _linear(
        self, prefixes: Sequence[str], sizes: Sequence[int], in_size: int, bias: bool, parts: Sequence[Part]
    ) -> kernels.PackedLinear:
        whole = zip(prefixes, sizes, parts, strict=True)
        matrices = [self._matrix(prefix, size, in_size, part) for prefix, size, part in whole]
        known = [matrix for matrix in matrices if matrix is not None]
        if parts[0].columns is None or self.tp.rank == 0:
            # Tools that quantize give biases (of zeros) to layers that had none.
            bias = bias or (bool(known) and all(self.holds(f"{prefix}.bias") for prefix in prefixes))
        shapes = [part.shape(size, in_size) for size, part in zip(sizes, parts, strict=True)]
        packed_bias = self._stacked_bias(prefixes, sizes, parts) if bias else None
        if len(known) == len(matrices) and self._keep_quantized:
            stacked = _stack(known)
            if stacked is not None:
                return self.counted(stacked.pack(packed_bias))
        weight = torch.empty(sum(rows for rows, _ in shapes), shapes[0][1], dtype=self.dtype)
        held = weight.split([rows for rows, _ in shapes])
        for prefix, size, rows, matrix, part in zip(prefixes, sizes, held, matrices, parts, strict=True):
            if matrix is None:
                self._fill(f"{prefix}.weight", rows, (size, in_size), part)
            else:
                rows.copy_(matrix.dequantize())
        if self._online and not known and not _kept_plain(prefixes[0]):
            return self._pack_online(held, packed_bias)
        return self.pack(weight, packed_bias)

    def _matrix(self, prefix: str, size: int, in_size: int, part: Part = WHOLE) -> QuantizedMatrix | None:
        """The matrix as it is quantized, or None where it is plain, or is to be converted by who reads the file."""
        name = f"{prefix}.weight"
        if self._quantization is not None:
            matrix = read_matrix(
                *(self, prefix, size, in_size, self._quantization), exact=self.dtype == torch.float32
            )
            if matrix is not None:
                self._count(num_parameters=size * in_size)
                matrix = cut(matrix, part, name)
            return matrix
        if not self._keep_quantized or not self.holds(name):
            return None
        self._check(name, (size, in_size))
        blocks = self._blocks(name)
        if blocks is None or blocks[1] not in GGUF_BLOCK_BYTES:
            return None
        self._done(name, size * in_size)
        return cut(GgufMatrix(*blocks), part, name)

    def _stacked_bias(self, prefixes: Sequence[str], sizes: Sequence[int], parts: Sequence[Part]) -> Tensor:
        rows = [replace(part, columns=None) for part in parts]
        each = zip(prefixes, sizes, rows, strict=True)
        return torch.cat([self._read_bias(f"{prefix}.bias", size, part) for prefix, size, part in each])

    def _read_bias(self, name: str, size: int, part: Part) -> Tensor:
        out = torch.empty(part.shape(size), dtype=self.dtype)
        self._fill(name, out, (size,), part)
        return out

    def head(self, name: str, weight: Tensor, part: Part = WHOLE) -> kernels.PackedLinear:
        """The output layer that shares ``weight``, a part of [vocab, hidden], with the embedding ``name``."""
        blocks = self._blocks(name) if self._keep_quantized and self.holds(name) else None
        if blocks is None or blocks[1] not in GGUF_BLOCK_BYTES:
            return self.pack(weight)
        return self.counted(cut(GgufMatrix(*blocks), part, name).pack(None))

    def pack_layer(self, weight: Tensor, bias: Tensor | None = None) -> kernels.PackedLinear:
        """``weight`` [out, in], no head or router, quantized if that is asked for at load."""
        return self._pack_online([weight], bias) if self._online else self.pack(weight, bias)

    def _pack_online(self, parts: Sequence[Tensor], bias: Tensor | None) -> kernels.PackedLinear:
        assert self._online is not None
        matrices = [quantize(part, self._online) for part in parts]
        stacked = _stack(matrices)
        if stacked is not None:
            return self.counted(stacked.pack(bias))
        return self.pack(torch.cat([matrix.dequantize().to(self.dtype) for matrix in matrices]), bias)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> kernels.PackedLinear:
        """``weight`` [out, in] for kernels.linear."""
        return self.counted(kernels.pack_linear(weight, bias))

    def counted(self, packed: kernels.PackedLinear) -> kernels.PackedLinear:
        """The same, its memory counted."""
        self._count(num_bytes=packed.num_bytes)
        return packed

    @property
    def has_files(self) -> bool:
        """False for a dummy checkpoint."""
        return bool(self._source.infos)

    def took_all(self, num_parameters: int, num_bytes: int) -> None:
        """Someone else has read the whole checkpoint."""
        self._count(num_bytes, num_parameters)
        self._on_bytes(self._source.total_bytes)

    def skip(self, prefix: str) -> None:
        """Tensors of this prefix that nobody asked for are no fault."""
        self._used.update(name for name in self._source.infos if name.startswith(prefix))

    def finish(self, *ignored: str) -> None:
        """Raises KvernError when the checkpoint has tensors that the model did not ask for, and that start with none
        of ``ignored``."""
        unexpected = [
            name
            for name in self._source.infos
            if name not in self._used
            and not name.startswith(ignored)
            and not name.endswith(_IGNORED_SUFFIXES)
            and not (self._quantization is not None and name.endswith(IGNORED_SUFFIXES))
        ]
        if unexpected:
            name = unexpected[0]
            raise invalid(
                "model",
                f"{len(unexpected)} tensors of the checkpoint do not belong to this architecture, the first is "
                f"{name} in {self._source.infos[name].file}",
                value=name,
            )

    def _fill(self, name: str, out: Tensor, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> None:
        shape = tuple(out.shape) if shape is None else shape
        self._check(name, shape)
        info = self._source.infos.get(name)
        if info is not None and info.dtype not in (*_FLOATS, None, out.dtype):
            raise invalid(
                "model",
                f"tensor {name} in {info.file} is {str(info.dtype).removeprefix('torch.')}, and nothing says how it is "
                "quantized; the model needs floats there",
                value=info.dtype,
            )
        if part == WHOLE:
            self._read_into(name, out)
        else:
            self._source.read_part(name, shape, part, out)
        self._done(name, prod(shape))

    def _read_into(self, name: str, out: Tensor) -> None:
        if out.device.type == "cpu":
            self._source.read_into(name, out)
            return
        with torch.device("cpu"):
            read = torch.empty(out.shape, dtype=out.dtype)
            self._source.read_into(name, read)
        out.copy_(read)

    def _blocks(self, name: str) -> tuple[Tensor, str] | None:
        with torch.device("cpu"):
            found = self._source.blocks(name)
        return None if found is None else (found[0].to(self._device), found[1])

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if not self._source.has(name):
            files = ", ".join(file.name for file in self._source.files)
            raise invalid("model", f"tensor {name} {list(shape)} is missing in {files}", value=name)
        info = self._source.infos.get(name)
        if info is not None and info.shape != shape:
            raise invalid(
                "model",
                f"tensor {name} in {info.file} has shape {list(info.shape)}, the configuration wants "
                f"{list(shape)}",
                value=list(info.shape),
                limit=list(shape),
            )

    def _done(self, name: str, num_parameters: int) -> None:
        """``name`` is read."""
        info = self._source.infos.get(name)
        self._used.add(name)
        self._count(num_parameters=num_parameters)
        self._on_bytes(info.num_bytes if info is not None else num_parameters * self.dtype.itemsize)

    def _count(self, num_bytes: int = 0, num_parameters: int = 0) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            self.num_parameters += num_parameters


def _stack(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix | None:
    if any(type(matrix) is not type(matrices[0]) for matrix in matrices):
        return None
    return matrices[0] if len(matrices) == 1 else type(matrices[0]).stack(matrices)


def _kept_plain(prefix: str) -> bool:
    *_, above, last = "", *prefix.split(".")
    return last in _KEPT_PLAIN or above == "router"
