"""Images to what a vision tower takes, as transformers' image processors do it: the part before rescaling.

CLIP (LLaVA 1.5)       shortest side to a size, the middle of it
LLaVA (padded)         padded to a square first
LLaVA-NeXT             the whole image squeezed into a square, then fitted into one of several sizes and cut into squares
Qwen2-VL, Qwen2.5-VL   sides rounded to multiples of 28, between a least and a largest number of pixels

Pure functions of pixels and configuration; where they run, and what bounds them, is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from kvern.media import best_resolution, content_hash, unpadded
from kvern.v1 import media_pb2

Pixels = npt.NDArray[np.uint8]
"""RGB, [height, width, 3]."""

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
BICUBIC = 3
NEXT_PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


class Unprepared(ValueError):
    """This image cannot be prepared, or no image with this configuration."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """How the images of a model are prepared, and how many tokens stand for one.

    ``size``: "shortest_edge" (and "longest_edge", for Qwen in pixels), or "height" and "width". ``crop``: (height, width)
    or None. ``patch_size``, ``merge``: of the tower; ``class_token``: it stands for a token, too. ``pinpoints``: (height,
    width) of LLaVA-NeXT."""

    kind: str
    size: Mapping[str, int]
    crop: tuple[int, int] | None = None
    resample: int = BICUBIC
    resize: bool = True
    pad_color: tuple[int, int, int] | None = None
    patch_size: int = 14
    merge: int = 2
    class_token: bool = False
    pinpoints: tuple[tuple[int, int], ...] = ()

    def __call__(self, image: Image.Image) -> media_pb2.MediaItem:
        """All but the offset. Raises Unprepared."""
        pixels = to_rgb(image)
        height, width = pixels.shape[:2]
        if self.kind == "qwen":
            tiles = [self._resize(pixels, smart_size(height, width, self.patch_size * self.merge, self.size))]
        elif self.kind == "next":
            tiles = [self._square(tile) for tile in self._cut(pixels)]
        else:
            if self.pad_color is not None:
                pixels = pad_to_square(pixels, self.pad_color)
            tiles = [self._square(pixels)]
        item = media_pb2.MediaItem(
            tiles=len(tiles),
            height=tiles[0].shape[0],
            width=tiles[0].shape[1],
            pixels=b"".join(tile.tobytes() for tile in tiles),
        )
        if self.kind == "next":
            item.source_height, item.source_width = height, width
        item.length = self._num_tokens(item)
        item.hash = content_hash(item)
        return item

    def _num_tokens(self, item: media_pb2.MediaItem) -> int:
        rows, columns = item.height // self.patch_size, item.width // self.patch_size
        if self.kind == "qwen":
            return rows * columns // self.merge**2
        whole = rows * columns + self.class_token
        if self.kind != "next":
            return whole
        high, wide = best_resolution(item.source_height, item.source_width, self.pinpoints)
        rows, columns = rows * (high // item.height), columns * (wide // item.width)
        rows, columns, _, _ = unpadded(item.source_height, item.source_width, rows, columns)
        return whole + rows * (columns + 1)

    def _square(self, pixels: Pixels) -> Pixels:
        if self.resize:
            pixels = self._resize(pixels, target_size(pixels.shape[0], pixels.shape[1], self.size))
        return pixels if self.crop is None else center_crop(pixels, *self.crop)

    def _resize(self, pixels: Pixels, size: tuple[int, int]) -> Pixels:
        height, width = size
        resized = Image.fromarray(pixels).resize((width, height), Image.Resampling(self.resample))
        return np.asarray(resized)

    def _cut(self, pixels: Pixels) -> list[Pixels]:
        """The whole image, squeezed, and the squares of it where it is fitted into the best of ``pinpoints``."""
        edge = self.size.get("shortest_edge", 0)
        squeezed = self._resize(pixels, (self.size.get("height", edge), self.size.get("width", edge)))
        side = self.crop[0] if self.crop is not None else self.size.get("height", edge)
        height, width = pixels.shape[:2]
        high, wide = best_resolution(height, width, self.pinpoints)
        if wide / width < high / height:
            fitted = min(math.ceil(height * (wide / width)), high), wide
        else:
            fitted = high, min(math.ceil(width * (high / height)), wide)
        canvas = np.zeros((high, wide, 3), np.uint8)
        top, left = (high - fitted[0]) // 2, (wide - fitted[1]) // 2
        canvas[top : top + fitted[0], left : left + fitted[1]] = self._resize(pixels, fitted)
        rows, columns = range(0, high, side), range(0, wide, side)
        return [squeezed, *(canvas[y : y + side, x : x + side] for y in rows for x in columns)]


def smart_size(height: int, width: int, unit: int, size: Mapping[str, int]) -> tuple[int, int]:
    """Multiples of ``unit``, of about the same ratio, with "shortest_edge" to "longest_edge" pixels in all."""
    if max(height, width) > 200 * min(height, width):
        raise Unprepared(f"its sides are {width} and {height} pixels; one may be at most 200 times the other")
    least, most = size["shortest_edge"], size["longest_edge"]
    high, wide = round(height / unit) * unit, round(width / unit) * unit
    if high * wide > most:
        ratio = math.sqrt(height * width / most)
        return (
            max(unit, math.floor(height / ratio / unit) * unit),
            max(unit, math.floor(width / ratio / unit) * unit),
        )
    if high * wide < least:
        ratio = math.sqrt(least / (height * width))
        return math.ceil(height * ratio / unit) * unit, math.ceil(width * ratio / unit) * unit
    return high, wide


def target_size(height: int, width: int, size: Mapping[str, int]) -> tuple[int, int]:
    if "height" in size:
        return size["height"], size["width"]
    edge = size["shortest_edge"]
    longer = int(edge * max(height, width) / min(height, width))
    return (edge, longer) if height <= width else (longer, edge)


def center_crop(pixels: Pixels, height: int, width: int) -> Pixels:
    """The middle; where the image is smaller, black around it."""
    own_height, own_width = pixels.shape[:2]
    top, left = (own_height - height) // 2, (own_width - width) // 2
    if top >= 0 and left >= 0 and top + height <= own_height and left + width <= own_width:
        return pixels[top : top + height, left : left + width]
    high, wide = max(height, own_height), max(width, own_width)
    canvas = np.zeros((high, wide, 3), np.uint8)
    above, before = math.ceil((high - own_height) / 2), math.ceil((wide - own_width) / 2)
    canvas[above : above + own_height, before : before + own_width] = pixels
    top, left = top + above, left + before
    return canvas[max(0, top) : min(high, top + height), max(0, left) : min(wide, left + width)]


def pad_to_square(pixels: Pixels, color: tuple[int, int, int]) -> Pixels:
    height, width = pixels.shape[:2]
    side = max(height, width)
    canvas = np.empty((side, side, 3), np.uint8)
    canvas[:] = color
    top, left = (side - height) // 2, (side - width) // 2
    canvas[top : top + height, left : left + width] = pixels
    return canvas


def to_rgb(image: Image.Image) -> Pixels:
    """What is transparent is white."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return np.asarray(image.convert("RGB"))


