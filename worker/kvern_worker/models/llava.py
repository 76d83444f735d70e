"""LLaVA 1.5 (arXiv 2310.03744) and LLaVA-NeXT (1.6): CLIP's patches, projected, stand for an image in a Llama's prompt.

::

    pixels → CLIP, up to its layer −2 → less the class token → linear → gelu → linear → embeddings

LLaVA-NeXT sees an image twice: as a whole, and cut into tiles, whose patches are put together again, rid of the padding,
with a learned newline behind each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kvern_kernels as kernels
from kvern.errors import invalid
from kvern.media import best_resolution, unpadded
from kvern.v1 import media_pb2
from kvern_worker.config import DecoderConfig, HfConfig, unsupported
from kvern_worker.layers.attention import KvCache
from kvern_worker.layers.rotary import cos_sin_table
from kvern_worker.models import llama
from kvern_worker.models.clip import ClipConfig, ClipTower, load_clip, load_plain, parse_clip
from kvern_worker.weights.loader import WeightLoader

QUANTIZATIONS: tuple[str, ...] = ()
# Images are merged on the host.
DEVICES = ("cpu",)
DEVICES = ("cpu",)
TENSOR_NAMES = (
    (r"language_model\.model\.", "model."),
    (r"language_model\.lm_head\.", "lm_head."),
    (r"model\.language_model\.", "model."),
    (r"(model\.)?vision_tower\.(vision_model\.)?", "vision_tower."),
    (r"model\.multi_modal_projector\.", "multi_modal_projector."),
    (r"model\.image_newline", "image_newline"),
)

# By model_type of the text part: its architecture, and what its keys are where the configuration leaves them out.
_TEXT = {
    "llama": ("LlamaForCausalLM", {"intermediate_size": 11_008, "num_key_value_heads": 32}),
    "mistral": ("MistralForCausalLM", {"intermediate_size": 14_336, "num_key_value_heads": 8}),
    "qwen2": ("Qwen2ForCausalLM", {"intermediate_size": 22_016, "num_key_value_heads": 32}),
}
_TEXT_SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


@dataclass(frozen=True, kw_only=True)
class LlavaConfig:
    """Beside the text part's: ``num_layers`` of the tower that are run; ``class_token`` is kept; ``pinpoints``: (height,
    width) that LLaVA-NeXT resizes images to, None: LLaVA."""

    tower: ClipConfig
    num_layers: int
    class_token: bool
    projector_bias: bool
    pinpoints: tuple[tuple[int, int], ...] | None


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The text part's, with what sees."""

    vision: LlavaConfig


def parse(raw: HfConfig) -> Config:
    """See models/registry.py. Raises KvernError naming the key at fault."""
    raw.only("projector_hidden_act", "gelu")
    text: dict[str, Any] = dict(raw.get("text_config") or {})
    kind = text.get("model_type", "llama")
    if kind not in _TEXT:
        raise unsupported(
            f"text_config.model_type {kind} is not supported for {raw.architecture}; supported are {', '.join(_TEXT)}",
            field="text_config.model_type",
            value=kind,
        )
    architecture, sizes = _TEXT[kind]
    text = {**_TEXT_SIZES, **(sizes if "hidden_size" not in text else {}), **text}
    decoder = llama.parse(text_config(raw, text, architecture))
    tower = parse_clip(HfConfig({"model_type": "clip_vision_model", **(raw.get("vision_config") or {})}))
    layer = raw.get("vision_feature_layer", -2)
    if not isinstance(layer, int):
        raise unsupported(
            f"vision_feature_layer {layer!r} is not supported; supported is one layer",
            field="vision_feature_layer",
            value=layer,
        )
    strategy = raw.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise unsupported(
            f"vision_feature_select_strategy {strategy} is not supported; supported are default, full",
            field="vision_feature_select_strategy",
            value=strategy,
        )
    vision = LlavaConfig(
        tower=tower,
        num_layers=layer if layer >= 0 else tower.num_layers + 1 + layer,
        class_token=strategy == "full",
        projector_bias=bool(raw.get("multimodal_projector_bias", True)),
        pinpoints=_pinpoints(raw) if raw.architecture.startswith("LlavaNext") else None,
    )
    fields = {name: getattr(decoder, name) for name in decoder.__dataclass_fields__}
    return Config(**{**fields, "architecture": raw.architecture}, vision=vision)


