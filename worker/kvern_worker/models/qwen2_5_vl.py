"""Qwen2.5-VL (arXiv 2502.13923): images of any size, as a grid of patches that mostly see their own window.

::

    patches → [norm → attention (window, or all) → + → norm → gate_up → silu·up → down → +] × L → norm → 2×2 together →
    linear → gelu → linear → embeddings

Patches come four by four, as they are put together at the end. Their queries and keys are rotated by row and column. In
the text part's prompt, an image's tokens have positions in time, height and width (M-RoPE, see kvern_worker.images).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kvern_kernels as kernels
from kvern.errors import invalid
from kvern.v1 import media_pb2
from kvern_worker.config import DecoderConfig, HfConfig
from kvern_worker.layers.attention import KvCache
from kvern_worker.layers.norm import Norm, load_rms_norm
from kvern_worker.layers.rotary import cos_sin_table
from kvern_worker.models import llama
from kvern_worker.models.clip import load_plain
from kvern_worker.models.llava import text_config
from kvern_worker.weights.loader import WeightLoader

QUANTIZATIONS: tuple[str, ...] = ()
# Images are merged on the host.
DEVICES = ("cpu",)
DEVICES = ("cpu",)
TENSOR_NAMES = ((r"model\.language_model\.", "model."), (r"model\.visual\.", "visual."))
_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """``window``: patches along one side of a window. ``merge``: along one side of what becomes a token. ``temporal``:
    frames that a patch covers; an image is all of them."""

    hidden_size: int
    intermediate_size: int
    depth: int
    num_heads: int
    patch_size: int
    temporal: int
    merge: int
    window: int
    full_layers: tuple[int, ...]
    theta: float


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The text part's, with what sees. ``mrope_section``: frequencies of time, height and width."""

    vision: VisionConfig
    mrope_section: tuple[int, ...]


def parse(raw: HfConfig) -> Config:
    """See models/registry.py. Raises KvernError naming the key at fault."""
    text: dict[str, Any] = dict(raw.get("text_config") or raw)
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    section = tuple(rope.pop("mrope_section", None) or (16, 24, 24))
    if rope.get("rope_type", rope.get("type")) == "mrope":
        rope["rope_type"] = "default"
    text.pop("rope_scaling", None)
    theta = rope.get("rope_theta") or text.get("rope_theta") or 1_000_000.0
    text["rope_parameters"] = {**rope, "rope_theta": theta}
    text.setdefault("rms_norm_eps", 1e-5)
    decoder = llama.parse(text_config(raw, text, "Qwen2ForCausalLM"))
    if 2 * sum(section) != decoder.rotary_dim:
        raise invalid(
            "mrope_section",
            f"mrope_section {list(section)} has {sum(section)} frequencies, the heads {decoder.rotary_dim // 2}",
            value=list(section),
        )
    fields = {name: getattr(decoder, name) for name in decoder.__dataclass_fields__}
    return Config(
        **{**fields, "architecture": raw.architecture},
        vision=_parse_vision(HfConfig(raw.get("vision_config") or {}), decoder.hidden_size),
        mrope_section=section,
    )


def _parse_vision(raw: HfConfig, out_size: int) -> VisionConfig:
    raw.only("hidden_act", "silu")
    raw.only("out_hidden_size", out_size)
    for key in ("in_channels", "in_chans"):
        raw.only(key, 3)
    patch, merge = raw.positive("patch_size", 14), raw.positive("spatial_merge_size", 2)
    hidden, heads = raw.positive("hidden_size", 1280), raw.positive("num_heads", 16)
    if hidden % (4 * heads):
        raise invalid(
            "vision_config.num_heads",
            f"hidden_size ({hidden}) of the vision tower must be a multiple of four times num_heads ({heads})",
            value=heads,
        )
    return VisionConfig(
        hidden_size=hidden,
        intermediate_size=raw.positive("intermediate_size", 3420),
        depth=raw.positive("depth", 32),
        num_heads=heads,
        patch_size=patch,
        temporal=raw.positive("temporal_patch_size", 2),
        merge=merge,
        window=raw.positive("window_size", 112) // merge // patch * merge,
        full_layers=tuple(raw.get("fullatt_block_indexes") or (7, 15, 23, 31)),
        theta=float((raw.get("rope_parameters") or {}).get("rope_theta", 10_000.0)),
    )


def build(config: Config, loader: WeightLoader, cache: KvCache, num_positions: int) -> Qwen25VlModel:
    """See models/registry.py."""
    return Qwen25VlModel(config, loader, cache, num_positions)


class Qwen25VlModel(llama.LlamaModel):
    """A Qwen2 that takes images: see kvern_worker.images.Seeing."""

    def __init__(self, config: Config, loader: WeightLoader, cache: KvCache, num_positions: int) -> None:
        self._tower = load_tower(config.vision, loader, config.hidden_size)
        table = cos_sin_table(config.rope, config.rotary_dim, num_positions)
        super().__init__(config, loader, table, cache, list(config.mrope_section))

    def num_tokens(self, image: media_pb2.MediaItem) -> int:
        unit = self._tower.config.patch_size * self._tower.config.merge
        if (
            image.tiles != 1
            or not image.height
            or not image.width
            or image.height % unit
            or image.width % unit
        ):
            raise invalid(
                "media",
                f"an image comes as {image.tiles} of {image.height}×{image.width} pixels; the model takes one whose "
                f"sides are multiples of {unit}",
                value=f"{image.height}x{image.width}",
                limit=unit,
            )
        return image.height // unit * (image.width // unit)

    def grid(self, image: media_pb2.MediaItem) -> tuple[int, int] | None:
        unit = self._tower.config.patch_size * self._tower.config.merge
        return image.height // unit, image.width // unit

    def encode(self, image: media_pb2.MediaItem, pixels: Tensor) -> Tensor:
        return self._tower(pixels[0])


