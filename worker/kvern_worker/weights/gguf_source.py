"""GGUF checkpoints: llama.cpp's names and metadata, turned into Hugging Face's."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvern.errors import invalid
from kvern_worker.config import DecoderConfig, RopeConfig, unsupported
from kvern_worker.weights.dequantize import dequantize_into
from kvern_worker.weights.gguf_file import TENSOR_TYPES, GgufFile
from kvern_worker.weights.source import TensorInfo, TensorSource

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)$")


def hugging_face_name(name: str) -> str | None:
    """None for tensors that are no weights of the model (rotary divisors)."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    if (match := _LAYER.match(name)) and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return None if name == "rope_freqs.weight" else name


class GgufSource(TensorSource):
    """``config`` must be that of the same file: it says how many heads the rows of Q and K belong to."""

    def __init__(self, file: GgufFile, config: DecoderConfig) -> None:
        self._file = file
        self._tensors = {
            name: tensor
            for tensor in file.tensors.values()
            if (name := hugging_face_name(tensor.name)) is not None
        }
        for tensor in self._tensors.values():
            if not tensor.type_name:
                raise unsupported(
                    f"tensor {tensor.name} of {file.path} has ggml type {tensor.type_number}; "
                    f"supported are {', '.join(kind[0] for kind in TENSOR_TYPES.values())}",
                    field="model",
                    value=tensor.type_number,
                )
        self.infos = {
            name: TensorInfo(tensor.shape, tensor.num_bytes, file.path)
            for name, tensor in self._tensors.items()
        }
        # llama.cpp permutes the rows of Q and K of its "llama" architecture for its rotary layout.
        self._heads = (
            {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
            if file.metadata["general.architecture"] == "llama"
            else {}
        )

    def read_into(self, name: str, out: Tensor) -> None:
        dequantize_into(self._raw(name).view(-1), self._tensors[name].type_name, out)

    def blocks(self, name: str) -> tuple[Tensor, str] | None:
        tensor = self._tensors[name]
        return (self._raw(name), tensor.type_name) if tensor.type_name.startswith("Q") else None

    def _raw(self, name: str) -> Tensor:
        """The tensor's bytes, uint8 [rows, bytes of a row], in Hugging Face's order of rows."""
        tensor = self._tensors[name]
        raw = self._file.raw(tensor).reshape(tensor.shape[0], -1)
        if heads := self._heads.get(name.split(".")[-2]):
            pairs = raw.reshape(heads, tensor.shape[0] // heads // 2, 2, -1)
            raw = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(raw.shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mapped file is read-only; it is only read
            return torch.from_numpy(raw)


def parse_gguf_config(file: GgufFile) -> DecoderConfig:
    """The DecoderConfig that the metadata describes. Raises KvernError naming the key at fault."""
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise unsupported(
            f"GGUF architecture {arch} is not supported; supported are {', '.join(ARCHITECTURES)}",
            field="general.architecture",
            value=arch,
        )

    def get(key: str, default: Any = None) -> Any:
        value = file.metadata.get(f"{arch}.{key}", default)
        if value is None:
            raise invalid(f"{arch}.{key}", f"{file.path}: metadata key {arch}.{key} is missing")
        return value

    hidden_size, num_layers = int(get("embedding_length")), int(get("block_count"))
    num_heads = int(get("attention.head_count"))
    head_dim = int(get("attention.key_length", hidden_size // num_heads))
    if int(get("rope.dimension_count", head_dim)) != head_dim:
        raise unsupported("partial rotary embeddings are not supported", field=f"{arch}.rope.dimension_count")
    rope = _parse_rope(file, get)
    eos = [file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
    return DecoderConfig(
        architecture=ARCHITECTURES[arch],
        vocab_size=file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0,
        hidden_size=hidden_size,
        intermediate_size=int(get("feed_forward_length")),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(get("attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        rms_norm_eps=float(get("attention.layer_norm_rms_epsilon")),
        max_positions=int(get("context_length")),
        rope=rope,
        windows=(int(get("attention.sliding_window", 0)),) * num_layers,
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        eos_token_ids=tuple(dict.fromkeys(int(token) for token in eos if token is not None)),
        dtype="bfloat16",
    )


def _parse_rope(file: GgufFile, get: Any) -> RopeConfig:
    theta, kind = float(get("rope.freq_base", 10_000.0)), get("rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        divisors = file.raw(file.tensors["rope_freqs.weight"]).view("<f4")
        return RopeConfig(theta=theta, divisors=tuple(divisors.tolist()))
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind not in ("linear", "yarn"):
        raise unsupported(
            f"rope scaling {kind} is not supported in GGUF; supported are linear, yarn",
            field="rope.scaling.type",
            value=kind,
        )
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(get("rope.scaling.factor", 1.0)),
        original_max_positions=int(get("rope.scaling.original_context_length", get("context_length"))),
    )
