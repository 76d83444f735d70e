"""`kvern bench make-model`: a Hugging Face folder with a known model's shape, random weights and a tiny tokenizer.

Benchmarks need a model's sizes, not its knowledge. Matrices are normal with deviation 0.02, norms are ones; the
tokenizer writes a word of its own for every id, so that each token of a stream shows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "max_window_layers": 28,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_TOY = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 1024,
}
_TOY_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3,
    "qwen3-toy": _QWEN3 | _TOY,
    "qwen3-moe-toy": _QWEN3 | _TOY_MOE,
}
QUANTIZATIONS = ("none", "gptq", "awq", "w8a8")
GROUP_SIZE = 128
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output of each nibble of an AWQ word, the lowest first

_CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP_SIZE,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
    },
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP_SIZE,
        "zero_point": True,
        "version": "gemm",
    },
    "w8a8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "channel",
                    "dynamic": False,
                },
                "input_activations": {
                    "num_bits": 8,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "token",
                    "dynamic": True,
                },
            }
        },
    },
}


@dataclass(frozen=True)
class MadeModel:
    path: Path
    parameters: int
    num_bytes: int


class _Writer:
    """A safetensors file: the header first, from the tensors' shapes, then their bytes, made one at a time."""

    def __init__(self, seed: int, quantization: str) -> None:
        self._random = np.random.default_rng(seed)
        self._quantization = quantization
        self._tensors: list[tuple[str, str, tuple[int, ...], str]] = []  # name, dtype, shape, how it is made
        self.parameters = 0

    def add(self, name: str, dtype: str, shape: tuple[int, ...], kind: str) -> None:
        self._tensors.append((name, dtype, shape, kind))

    def vector(self, name: str, size: int) -> None:
        self.parameters += size
        self.add(name, "BF16", (size,), "one")

    def matrix(self, name: str, rows: int, columns: int, quantize: bool = True) -> None:
        """[rows, columns] bfloat16, or in the layout of the quantization."""
        self.parameters += rows * columns
        stem, groups = name.removesuffix(".weight"), -(-columns // GROUP_SIZE)
        if not quantize or self._quantization == "none":
            self.add(name, "BF16", (rows, columns), "normal")
        elif self._quantization == "w8a8":
            self.add(name, "I8", (rows, columns), "codes")
            self.add(f"{stem}.weight_scale", "BF16", (rows, 1), "scale8")
        elif self._quantization == "gptq":
            self.add(f"{stem}.qweight", "I32", (columns // 8, rows), "nibbles")
            self.add(f"{stem}.qzeros", "I32", (groups, rows // 8), "zeros7")
            self.add(f"{stem}.scales", "F16", (groups, rows), "scale4")
            self.add(f"{stem}.g_idx", "I32", (columns,), "groups")
        else:
            self.add(f"{stem}.qweight", "I32", (columns, rows // 8), "nibbles")
            self.add(f"{stem}.qzeros", "I32", (groups, rows // 8), "nibbles")
            self.add(f"{stem}.scales", "F16", (groups, rows), "scale4")

    def write(self, path: Path) -> int:
        sizes = {"BF16": 2, "F16": 2, "I8": 1, "I32": 4}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, dtype, shape, _ in self._tensors:
            end = at + sizes[dtype] * int(np.prod(shape))
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, _, shape, kind in self._tensors:
                for part in self._parts(kind, shape):
                    file.write(part.tobytes())
        return at

    def _parts(self, kind: str, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
        count, random = int(np.prod(shape)), self._random
        if kind == "normal":
            for start in range(0, count, 1 << 22):
                size = min(1 << 22, count - start)
                yield _bfloat16(random.standard_normal(size, np.float32) * np.float32(0.02))
        elif kind == "one":
            yield _bfloat16(np.ones(count, np.float32))
        elif kind == "codes":
            yield random.integers(-127, 128, count, np.int8)
        elif kind == "scale8":  # uniform codes: deviation 73
            yield _bfloat16((0.02 / 73 * random.uniform(0.8, 1.2, count)).astype(np.float32))
        elif kind == "scale4":  # deviation 4.6
            yield (0.02 / 4.6 * random.uniform(0.8, 1.2, count)).astype(np.float16)
        elif kind == "nibbles":
            yield random.integers(0, 1 << 32, count, np.uint32)
        elif kind == "zeros7":  # GPTQ stores a zero point less one
            yield np.full(count, 0x77777777, np.uint32)
        else:
            yield (np.arange(count) // GROUP_SIZE).astype(np.int32)


def _bfloat16(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def make_model(folder: Path, like: str, quantization: str = "none", seed: int = 0) -> MadeModel:
    """Write config.json, model.safetensors and a tokenizer to ``folder``. Raises ValueError on an unknown name."""
    if like not in SHAPES:
        raise ValueError(f"--like {like!r}: one of {', '.join(SHAPES)}")
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"--quantization {quantization!r}: one of {', '.join(QUANTIZATIONS)}")
    config = dict(SHAPES[like])
    if quantization in _CONFIGS:
        config["quantization_config"] = _CONFIGS[quantization]
    folder.mkdir(parents=True, exist_ok=True)
    writer = _Writer(seed, quantization)
    _add_tensors(writer, config)
    num_bytes = writer.write(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    _write_tokenizer(folder, config["vocab_size"])
    return MadeModel(folder, writer.parameters, num_bytes)


def _add_tensors(writer: _Writer, config: dict[str, Any]) -> None:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    writer.matrix("model.embed_tokens.weight", config["vocab_size"], hidden, quantize=False)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        writer.vector(f"{layer}.input_layernorm.weight", hidden)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            writer.matrix(f"{layer}.self_attn.{name}_proj.weight", rows, hidden)
        writer.matrix(f"{layer}.self_attn.o_proj.weight", hidden, queries)
        writer.vector(f"{layer}.self_attn.q_norm.weight", head)
        writer.vector(f"{layer}.self_attn.k_norm.weight", head)
        writer.vector(f"{layer}.post_attention_layernorm.weight", hidden)
        experts = config.get("num_experts", 0)
        if experts:
            writer.matrix(f"{layer}.mlp.gate.weight", experts, hidden, quantize=False)
        inner = config["moe_intermediate_size"] if experts else config["intermediate_size"]
        for mlp in [f"{layer}.mlp.experts.{e}" for e in range(experts)] or [f"{layer}.mlp"]:
            writer.matrix(f"{mlp}.gate_proj.weight", inner, hidden)
            writer.matrix(f"{mlp}.up_proj.weight", inner, hidden)
            writer.matrix(f"{mlp}.down_proj.weight", hidden, inner)
    writer.vector("model.norm.weight", hidden)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Bytes, and for every further id a word of its own that only decodes."""
    vocab = {"<s>": 0, "</s>": 1}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[letter] = len(vocab)
    for index in range(len(vocab), vocab_size):
        vocab[f"Ġw{index}"] = index
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "chat_template": template,
            }
        )
    )