@dataclass(frozen=True, slots=True)
class VisionBlock:
    """x [N, hidden] → the same. Patches of one row of an index in ``groups`` see each other."""

    attention_norm: Norm
    qkv: kernels.PackedLinear
    out: kernels.PackedLinear
    mlp_norm: Norm
    gate_up: kernels.PackedLinear
    down: kernels.PackedLinear
    num_heads: int

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, groups: Sequence[Tensor]) -> Tensor:
        heads = kernels.linear(self.attention_norm(x), self.qkv).view(len(x), 3, self.num_heads, -1)
        q, k, v = _rotate(heads[:, 0], cos, sin), _rotate(heads[:, 1], cos, sin), heads[:, 2]
        mixed = torch.empty_like(v)
        for group in groups:
            near_q, near_k, near_v = (part[group].transpose(1, 2) for part in (q, k, v))
            mixed[group] = F.scaled_dot_product_attention(near_q, near_k, near_v).transpose(1, 2)
        x = x + kernels.linear(mixed.view(len(x), -1), self.out)
        return x + kernels.linear(
            kernels.silu_and_mul(kernels.linear(self.mlp_norm(x), self.gate_up)), self.down
        )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, heads, dim], cos and sin float32 [N, 1, dim]."""
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


@dataclass(frozen=True, slots=True)
class VisionTower:
    """``patches`` [hidden, 3·frames·p·p] without bias."""

    config: VisionConfig
    patches: kernels.PackedLinear
    blocks: list[VisionBlock]
    merger_norm: Norm
    merger: tuple[kernels.PackedLinear, kernels.PackedLinear]

    def __call__(self, pixels: Tensor) -> Tensor:
        """A normalized image [3, height, width] → [tokens, out]."""
        config = self.config
        size, merge = config.patch_size, config.merge
        rows, columns = pixels.shape[1] // size, pixels.shape[2] // size
        cut = pixels.view(3, rows // merge, merge, size, columns // merge, merge, size)
        cut = cut.permute(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, 3, 1, size, size)
        frames = cut.expand(-1, -1, config.temporal, -1, -1).reshape(rows * columns, -1)
        x = kernels.linear(frames, self.patches)
        at = _places(rows, columns, merge)
        cos, sin = self._rotary(at)
        windows, everything = _windows(at, config.window), [torch.arange(len(x))[None]]
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin, everything if index in config.full_layers else windows)
        merged = self.merger_norm(x).view(len(x) // merge**2, -1)
        first, second = self.merger
        return kernels.linear(F.gelu(kernels.linear(merged, first)), second)

    def _rotary(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [N, 1, head size]: a quarter by row, a quarter by column, and the same again."""
        half = self.config.hidden_size // self.config.num_heads // 2
        inverse = 1.0 / (self.config.theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half))
        angles = (at[:, :, None].float() * inverse).flatten(1).repeat(1, 2)[:, None]
        return angles.cos(), angles.sin()


def _places(rows: int, columns: int, merge: int) -> Tensor:
    """Row and column of each patch, [N, 2], in the order in which patches come."""
    grid = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), -1)
    return grid.view(rows // merge, merge, columns // merge, merge, 2).transpose(1, 2).reshape(-1, 2)


def _windows(at: Tensor, window: int) -> list[Tensor]:
    """The patches of each window: one index [windows, patches] for each size of windows, for those at the edges are
    smaller."""
    cell = at // window
    number = cell[:, 0] * (int(cell[:, 1].max()) + 1) + cell[:, 1]
    order = torch.argsort(number, stable=True)
    by_window = order.split(torch.bincount(number).tolist())
    sizes = dict.fromkeys(len(members) for members in by_window)
    return [torch.stack([members for members in by_window if len(members) == size]) for size in sizes]


def load_tower(config: VisionConfig, loader: WeightLoader, out_size: int) -> VisionTower:
    hidden, size, prefix = config.hidden_size, config.patch_size, "visual"
    patches = loader.read(f"{prefix}.patch_embed.proj.weight", hidden, 3, config.temporal, size, size)
    blocks = loader.side_by_side(
        *(partial(_load_block, config, loader, f"{prefix}.blocks.{n}") for n in range(config.depth))
    )
    merged = hidden * config.merge**2
    return VisionTower(
        config,
        loader.pack(patches.view(hidden, -1)),
        blocks,
        load_rms_norm(loader, f"{prefix}.merger.ln_q", hidden, _EPS),
        (
            load_plain(loader, f"{prefix}.merger.mlp.0", merged, merged),
            load_plain(loader, f"{prefix}.merger.mlp.2", out_size, merged),
        ),
    )


def _load_block(config: VisionConfig, loader: WeightLoader, prefix: str) -> VisionBlock:
    hidden, inner, mlp = config.hidden_size, config.intermediate_size, f"{prefix}.mlp"
    weights = [loader.read(f"{mlp}.{name}_proj.weight", inner, hidden) for name in ("gate", "up")]
    biases = [loader.read(f"{mlp}.{name}_proj.bias", inner) for name in ("gate", "up")]
    return VisionBlock(
        attention_norm=load_rms_norm(loader, f"{prefix}.norm1", hidden, _EPS),
        qkv=load_plain(loader, f"{prefix}.attn.qkv", 3 * hidden, hidden),
        out=load_plain(loader, f"{prefix}.attn.proj", hidden, hidden),
        mlp_norm=load_rms_norm(loader, f"{prefix}.norm2", hidden, _EPS),
        gate_up=loader.pack(torch.cat(weights), torch.cat(biases)),
        down=load_plain(loader, f"{mlp}.down_proj", hidden, inner),
        num_heads=config.num_heads,
    )
