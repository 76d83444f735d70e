"""Every kind of GGUF weights, kept as it is: the model says what transformers does with what the gguf package unpacks."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import dequantize
from worker.conftest import load_executor
from worker.mini_scheduler import MiniScheduler, Sequence, greedy
from worker.test_worker_loaders import random_blocks

from kvern_worker.weights.checkpoint import open_checkpoint
from kvern_worker.weights.gguf_file import TENSOR_TYPES
from kvern_worker.weights.gguf_source import hugging_face_name
from kvern_worker.weights.loader import WeightLoader

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 256, 512, 4, 2, 263
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}
TYPES = {name: (elements, size) for name, elements, size in TENSOR_TYPES.values()}
# As llama.cpp makes them: more bits for values and for the way back.
MIXES = {"Q4_K_M": ("Q4_K", "Q6_K"), "Q3_K_M": ("Q3_K", "Q5_K"), "F16 and Q8_0": ("Q8_0", "F16")}
KINDS = {kind: (kind, kind) for kind in TYPES} | MIXES
PROMPT = [3 + 7 * i % 250 for i in range(24)]


def blocks(kind: str, rows: int, columns: int) -> np.ndarray:
    """Blocks whose values deviate by 0.08 or so, [rows, bytes of a row]."""
    elements, size = TYPES[kind]
    if elements == 1:
        values = torch.randn(rows, columns) * 0.08
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        return values.to(dtype).view(torch.uint8).numpy().reshape(rows, -1)
    made = random_blocks(kind, size, rows * columns // elements)
    values = dequantize(made, gguf.GGMLQuantizationType[kind])
    shrink = np.float32(0.08 / values.std())
    places = {"Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}
    for at in places.get(kind, (0, 2)):
        halves = made[:, at : at + 2].copy().view(np.float16).astype(np.float32) * shrink
        made[:, at : at + 2] = halves.astype(np.float16).view(np.uint8)
    return made.reshape(rows, -1)


def write(path: Path, most: str, some: str) -> dict[str, torch.Tensor]:
    """A file of the architecture qwen2 without biases, a Llama whose rows are not permuted; what its tensors mean."""
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_eos_token_id(2)
    meant = {}
    for name, shape in SHAPES.items():
        kind = some if name in ("attn_v", "ffn_down") else most
        key, raw = f"blk.0.{name}.weight", blocks(kind, *shape)
        writer.add_tensor(key, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
        values = dequantize(raw, gguf.GGMLQuantizationType[kind])
        meant[hugging_face_name(key)] = torch.from_numpy(values.reshape(shape).copy())
    for key in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{key}.weight", np.ones(HIDDEN, np.float32))
        meant[hugging_face_name(f"{key}.weight")] = torch.ones(HIDDEN)
    embedding = np.random.default_rng(0).standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    writer.add_tensor("token_embd.weight", embedding)
    meant["model.embed_tokens.weight"] = meant["lm_head.weight"] = torch.from_numpy(embedding)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_logits_are_those_of_the_unpacked_weights(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    meant = write(tmp_path / "model.gguf", *KINDS[kind])
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict(meant)
    wanted = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    executor = load_executor(tmp_path / "model.gguf", keep_quantized=True)
    sequence = Sequence(PROMPT, greedy(prompt_logprobs=VOCAB), 1)
    MiniScheduler(executor).run([sequence], chunk=16)
    for index in range(1, len(PROMPT)):
        found = sequence.prompt_logprobs[index]
        row = torch.empty(VOCAB)
        row[list(found.top_token_ids)] = torch.tensor(list(found.top_logprobs))
        assert (row - wanted[index - 1]).abs().max() < 5e-4


@pytest.mark.parametrize(("kind", "most"), [("Q2_K", 0.33), ("Q3_K", 0.3), ("Q4_K", 0.3), ("Q5_0", 0.41)])
def test_blocks_are_not_widened(kind: str, most: float, tmp_path: Path) -> None:
    """2- to 4-bit kinds are kept in 4 bits, 5- and 6-bit ones in 6, beside their scales: Q2_K has 16 bits of them for 16
    weights, (4 + 1 + 1/8) / 16 of bfloat16."""
    write(tmp_path / "model.gguf", kind, kind)
    opened = open_checkpoint(tmp_path / "model.gguf")
    loader = WeightLoader(opened.source, torch.bfloat16, lambda _: None, 1, True)
    loader.linear([f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")], [INNER] * 2, HIDDEN, False)
    assert loader.num_bytes < most * 2 * 2 * INNER * HIDDEN
