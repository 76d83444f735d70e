"""safetensors checkpoints, one file or shards, read as the file system likes it."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvern_worker.weights.source import Part, TensorInfo, TensorSource, broken_file

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NETWORK = ("nfs", "nfs4", "cifs", "lustre", "ceph", "glusterfs", "9p")
_READ_AHEAD = 16 << 20


class SafetensorsSource(TensorSource):
    """``files`` are the shards; each tensor is in exactly one of them.

    ``strategy``: "lazy" maps the files and reads what is asked for; "eager" reads a file as a whole when its first tensor
    is asked for, in one sequential sweep, and drops it after its last one; "prefetch" maps them and reads them ahead, in
    order, in the background; "auto" prefetches from network file systems, where scattered reads of a mapping are slow.
    """

    def __init__(self, files: list[Path], strategy: str = "auto") -> None:
        self.infos = {}
        self._handles: dict[Path, Any] = {}
        for file in files:
            try:
                handle = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise broken_file(file, error) from error
            self._handles[file] = handle
            for name in handle.keys():  # noqa: SIM118 - no mapping, it has no __iter__
                piece = handle.get_slice(name)
                shape = tuple(piece.get_shape())
                dtype = _DTYPES.get(piece.get_dtype(), torch.uint8)
                num_bytes = prod(shape) * dtype.itemsize
                self.infos[name] = TensorInfo(shape, num_bytes, file, dtype)
        if strategy == "auto":
            strategy = "prefetch" if files and file_system(files[0]) in _NETWORK else "lazy"
        self._eager = strategy == "eager"
        self._lock = threading.Lock()
        self._whole: dict[Path, dict[str, Tensor]] = {}
        self._left = Counter(info.file for info in self.infos.values())
        if strategy == "prefetch":
            threading.Thread(target=_read_ahead, args=(files,), daemon=True, name="prefetch").start()

    def read_into(self, name: str, out: Tensor) -> None:
        file = self.infos[name].file
        try:
            if self._eager:
                out.copy_(self._from_whole(file, name))
            else:
                out.copy_(self._handles[file].get_tensor(name))
        except SafetensorError as error:
            raise broken_file(file, error) from error

    def read_part(self, name: str, shape: tuple[int, ...], part: Part, out: Tensor) -> None:
        if self._eager:
            return super().read_part(name, shape, part, out)
        file = self.infos[name].file
        columns = () if part.columns is None else (part.columns,)
        try:
            stored = self._handles[file].get_slice(name)
            at = 0
            for rows in part.rows or [slice(0, shape[0])]:
                count = rows.stop - rows.start
                out[at : at + count].copy_(stored[(rows, *columns)])
                at += count
        except SafetensorError as error:
            raise broken_file(file, error) from error

    def _from_whole(self, file: Path, name: str) -> Tensor:
        with self._lock:
            if file not in self._whole:
                self._whole[file] = _read_whole(file)
            tensor = self._whole[file][name]
            self._left[file] -= 1
            if not self._left[file]:
                del self._whole[file]
        return tensor


def _read_whole(path: Path) -> dict[str, Tensor]:
    """All tensors, views into one buffer. The format: a length, a JSON header of that length, and the data."""
    data = bytearray(path.stat().st_size)
    with path.open("rb", buffering=0) as file:
        view, at = memoryview(data), 0
        while count := file.readinto(view[at:]):
            at += count
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        shape, dtype = entry["shape"], _DTYPES[entry["dtype"]]
        offset = start + entry["data_offsets"][0]
        flat = (
            torch.frombuffer(data, dtype=torch.uint8, count=prod(shape) * dtype.itemsize, offset=offset)
            if prod(shape)
            else torch.empty(0, dtype=torch.uint8)
        )
        tensors[name] = flat.view(dtype).view(shape)
    return tensors


def file_system(path: Path) -> str:
    """The type of the file system that ``path`` lies on, as /proc/mounts names it; "" where that is unknown."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return ""
    resolved = path.resolve()
    holding = [(len(point), kind) for point, kind in mounts if resolved.is_relative_to(point)]
    return max(holding, default=(0, ""))[1]


def _read_ahead(files: list[Path]) -> None:
    """Brings the files into the page cache. What cannot be read is reported by who needs it."""
    for path in files:
        try:
            with path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
                while file.read(_READ_AHEAD):
                    pass
        except OSError:
            return
