"""Blocks in files, one for each, that outlive the process.

::

    <root>/<format, 16 hex digits>/<first byte of hash>/<hash>.kv

    magic "KVERNKV1" | format [32] | hash [32] | length u64 | CRC-32 of all before and of the data u32 | data

all integers little endian. The *format* is a digest of the model and of how its KV cache is laid out: files of another
one are never looked at. A file appears whole, by renaming; one that is short, damaged or misplaced is removed when it is
read, and its block is computed again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

MAGIC = b"KVERNKV1"
_HEADER = struct.Struct("<8s32s32sQ")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
SUFFIX = ".kv"

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]


class DiskTier:
    """Files of blocks of one ``format_digest`` (32 bytes) under ``root``. Finds what an earlier process left, and keeps
    the newest ``capacity`` of it. Raises OSError where the directory cannot be used."""

    def __init__(self, root: Path, format_digest: bytes, capacity: int) -> None:
        self._format = format_digest
        self._folder = root / format_digest.hex()[:16]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._known: dict[bytes, None] = {}
        found: list[tuple[float, bytes]] = []
        for path in self._folder.glob("*/*"):
            block_hash = _hash_of(path)
            if block_hash is None:  # what a process was writing when it died
                path.unlink(missing_ok=True)
                continue
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime, block_hash))
        found.sort()
        for _, block_hash in found[: max(0, len(found) - capacity)]:
            self._path(block_hash).unlink(missing_ok=True)
        self._known.update(dict.fromkeys(block_hash for _, block_hash in found[-capacity:]))

    def hashes(self) -> list[bytes]:
        """The oldest first."""
        return list(self._known)

    def write(self, block_hash: bytes, data: Bytes) -> bool:
        """Whether the block is on disk now: it is not where the disk is full, or fails."""
        path = self._path(block_hash)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        head = _HEADER.pack(MAGIC, self._format, block_hash, data.size)
        checksum = _CHECKSUM.pack(zlib.crc32(data.data, zlib.crc32(head)))
        try:
            path.parent.mkdir(exist_ok=True)
            with partial.open("wb") as file:
                file.write(head + checksum)
                file.write(data.data)
            partial.replace(path)
        except OSError as error:
            log.warning("a KV block was not written to %s: %s", self._folder, error)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            return False
        self._known[block_hash] = None
        return True

    def read(self, block_hash: bytes, into: Bytes) -> bool:
        """Whether ``into`` holds the block now. A file that is not what it should be is removed."""
        path = self._path(block_hash)
        try:
            with path.open("rb") as file:
                header = file.read(HEADER_BYTES)
                count = file.readinto(into.data)
                rest = file.read(1)
        except OSError as error:
            log.warning("a KV block was not read from %s: %s", self._folder, error)
            self._known.pop(block_hash, None)
            return False
        head = _HEADER.pack(MAGIC, self._format, block_hash, into.size)
        checksum = _CHECKSUM.pack(zlib.crc32(into.data, zlib.crc32(head)))
        if count != into.size or rest or header != head + checksum:
            log.warning("%s is damaged or of something else; its block is computed again", path)
            self.remove(block_hash)
            return False
        return True

    def remove(self, block_hash: bytes) -> None:
        self._known.pop(block_hash, None)
        with contextlib.suppress(OSError):
            self._path(block_hash).unlink(missing_ok=True)

    def _path(self, block_hash: bytes) -> Path:
        name = block_hash.hex()
        return self._folder / name[:2] / (name + SUFFIX)


def _hash_of(path: Path) -> bytes | None:
    """The block whose file this is; None where it is no whole file of a block."""
    name = path.name.removesuffix(SUFFIX)
    with contextlib.suppress(ValueError):
        if path.suffix == SUFFIX and len(name) == 64:
            return bytes.fromhex(name)
    return None
