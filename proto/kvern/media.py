"""Images on the wire: what identifies one, and where a model's folder says how they are prepared."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvern.block_hash import Image
from kvern.v1 import media_pb2

MAX_MEDIA_BYTES = 16 * 2**20
"""Pixels of all images of one request. So that messages, which may hold those of several, stay below their limit."""


def content_hash(item: media_pb2.MediaItem) -> bytes:
    """32 bytes. Of the shape, too: images of the same bytes in other rows are other images."""
    shape = (item.tiles, item.height, item.width, item.source_height, item.source_width)
    return hashlib.sha256(struct.pack("<5I", *shape) + item.pixels).digest()


def keys_of(items: Iterable[media_pb2.MediaItem]) -> list[Image]:
    """What block hashes are keyed with."""
    return [(item.hash, item.offset, item.length) for item in items]


def without_pixels(item: media_pb2.MediaItem) -> media_pb2.MediaItem:
    """A copy of all else."""
    return media_pb2.MediaItem(
        hash=item.hash,
        offset=item.offset,
        length=item.length,
        tiles=item.tiles,
        height=item.height,
        width=item.width,
        source_height=item.source_height,
        source_width=item.source_width,
    )


def best_resolution(height: int, width: int, pinpoints: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """LLaVA-NeXT: of ``pinpoints`` (height, width) the one that keeps most of an image's pixels, and then wastes least.
    The image is fitted into it and cut into tiles."""
    best, most, least = pinpoints[0], 0, math.inf
    for high, wide in pinpoints:
        scale = min(wide / width, high / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        wasted = high * wide - kept
        if kept > most or (kept == most and wasted < least):
            best, most, least = (high, wide), kept, wasted
    return best


def unpadded(height: int, width: int, rows: int, columns: int) -> tuple[int, int, int, int]:
    """LLaVA-NeXT: of the rows and columns of patches of all tiles together those that show something of an image that was
    ``height`` by ``width``: how many they are, and the first of them."""
    if width / height > columns / rows:
        top = (rows - int(round(height * (columns / width), 7))) // 2
        return rows - 2 * top, columns, top, 0
    left = (columns - int(round(width * (rows / height), 7))) // 2
    return rows, columns - 2 * left, 0, left


def image_processor_config(folder: Path) -> dict[str, Any]:
    """What the folder says of its image processor; empty where it says nothing. Raises ValueError where a file is not
    valid JSON."""
    whole = _read(folder / "processor_config.json").get("image_processor")
    return whole if isinstance(whole, dict) else _read(folder / "preprocessor_config.json")


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}
