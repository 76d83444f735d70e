"""Images of the sequences in the batch: what the vision tower makes of them, and where that goes in a step."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from kvern.errors import KvernError, invalid
from kvern.media import content_hash, image_processor_config
from kvern.v1 import error_pb2, media_pb2
from kvern_worker.batch import Rows
from kvern_worker.layers.attention import StepImages, StepInputs

log = logging.getLogger(__name__)

# CLIP's, which image processors have where their file is silent.
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)


@runtime_checkable
class Seeing(Protocol):
    """A model whose prompts may hold images."""

    def num_tokens(self, image: media_pb2.MediaItem) -> int:
        """How many tokens stand for it. Raises KvernError where the tower takes no image of that shape."""

    def encode(self, image: media_pb2.MediaItem, pixels: Tensor) -> Tensor:
        """What stands for these tokens' embeddings, [num_tokens, hidden]. ``pixels``: normalized, [tiles, 3, height,
        width] in the model's dtype."""

    def grid(self, image: media_pb2.MediaItem) -> tuple[int, int] | None:
        """Rows and columns of its tokens where they have positions of their own (M-RoPE), else None."""


class Normalizer:
    """uint8 → rescaled and normalized, by a table of the 256 values of each channel: an image processor's arithmetic,
    bit for bit, at a quarter of the bytes on the wire."""

    def __init__(self, folder: Path) -> None:
        """Raises KvernError where the folder's image processor cannot be read."""
        try:
            config = image_processor_config(folder)
        except ValueError as error:
            raise invalid("model", str(error)) from error
        values = np.arange(256, dtype=np.uint8)
        if config.get("do_rescale", True):
            # As transformers: in float64, then rounded.
            values = (values.astype(np.float64) * config.get("rescale_factor", 1 / 255)).astype(np.float32)
        table = np.repeat(values.astype(np.float32)[None], 3, axis=0)
        if config.get("do_normalize", True):
            mean, std = (
                np.array(config.get(key) or default, np.float32)[:, None]
                for key, default in (("image_mean", _MEAN), ("image_std", _STD))
            )
            table = (table - mean) / std
        self._table = torch.from_numpy(table)

    def __call__(self, image: media_pb2.MediaItem, dtype: torch.dtype) -> Tensor:
        """[tiles, 3, height, width]."""
        flat = np.frombuffer(image.pixels, np.uint8).reshape(image.tiles, image.height, image.width, 3)
        channels = torch.from_numpy(flat.transpose(0, 3, 1, 2).astype(np.int64))
        return torch.stack([self._table[c][channels[:, c]] for c in range(3)], 1).to(dtype)


