"""The GGUF container: metadata and the places of tensors.

The gguf package's own reader builds an array object for every string of the vocabulary, which takes seconds;
this one skips what is not asked for.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvern_worker.weights.source import broken_file

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9

# Number in the file → name, elements of a block, bytes of a block.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True)
class GgufTensor:
    """``shape`` is row-major as in torch (the file has it reversed). ``type_name`` is "" when unsupported."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    type_name: str
    offset: int
    num_bytes: int


class GgufFile:
    """A mapped GGUF file. ``metadata`` holds scalars, strings and arrays of numbers; of arrays of strings only
    the length is kept, under ``<key>.length``. Raises KvernError when the file is broken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._parse()
        except (OSError, struct.error, ValueError, KeyError, UnicodeDecodeError) as error:
            raise broken_file(path, error) from error

    def raw(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, [num_bytes], not copied."""
        return np.frombuffer(self._bytes, np.uint8, tensor.num_bytes, tensor.offset)

    def _parse(self) -> None:
        magic, version, num_tensors, num_values = struct.unpack_from("<4sIQQ", self._bytes, 0)
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"not a GGUF file of version 2 or 3 (starts with {magic!r}, version {version})")
        position = 24
        for _ in range(num_values):
            key, position = self._string(position)
            (kind,) = struct.unpack_from("<I", self._bytes, position)
            position = self._value(key, kind, position + 4)
        tensors = []
        for _ in range(num_tensors):
            name, position = self._string(position)
            (rank,) = struct.unpack_from("<I", self._bytes, position)
            dims = struct.unpack_from(f"<{rank}Q", self._bytes, position + 4)
            number, offset = struct.unpack_from("<IQ", self._bytes, position + 4 + 8 * rank)
            position += 16 + 8 * rank
            tensors.append((name, tuple(reversed(dims)), number, offset))
        alignment = int(self.metadata.get("general.alignment", 32))
        start = -(-position // alignment) * alignment
        for name, shape, number, offset in tensors:
            type_name, block, block_bytes = TENSOR_TYPES.get(number, ("", 1, 0))
            num_bytes = int(np.prod(shape, dtype=np.int64)) // block * block_bytes
            if start + offset + num_bytes > len(self._bytes):
                raise ValueError(f"tensor {name} ends past the end of the file")
            self.tensors[name] = GgufTensor(name, shape, number, type_name, start + offset, num_bytes)

    def _value(self, key: str, kind: int, position: int) -> int:
        """Stores the value at ``position`` and returns the position after it."""
        if kind == _STRING:
            self.metadata[key], position = self._string(position)
            return position
        if kind == _ARRAY:
            return self._array(key, position)
        code = _SCALARS[kind]
        (self.metadata[key],) = struct.unpack_from(code, self._bytes, position)
        return position + struct.calcsize(code)

    def _array(self, key: str, position: int) -> int:
        kind, length = struct.unpack_from("<IQ", self._bytes, position)
        position += 12
        if kind == _STRING:
            data, unpack = self._bytes, struct.Struct("<Q").unpack_from
            for _ in range(length):
                position += 8 + unpack(data, position)[0]
            self.metadata[f"{key}.length"] = length
            return position
        dtype = np.dtype(_SCALARS[kind])
        self.metadata[key] = np.frombuffer(self._bytes, dtype, length, position)
        return position + length * dtype.itemsize

    def _string(self, position: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._bytes, position)
        end = position + 8 + length
        return self._bytes[position + 8 : end].decode("utf-8"), end
