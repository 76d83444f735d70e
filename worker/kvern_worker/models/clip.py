"""CLIP's vision transformer (arXiv 2103.00020), up to the layer that a LLaVA takes its features from.

::

    [class, patches] + positions → norm → [norm → attention → + → norm → fc1 → act → fc2 → +] × L
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kvern_kernels as kernels
from kvern.errors import invalid
from kvern_worker.config import HfConfig
from kvern_worker.layers.mlp import Activation
from kvern_worker.layers.norm import Norm, load_layer_norm
from kvern_worker.weights.loader import WeightLoader

ACTIVATIONS: dict[str, Activation] = {
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True, kw_only=True)
class ClipConfig:
    """``image_size``, ``patch_size`` in pixels; images are square."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    activation: str
    norm_eps: float

    @property
    def side(self) -> int:
        """Patches along one side of an image."""
        return self.image_size // self.patch_size


def parse_clip(raw: HfConfig) -> ClipConfig:
    """From a ``vision_config``. Raises KvernError naming the key at fault."""
    raw.only("model_type", "clip_vision_model")
    raw.only("num_channels", 3)
    raw.only("hidden_act", raw["hidden_act"] if raw.get("hidden_act") in ACTIVATIONS else "quick_gelu")
    config = ClipConfig(
        hidden_size=raw.positive("hidden_size", 768),
        intermediate_size=raw.positive("intermediate_size", 3072),
        num_layers=raw.positive("num_hidden_layers", 12),
        num_heads=raw.positive("num_attention_heads", 12),
        image_size=raw.positive("image_size", 224),
        patch_size=raw.positive("patch_size", 32),
        activation=raw.get("hidden_act", "quick_gelu"),
        norm_eps=raw.number("layer_norm_eps", 1e-5),
    )
    if config.hidden_size % config.num_heads:
        raise invalid(
            "vision_config.num_attention_heads",
            f"hidden_size ({config.hidden_size}) of the vision tower must be a multiple of num_attention_heads "
            f"({config.num_heads})",
            value=config.num_heads,
        )
    return config


@dataclass(frozen=True, slots=True)
class ClipLayer:
    """x [N, T, hidden] → the same."""

    qkv: kernels.PackedLinear
    out: kernels.PackedLinear
    fc1: kernels.PackedLinear
    fc2: kernels.PackedLinear
    attention_norm: Norm
    mlp_norm: Norm
    activation: Activation
    num_heads: int

    def __call__(self, x: Tensor) -> Tensor:
        images, tokens, hidden = x.shape
        flat = x.reshape(-1, hidden)
        heads = kernels.linear(self.attention_norm(flat), self.qkv)
        q, k, v = heads.view(images, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, hidden)
        flat = flat + kernels.linear(mixed, self.out)
        inner = self.activation(kernels.linear(self.mlp_norm(flat), self.fc1))
        return (flat + kernels.linear(inner, self.fc2)).view(images, tokens, hidden)


@dataclass(frozen=True, slots=True)
class ClipTower:
    """``patches`` [hidden, 3·p·p] without bias; ``start``: what the class token is before the first norm, [hidden];
    ``positions`` [1 + patches, hidden]."""

    config: ClipConfig
    patches: kernels.PackedLinear
    start: Tensor
    positions: Tensor
    norm: Norm
    layers: list[ClipLayer]

    def __call__(self, images: Tensor) -> Tensor:
        """Normalized images [N, 3, size, size] → [N, 1 + patches, hidden]: of the last of ``layers``."""
        count, size, side = images.shape[0], self.config.patch_size, self.config.side
        cut = images.view(count, 3, side, size, side, size).permute(0, 2, 4, 1, 3, 5)
        embedded = kernels.linear(cut.reshape(count * side * side, -1), self.patches)
        hidden = embedded.view(count, side * side, -1)
        hidden = torch.cat((self.start.expand(count, 1, -1), hidden), 1) + self.positions
        hidden = self.norm(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def load_clip(config: ClipConfig, loader: WeightLoader, prefix: str, num_layers: int) -> ClipTower:
    """The first ``num_layers`` layers; the others' tensors need not be read."""
    hidden, size = config.hidden_size, config.patch_size
    embeddings = f"{prefix}.embeddings"
    patches = loader.read(f"{embeddings}.patch_embedding.weight", hidden, 3, size, size)
    layers: list[Any] = loader.side_by_side(
        *(partial(_load_layer, config, loader, f"{prefix}.encoder.layers.{n}") for n in range(num_layers))
    )
    return ClipTower(
        config,
        loader.pack(patches.view(hidden, -1)),
        loader.tensor(f"{embeddings}.class_embedding", hidden),
        loader.tensor(f"{embeddings}.position_embedding.weight", config.side**2 + 1, hidden),
        load_layer_norm(loader, f"{prefix}.pre_layrnorm", hidden, config.norm_eps),
        layers,
    )


def load_plain(loader: WeightLoader, prefix: str, size: int, in_size: int) -> kernels.PackedLinear:
    """A linear layer with a bias that neither adapters nor quantization at load touch."""
    return loader.pack(loader.read(f"{prefix}.weight", size, in_size), loader.read(f"{prefix}.bias", size))


def _load_layer(config: ClipConfig, loader: WeightLoader, prefix: str) -> ClipLayer:
    hidden, inner, attention = config.hidden_size, config.intermediate_size, f"{prefix}.self_attn"
    weights = [loader.read(f"{attention}.{name}_proj.weight", hidden, hidden) for name in "qkv"]
    biases = [loader.read(f"{attention}.{name}_proj.bias", hidden) for name in "qkv"]
    return ClipLayer(
        qkv=loader.pack(torch.cat(weights), torch.cat(biases)),
        out=load_plain(loader, f"{attention}.out_proj", hidden, hidden),
        fc1=load_plain(loader, f"{prefix}.mlp.fc1", inner, hidden),
        fc2=load_plain(loader, f"{prefix}.mlp.fc2", hidden, inner),
        attention_norm=load_layer_norm(loader, f"{prefix}.layer_norm1", hidden, config.norm_eps),
        mlp_norm=load_layer_norm(loader, f"{prefix}.layer_norm2", hidden, config.norm_eps),
        activation=ACTIVATIONS[config.activation],
        num_heads=config.num_heads,
    )
