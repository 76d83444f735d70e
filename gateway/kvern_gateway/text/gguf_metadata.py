"""The key-value header of a GGUF file, read in tens of milliseconds and without touching tensor data.

``gguf.GGUFReader`` builds a numpy view per string, which takes five seconds for a vocabulary of 49,152 tokens.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

MAGIC = 0x46554747
_UINT32, _STRING, _ARRAY = 4, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# A header is the metadata only; even a 256k vocabulary with merges stays far below this.
_MAX_HEADER_BYTES = 512 * 2**20
_CHUNK_BYTES = 16 * 2**20


class GGUFError(ValueError):
    """The file is not a GGUF file that can be read."""


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Metadata by key: scalars, strings and lists.

    Raises:
        GGUFError: The file is no GGUF file, is of another version than 2 or 3, or its header is cut off.
        OSError: The file can't be read.
    """
    with open(path, "rb") as file:
        size = _CHUNK_BYTES
        while True:
            file.seek(0)
            data = file.read(size)
            try:
                return _parse(data, path)
            except (struct.error, IndexError) as error:
                if len(data) < size or size >= _MAX_HEADER_BYTES:
                    raise GGUFError(f"{path}: the GGUF header is cut off or damaged") from error
                size *= 4


def _parse(data: bytes, path: str | Path) -> dict[str, Any]:
    if len(data) < 4 or struct.unpack_from("<I", data)[0] != MAGIC:
        raise GGUFError(f"{path} is not a GGUF file")
    _, version, _tensors, count = struct.unpack_from("<IIQQ", data)
    if version not in (2, 3):
        raise GGUFError(f"{path}: GGUF version {version} is not supported; versions 2 and 3 are")
    reader = _Reader(data, 24)
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = reader.string()
        metadata[key] = reader.value(reader.u32())
    return metadata


class _Reader:
    def __init__(self, data: bytes, offset: int) -> None:
        self._data = data
        self._offset = offset

    def u32(self) -> int:
        value: int = struct.unpack_from("<I", self._data, self._offset)[0]
        self._offset += 4
        return value

    def u64(self) -> int:
        value: int = struct.unpack_from("<Q", self._data, self._offset)[0]
        self._offset += 8
        return value

    def string(self) -> str:
        length = self.u64()
        start = self._offset
        end = start + length
        if end > len(self._data):
            raise IndexError("string beyond the data read")
        self._offset = end
        return self._data[start:end].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, length = self.u32(), self.u64()
            if item == _STRING:
                return self._strings(length)
            if item == _ARRAY:
                return [self.value(_ARRAY) for _ in range(length)]
            return list(self._unpack(item, length))
        return self._unpack(kind, 1)[0]

    def _strings(self, count: int) -> list[str]:
        data, offset, size = self._data, self._offset, len(self._data)
        from_bytes, values = int.from_bytes, []
        for _ in range(count):
            start = offset + 8
            offset = start + from_bytes(data[offset:start], "little")
            if offset > size:
                raise IndexError("string beyond the data read")
            values.append(data[start:offset].decode("utf-8", "replace"))
        self._offset = offset
        return values

    def _unpack(self, kind: int, count: int) -> tuple[Any, ...]:
        code = _SCALARS.get(kind)
        if code is None:
            raise GGUFError(f"unknown GGUF value type {kind}")
        form = f"<{count}{code}"
        if count > len(self._data):
            raise IndexError("array beyond the data read")
        values = struct.unpack_from(form, self._data, self._offset)
        self._offset += struct.calcsize(form)
        return values
