"""What gateway and worker make of an image together is, bit for bit, what transformers' image processors make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from parity.vision_families import picture
from PIL import Image

from kvern.media import content_hash, image_processor_config
from kvern.v1 import media_pb2
from kvern_gateway.media.prepare import preparation
from kvern_worker.images import Normalizer

SIZES = ((336, 336), (640, 480), (333, 1001), (1000, 37), (20, 30), (1, 1), (1400, 900))
CLIP = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
PROCESSORS = {
    "llava": ("LlavaForConditionalGeneration", transformers.CLIPImageProcessor(**CLIP)),
    "llava, resized to a square": (
        "LlavaForConditionalGeneration",
        transformers.CLIPImageProcessor(
            size={"height": 336, "width": 336},
            do_center_crop=False,
            image_mean=[0.5] * 3,
            image_std=[0.4] * 3,
        ),
    ),
    "llava, padded": (
        "LlavaForConditionalGeneration",
        transformers.LlavaImageProcessor(**CLIP, do_pad=True),
    ),
    "llava, cropped beyond the image": (
        "LlavaForConditionalGeneration",
        transformers.CLIPImageProcessor(size={"shortest_edge": 201}, crop_size={"height": 336, "width": 336}),
    ),
    "llava-next": ("LlavaNextForConditionalGeneration", transformers.LlavaNextImageProcessor(**CLIP)),
    "qwen": ("Qwen2_5_VLForConditionalGeneration", transformers.Qwen2VLImageProcessor()),
    "qwen, bounded": (
        "Qwen2_5_VLForConditionalGeneration",
        transformers.Qwen2VLImageProcessor(min_pixels=100_000, max_pixels=200_000),
    ),
}


def expected(processor: Any, image: Image.Image, item: media_pb2.MediaItem) -> torch.Tensor:
    """As [tiles, 3, height, width]."""
    made = processor(images=[image], return_tensors="pt")
    pixels = made["pixel_values"]
    if "image_grid_thw" not in made:
        return pixels.flatten(0, -4)
    _, rows, columns = made["image_grid_thw"][0].tolist()
    patches = pixels.view(rows // 2, columns // 2, 2, 2, 3, 2, 14, 14)
    assert torch.equal(patches[..., 0, :, :], patches[..., 1, :, :])
    return patches[..., 0, :, :].permute(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, rows * 14, columns * 14)


@pytest.mark.parametrize("name", PROCESSORS)
def test_pixels_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    architecture, processor = PROCESSORS[name]
    processor.save_pretrained(tmp_path)
    prepare = preparation({"architectures": [architecture]}, image_processor_config(tmp_path))
    assert prepare is not None
    normalizer = Normalizer(tmp_path)
    images = [picture(index, *size) for index, size in enumerate(SIZES)]
    images += [
        picture(9, 70, 50, "RGBA"),
        images[1].convert("P"),
        images[1].convert("L"),
        images[1].convert("CMYK"),
    ]
    for image in images:
        if name.startswith("qwen") and max(image.size) > 200 * min(image.size):
            continue
        item = prepare(image)
        assert item.hash == content_hash(item)
        found = normalizer(item, torch.float32)
        assert torch.equal(found, expected(processor, image, item)), image


def test_the_hash_is_of_the_shape_too() -> None:
    pixels = np.arange(56 * 28 * 3, dtype=np.uint8).tobytes()
    wide = media_pb2.MediaItem(tiles=1, height=28, width=56, pixels=pixels)
    high = media_pb2.MediaItem(tiles=1, height=56, width=28, pixels=pixels)
    assert content_hash(wide) != content_hash(high)