class EncoderCache:
    """The tower's output by content, the least recently used dropped beyond ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, Tensor] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: bytes) -> Tensor | None:
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, features: Tensor) -> None:
        self._entries[key] = features
        self.num_bytes += features.nbytes
        while self.num_bytes > self._max_bytes and len(self._entries) > 1:
            self.num_bytes -= self._entries.popitem(last=False)[1].nbytes


@dataclass(frozen=True, slots=True)
class _Sequence:
    """``positions``: [3, prompt] rotary positions (M-RoPE), or None."""

    images: list[media_pb2.MediaItem]
    num_prompt: int
    positions: Tensor | None


class BatchImages:
    """The images of every slot. ``cache_bytes`` bounds what is kept of the tower's output."""

    def __init__(
        self, model: Seeing, dtype: torch.dtype, folder: Path, max_num_seqs: int, cache_bytes: int
    ) -> None:
        self._model = model
        self._dtype = dtype
        self._normalizer = Normalizer(folder)
        self._cache = EncoderCache(cache_bytes)
        self._sequences: dict[int, _Sequence] = {}
        # By slot: what the rotary position of a token behind the images is more than its index.
        self._shifts = np.zeros(max_num_seqs, np.int64)
        # In the last step: images that began, and of these, those whose features were there.
        self.num_used = 0
        self.num_cached = 0

    def add(
        self, slot: int, images: Iterable[media_pb2.MediaItem], num_prompt: int, num_computed: int
    ) -> None:
        """A sequence enters a slot. Raises KvernError where an image is not what the model takes."""
        images = list(images)
        self._sequences.pop(slot, None)
        self._shifts[slot] = 0
        if not images:
            return
        end = 0
        for image in images:
            if image.offset < end or image.length == 0 or image.offset + image.length > num_prompt:
                raise invalid("media", "images overlap, or lie outside the prompt", value=image.offset)
            end = image.offset + image.length
            self._check(image, needed=end > num_computed)
        positions = None
        grids = [self._model.grid(image) for image in images]
        if grids[0] is not None:
            positions, self._shifts[slot] = _positions(images, grids, num_prompt)
        # Where the cache has more than the prompt, only the shift is wanted.
        if num_computed < num_prompt:
            self._sequences[slot] = _Sequence(images, num_prompt, positions)

    def _check(self, image: media_pb2.MediaItem, needed: bool) -> None:
        count = self._model.num_tokens(image)
        if count != image.length:
            raise invalid(
                "media",
                f"an image of {image.height}×{image.width} pixels is {count} tokens here, not {image.length}; do gateway "
                "and worker have the same model?",
                value=image.length,
                limit=count,
            )
        if not needed:
            return
        if len(image.pixels) != image.tiles * image.height * image.width * 3:
            raise invalid("media", "an image has not as many pixels as it says", value=len(image.pixels))
        if image.hash != content_hash(image):
            raise invalid("media", "an image's hash is not that of its pixels")

    def release(self, slots: Iterable[int]) -> None:
        if not self._sequences:
            return
        for slot in slots:
            self._sequences.pop(int(slot), None)
            self._shifts[slot] = 0

    def clear(self) -> None:
        self._sequences.clear()
        self._shifts[:] = 0

    def begin(self, rows: Rows, step: StepInputs) -> None:
        """Puts into ``step`` what its tokens that stand for images are, and their rotary positions."""
        self.num_used = self.num_cached = 0
        if self._sequences:
            self._place(rows, step)
        elif self._shifts.any():
            step.positions = self._shifted(rows, step)

    def _shifted(self, rows: Rows, step: StepInputs) -> Tensor:
        return step.positions + torch.from_numpy(np.repeat(self._shifts[rows.slots], rows.lengths))

    def _place(self, rows: Rows, step: StepInputs) -> None:
        firsts = np.cumsum(rows.lengths) - rows.lengths
        at: list[Tensor] = []
        features: list[Tensor] = []
        placed: list[tuple[slice, Tensor]] = []
        for row, slot in enumerate(rows.slots.tolist()):
            sequence = self._sequences.get(slot)
            start = int(rows.starts[row])
            if sequence is None:
                continue
            first, end = int(firsts[row]), min(start + int(rows.lengths[row]), sequence.num_prompt)
            if end == sequence.num_prompt:
                # Later tokens need only the shift.
                del self._sequences[slot]
            if sequence.positions is not None:
                placed.append((slice(first, first + end - start), sequence.positions[:, start:end]))
            for image in sequence.images:
                low, high = max(start, image.offset), min(end, image.offset + image.length)
                if low < high:
                    at.append(torch.arange(first + low - start, first + high - start))
                    encoded = self._encoded(image, begins=low == image.offset)
                    features.append(encoded[low - image.offset : high - image.offset])
        if self._shifts.any():
            step.positions = self._shifted(rows, step)
        if features or placed:
            rotary = None
            if placed:
                rotary = step.positions.repeat(3, 1)
                for where, positions in placed:
                    rotary[:, where] = positions
            step.images = StepImages(
                torch.cat(at) if at else torch.empty(0, dtype=torch.int64),
                torch.cat(features) if features else None,
                rotary,
            )

    def _encoded(self, image: media_pb2.MediaItem, begins: bool) -> Tensor:
        """``begins``: its first token is in this step, so that it counts."""
        found = self._cache.get(image.hash)
        self.num_used += begins
        self.num_cached += begins and found is not None
        if found is not None:
            return found
        features = self._model.encode(image, self._normalizer(image, self._dtype))
        self._cache.put(image.hash, features)
        return features


def no_images() -> KvernError:
    return KvernError(error_pb2.ERROR_CODE_UNIMPLEMENTED, "this model takes no images", field="media")


def _positions(
    images: list[media_pb2.MediaItem], grids: list[tuple[int, int] | None], num_prompt: int
) -> tuple[Tensor, int]:
    """M-RoPE (arXiv 2409.12191): time, height and width of each token of the prompt, [3, num_prompt]; and what later
    tokens' positions are more than their indexes. Text has the same number in all three, an image the time of its
    first token, and what follows it counts on from its longer side."""
    positions = torch.empty(3, num_prompt, dtype=torch.int64)
    index = following = 0
    for image, grid in zip(images, grids, strict=True):
        assert grid is not None
        height, width = grid
        text = image.offset - index
        positions[:, index : image.offset] = torch.arange(following, following + text)
        following += text
        own = positions[:, image.offset : image.offset + image.length].view(3, height, width)
        own[0] = following
        own[1] = following + torch.arange(height)[:, None]
        own[2] = following + torch.arange(width)
        following += max(height, width)
        index = image.offset + image.length
    positions[:, index:] = torch.arange(following, following + num_prompt - index)
    return positions, following - index
