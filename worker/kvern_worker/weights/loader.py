"""Hands a model its weights, checked: fused and packed as they are read, one matrix in memory at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

import kvern_kernels as kernels
from kvern.errors import invalid
from kvern_worker.weights.source import TensorSource

# Quantized formats that kernels.linear multiplies by as they are.
PACKED_KINDS = ("Q4_0", "Q4_1", "Q8_0")

# Buffers that some checkpoints carry and no one needs.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".masked_bias")


class WeightLoader:
    """Reads tensors of ``source`` as ``dtype``. ``on_bytes`` hears how many bytes of the file each one took.

    ``threads`` tensors are read at a time by :meth:`side_by_side`, each by one thread: the many short operations of
    dequantising would spend their time at the barriers of a pool.
    """

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        on_bytes: Callable[[int], None],
        threads: int = 1,
        keep_quantized: bool = False,
    ) -> None:
        self._source = source
        self.dtype = dtype
        self._on_bytes = on_bytes
        self._threads = threads
        self._keep_quantized = keep_quantized
        self._lock = threading.Lock()
        self._used: set[str] = set()
        self.num_parameters = 0
        self.num_bytes = 0

    def side_by_side(self, *builds: Callable[[], Any]) -> list[Any]:
        """What each of ``builds`` returns, in their order. Raises what the first failing one raised."""
        with ThreadPoolExecutor(self._threads, "load") as pool:
            return [future.result() for future in [pool.submit(build) for build in builds]]

    def tensor(self, name: str, *shape: int) -> Tensor:
        """One tensor, kept as it is. Raises KvernError when it is missing or has another shape."""
        out = torch.empty(shape, dtype=self.dtype)
        self._fill(name, out)
        self._count(num_bytes=out.nbytes)
        return out

    def wide(self, name: str, *shape: int) -> Tensor:
        """One small tensor in float32 (norms, biases, router corrections): it costs nothing to keep its precision."""
        out = torch.empty(shape, dtype=torch.float32)
        self._fill(name, out)
        self._count(num_bytes=out.nbytes)
        return out

    def read(self, name: str, *shape: int) -> Tensor:
        """One tensor that the caller rearranges before it is packed."""
        out = torch.empty(shape, dtype=self.dtype)
        self._fill(name, out)
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

    def linear(
        self, prefixes: Sequence[str], sizes: Sequence[int], in_size: int, bias: bool
    ) -> kernels.PackedLinear:
        """``prefix.weight`` [size, in_size] (and ``prefix.bias``) of each prefix, stacked by rows and packed.

        With ``keep_quantized``, quantized weights stay so where the kernels can multiply by them as they are.
        """
        packed_bias = None
        if bias:
            packed_bias = torch.empty(sum(sizes), dtype=self.dtype)
            for prefix, rows in zip(prefixes, packed_bias.split(list(sizes)), strict=True):
                self._fill(f"{prefix}.bias", rows)
        names = [f"{prefix}.weight" for prefix in prefixes]
        for name, size in zip(names, sizes, strict=True):
            self._check(name, (size, in_size))
        blocks = [self._source.blocks(name) for name in names] if self._keep_quantized else []
        kinds = {part[1] if part is not None else "" for part in blocks}
        if len(kinds) == 1 and (kind := kinds.pop()) in PACKED_KINDS:
            packed = kernels.pack_gguf(torch.cat([part[0] for part in blocks if part]), kind, packed_bias)
            for name, size in zip(names, sizes, strict=True):
                self._done(name, size * in_size)
            self._count(num_bytes=packed.num_bytes)
            return packed
        weight = torch.empty(sum(sizes), in_size, dtype=self.dtype)
        for name, rows in zip(names, weight.split(list(sizes)), strict=True):
            self._fill(name, rows)
        return self.pack(weight, packed_bias)

    def head(self, name: str, weight: Tensor) -> kernels.PackedLinear:
        """The output layer that shares ``weight`` [vocab, hidden] with the embedding ``name``."""
        blocks = self._source.blocks(name) if self._keep_quantized else None
        if blocks is None or blocks[1] not in PACKED_KINDS:
            return self.pack(weight)
        packed = kernels.pack_gguf(*blocks)
        return self.counted(packed)

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

    def finish(self, *ignored: str) -> None:
        """Raises KvernError when the checkpoint has tensors that the model did not ask for, and that start with none
        of ``ignored``."""
        unexpected = [
            name
            for name in self._source.infos
            if name not in self._used
            and not name.startswith(ignored)
            and not name.endswith(_IGNORED_SUFFIXES)
        ]
        if unexpected:
            name = unexpected[0]
            raise invalid(
                "model",
                f"{len(unexpected)} tensors of the checkpoint do not belong to this architecture, the first is "
                f"{name} in {self._source.infos[name].file}",
                value=name,
            )

    def _fill(self, name: str, out: Tensor) -> None:
        self._check(name, tuple(out.shape))
        self._source.read_into(name, out)
        self._done(name, out.numel())

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