_KINDS = {
    "CLIPImageProcessor": "clip",
    "LlavaImageProcessor": "clip",
    "LlavaNextImageProcessor": "next",
    "Qwen2VLImageProcessor": "qwen",
    "Qwen2_5_VLImageProcessor": "qwen",
}
# What may be set by --mm-processor-kwargs: what decides the size of an image, and so what it costs.
KWARGS = (
    "size",
    "crop_size",
    "min_pixels",
    "max_pixels",
    "do_resize",
    "do_center_crop",
    "do_pad",
    "resample",
)


def preparation(model: Mapping[str, Any], processor: Mapping[str, Any]) -> Preparation | None:
    """From ``config.json`` and the image processor's configuration; None where the model takes no images. Raises
    Unprepared where it takes them in a way that is not known."""
    architecture = (model.get("architectures") or [""])[0]
    default = {
        "LlavaForConditionalGeneration": "CLIPImageProcessor",
        "LlavaNextForConditionalGeneration": "LlavaNextImageProcessor",
        "Qwen2_5_VLForConditionalGeneration": "Qwen2VLImageProcessor",
    }.get(architecture)
    if default is None:
        return None
    name = str(processor.get("image_processor_type") or default).removesuffix("Fast").removesuffix("Pil")
    kind = _KINDS.get(name)
    if kind is None:
        raise Unprepared(f"the image processor {name} is not known; known are {', '.join(_KINDS)}")
    vision: Mapping[str, Any] = model.get("vision_config") or {}
    if kind == "qwen":
        return _qwen(vision, processor)
    return Preparation(
        kind=kind,
        size=_sides(processor.get("size"), 224),
        crop=_crop(processor),
        resample=int(processor.get("resample", BICUBIC)),
        resize=bool(processor.get("do_resize", True)),
        pad_color=_pad_color(processor) if name == "LlavaImageProcessor" else None,
        patch_size=int(vision.get("patch_size", 14)),
        class_token=model.get("vision_feature_select_strategy", "default") == "full",
        pinpoints=tuple(
            (int(h), int(w))
            for h, w in processor.get("image_grid_pinpoints")
            or model.get("image_grid_pinpoints")
            or NEXT_PINPOINTS
        ),
    )


def _qwen(vision: Mapping[str, Any], processor: Mapping[str, Any]) -> Preparation:
    size = processor.get("size") or {}
    patch = int(processor.get("patch_size") or vision.get("patch_size", 14))
    merge = int(processor.get("merge_size") or vision.get("spatial_merge_size", 2))
    if not processor.get("do_resize", True):
        raise Unprepared("do_resize false is not supported for this model")
    bounds = {
        "shortest_edge": int(
            processor.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or 56 * 56
        ),
        "longest_edge": int(
            processor.get("max_pixels")
            or size.get("longest_edge")
            or size.get("max_pixels")
            or 28 * 28 * 1280
        ),
    }
    return Preparation(
        kind="qwen",
        size=bounds,
        resample=int(processor.get("resample", BICUBIC)),
        patch_size=patch,
        merge=merge,
    )


def _sides(size: Any, default: int) -> dict[str, int]:
    if size is None:
        return {"shortest_edge": default}
    if isinstance(size, int):
        return {"shortest_edge": size}
    known = {key: int(value) for key, value in dict(size).items() if value is not None}
    if set(known) not in ({"shortest_edge"}, {"height", "width"}):
        raise Unprepared(f"an image size given by {', '.join(known) or 'nothing'} is not supported")
    return known


def _crop(processor: Mapping[str, Any]) -> tuple[int, int] | None:
    if not processor.get("do_center_crop", True):
        return None
    crop = processor.get("crop_size", 224)
    if isinstance(crop, int):
        return crop, crop
    return int(crop["height"]), int(crop["width"])


def _pad_color(processor: Mapping[str, Any]) -> tuple[int, int, int] | None:
    if not processor.get("do_pad", False):
        return None
    red, green, blue = (int(value * 255) for value in processor.get("image_mean") or CLIP_MEAN)
    return red, green, blue
