"""A tiny random checkpoint of every family that sees, with its image processor, made with transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from parity.families import COMMON, VOCAB
from PIL import Image

from kvern.media import image_processor_config
from kvern.v1 import media_pb2
from kvern_gateway.media.prepare import Preparation, preparation

IMAGE_TOKEN = VOCAB - 1
_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "projection_dim": 16,
}
_SQUARE = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
_PINPOINTS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
_TEXT = {**COMMON, "vocab_size": VOCAB}


def _llava(**fields: Any) -> Any:
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_CLIP),
        text_config=transformers.LlamaConfig(**_TEXT),
        image_token_id=IMAGE_TOKEN,
        **fields,
    )


def _llava_next() -> Any:
    return transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**_CLIP),
        text_config=transformers.MistralConfig(**_TEXT, sliding_window=None),
        image_token_id=IMAGE_TOKEN,
        image_grid_pinpoints=_PINPOINTS,
    )


def _qwen() -> Any:
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    return transformers.Qwen2_5_VLConfig(
        vision_config=vision,
        text_config={**_TEXT, "rope_parameters": rope},
        image_token_id=IMAGE_TOKEN,
        video_token_id=VOCAB - 2,
        vision_start_token_id=VOCAB - 3,
        vision_end_token_id=VOCAB - 4,
    )


@dataclass(frozen=True)
class VisionFamily:
    """``inputs`` names what the image processor makes beside pixels."""

    model_class: str
    config: Callable[[], Any]
    processor: Any
    inputs: str = ""

    @property
    def architecture(self) -> str:
        return self.model_class

    def make(self) -> Any:
        torch.manual_seed(7)
        model = getattr(transformers, self.model_class)(self.config()).eval().float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or "ln_q" in name:
                    parameter.add_(0.1 * torch.randn_like(parameter))
                else:
                    parameter.normal_(0.0, 0.2 if parameter.dim() > 1 else 0.1)
        return model

    def save(self, model: Any, folder: Path) -> Path:
        model.save_pretrained(folder)
        self.processor.save_pretrained(folder)
        return folder

    def tensors(self, images: list[Image.Image]) -> dict[str, torch.Tensor]:
        """What the real image processor makes of them, by the model's argument."""
        made = self.processor(images=images, return_tensors="pt")
        names = ["pixel_values", *([self.inputs] if self.inputs else [])]
        return {name: made[name] for name in names}

    def arguments(self, tokens: list[int], images: list[Image.Image]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([tokens])
        arguments = {"input_ids": ids, **(self.tensors(images) if images else {})}
        if self.inputs == "image_grid_thw":
            arguments["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
        return arguments


VISION_FAMILIES = {
    "LLaVA 1.5": VisionFamily(
        "LlavaForConditionalGeneration", _llava, transformers.CLIPImageProcessor(**_SQUARE)
    ),
    "LLaVA-NeXT": VisionFamily(
        "LlavaNextForConditionalGeneration",
        _llava_next,
        transformers.LlavaNextImageProcessor(**_SQUARE, image_grid_pinpoints=_PINPOINTS),
        "image_sizes",
    ),
    "Qwen 2.5 VL": VisionFamily(
        "Qwen2_5_VLForConditionalGeneration",
        _qwen,
        transformers.Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=140 * 140),
        "image_grid_thw",
    ),
}


def picture(seed: int, width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Noise on slopes: no two rows or columns alike."""
    generator = np.random.default_rng(seed)
    slope = np.add.outer(np.linspace(0, 90, height), np.linspace(0, 60, width))[:, :, None]
    noise = generator.integers(0, 100, (height, width, len(mode)))
    return Image.fromarray((slope + noise).clip(0, 255).astype(np.uint8), mode)


def preparation_of(folder: Path) -> Preparation:
    made = preparation(json.loads((folder / "config.json").read_text()), image_processor_config(folder))
    assert made is not None
    return made


def place(
    pieces: list[list[int] | Image.Image], prepare: Preparation
) -> tuple[list[int], list[media_pb2.MediaItem]]:
    """The prompt of texts and images one after the other."""
    tokens: list[int] = []
    media = []
    for piece in pieces:
        if isinstance(piece, list):
            tokens += piece
            continue
        item = prepare(piece)
        item.offset = len(tokens)
        tokens += [IMAGE_TOKEN] * item.length
        media.append(item)
    return tokens, media