def text_config(raw: HfConfig, text: dict[str, Any], architecture: str) -> HfConfig:
    """The configuration of the text part alone, with what only the whole one says."""
    outer = {key: raw[key] for key in ("dtype", "torch_dtype", "tie_word_embeddings") if key in raw}
    end = text.get("eos_token_id")
    ends = raw.eos_token_ids or (tuple(end) if isinstance(end, list) else () if end is None else (int(end),))
    return HfConfig(
        {**text, **outer, "architectures": [architecture]}, ends, raw.folder, raw.trust_remote_code
    )


def _pinpoints(raw: HfConfig) -> tuple[tuple[int, int], ...]:
    value = raw.get("image_grid_pinpoints") or [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    return tuple((int(height), int(width)) for height, width in value)


def build(config: Config, loader: WeightLoader, cache: KvCache, num_positions: int) -> LlavaModel:
    """See models/registry.py."""
    return LlavaModel(config, loader, cache, num_positions)


class LlavaModel(llama.LlamaModel):
    """A Llama that takes images: see kvern_worker.images.Seeing."""

    def __init__(self, config: Config, loader: WeightLoader, cache: KvCache, num_positions: int) -> None:
        vision, hidden = config.vision, config.hidden_size
        self._vision = vision
        self._tower: ClipTower = load_clip(vision.tower, loader, "vision_tower", vision.num_layers)
        self._projector = [
            _load_projection(loader, f"multi_modal_projector.{name}", hidden, size, vision.projector_bias)
            for name, size in (("linear_1", vision.tower.hidden_size), ("linear_2", hidden))
        ]
        self._newline = None if vision.pinpoints is None else loader.tensor("image_newline", hidden)
        # Layers of the tower that come after the features.
        loader.skip("vision_tower.")
        super().__init__(config, loader, cos_sin_table(config.rope, config.rotary_dim, num_positions), cache)

    def num_tokens(self, image: media_pb2.MediaItem) -> int:
        tower = self._vision.tower
        whole = tower.side**2 + self._vision.class_token
        tiles = 1
        if self._vision.pinpoints is None:
            count = whole
        elif not image.source_height or not image.source_width:
            raise invalid("media", "an image for LLaVA-NeXT does not say what size it had")
        else:
            rows, columns = self._tiles(image)
            tiles = 1 + rows * columns
            rows, columns, _, _ = unpadded(
                image.source_height, image.source_width, rows * tower.side, columns * tower.side
            )
            count = whole + rows * (columns + 1)
        if (image.tiles, image.height, image.width) != (tiles, tower.image_size, tower.image_size):
            raise invalid(
                "media",
                f"an image comes as {image.tiles} of {image.height}×{image.width} pixels; the model takes {tiles} of "
                f"{tower.image_size}×{tower.image_size}",
                value=image.tiles,
                limit=tiles,
            )
        return count

    def grid(self, image: media_pb2.MediaItem) -> tuple[int, int] | None:
        return None

    def encode(self, image: media_pb2.MediaItem, pixels: Tensor) -> Tensor:
        features = self._tower(pixels)
        if not self._vision.class_token:
            features = features[:, 1:]
        count, tokens, size = features.shape
        first, second = self._projector
        projected = kernels.linear(F.gelu(kernels.linear(features.reshape(-1, size), first)), second)
        projected = projected.view(count, tokens, -1)
        return projected[0] if self._newline is None else self._pack(image, projected, self._newline)

    def _pack(self, image: media_pb2.MediaItem, features: Tensor, newline: Tensor) -> Tensor:
        """The whole image, then its tiles put together without the padding, a newline behind each row."""
        rows, columns = self._tiles(image)
        side = self._vision.tower.side
        tiles = features[1:].view(rows, columns, side, side, -1).transpose(1, 2)
        together = tiles.reshape(rows * side, columns * side, -1)
        height, width, top, left = unpadded(
            image.source_height, image.source_width, rows * side, columns * side
        )
        together = together[top : top + height, left : left + width]
        ends = newline.expand(height, 1, -1)
        return torch.cat((features[0], torch.cat((together, ends), 1).flatten(0, 1)))

    def _tiles(self, image: media_pb2.MediaItem) -> tuple[int, int]:
        """Rows and columns of tiles that the image is cut into."""
        assert self._vision.pinpoints is not None
        size = self._vision.tower.image_size
        height, width = best_resolution(image.source_height, image.source_width, self._vision.pinpoints)
        return height // size, width // size


def _load_projection(
    loader: WeightLoader, prefix: str, size: int, in_size: int, bias: bool
) -> kernels.PackedLinear:
    if bias:
        return load_plain(loader, prefix, size, in_size)
    return loader.pack(loader.read(f"{prefix}.weight", size, in_size))
