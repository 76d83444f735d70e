"""A decoder put together from layers, run op by op; where all blocks are of a kind that ``kernels.run_decoder`` knows, it
runs them in one call, with the same bits (layers/stack.py).

::

    tokens → embedding · scale (+ positions) → block × L → norm → head → · logit scale, soft cap

    block:     x += m · post(attention(pre(x)));  x += m · post(mlp(pre(x)))         norms that aren't there do nothing
    parallel:  x += m · (attention(pre(x)) + mlp(pre'(x)))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kvern_kernels as kernels
from kvern_worker.config import DecoderConfig
from kvern_worker.layers.attention import StepInputs
from kvern_worker.layers.norm import Norm, load_rms_norm, no_norm
from kvern_worker.layers.stack import pack_stack, run_stack
from kvern_worker.parallel.group import ALONE, TensorParallel
from kvern_worker.weights.loader import WeightLoader
from kvern_worker.weights.source import Part


@dataclass(frozen=True, slots=True)
class Block:
    """One layer: ``attention(x, step)``, ``mlp(x)`` and the norms around them. See the module's text."""

    attention: Callable[[Tensor, StepInputs], Tensor]
    mlp: Callable[[Tensor], Tensor]
    pre_attention: Norm = no_norm
    post_attention: Norm = no_norm
    pre_mlp: Norm = no_norm
    post_mlp: Norm = no_norm
    multiplier: float = 1.0
    parallel: bool = False

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        mixed = self.post_attention(self.attention(self.pre_attention(x), step))
        if self.parallel:
            return x + self._scaled(mixed + self.post_mlp(self.mlp(self.pre_mlp(x))))
        x = x + self._scaled(mixed)
        return x + self._scaled(self.post_mlp(self.mlp(self.pre_mlp(x))))

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.multiplier == 1.0 else x * self.multiplier


@dataclass(frozen=True, slots=True)
class Decoder:
    """``embedding`` [vocab, hidden]; ``positions`` [positions, hidden] where they are learned; ``stack``: the blocks as
    one op, or None. A model in the sense of models/registry.py."""

    embedding: Tensor
    blocks: list[Block]
    norm: Norm
    head: kernels.PackedLinear
    positions: Tensor | None = None
    stack: kernels.Decoder | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    vocab_size: int = 0
    tp: TensorParallel = ALONE

    def forward(self, step: StepInputs) -> Tensor:
        hidden = self.tp.embed(step.token_ids, self.embedding, self.vocab_size)
        if self.embedding_scale != 1.0:
            hidden = hidden * self.embedding_scale
        if self.positions is not None:
            hidden = hidden + self.positions.index_select(0, step.positions)
        if self.stack is not None:
            return torch.add(*run_stack(self.stack, hidden, step))
        for block in self.blocks:
            hidden = block(hidden, step)
        return hidden

    def hidden(self, states: Tensor, rows: Tensor | slice) -> Tensor:
        return self.norm(states[rows]).float()

    def logits(self, states: Tensor, rows: Tensor | slice) -> Tensor:
        logits = kernels.linear(self.norm(states[rows]), self.head, torch.float32)
        if self.logit_scale != 1.0:
            logits *= self.logit_scale
        if self.logit_softcap:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return self.tp.logits(logits, self.vocab_size)


def load_decoder(
    config: DecoderConfig,
    loader: WeightLoader,
    block: Callable[[int], Block],
    norm: Callable[[], Norm] | None = None,
    *,
    embedding: str = "model.embed_tokens",
    head: str = "lm_head",
    ignored: tuple[str, ...] = (),
    **options: Any,
) -> Decoder:
    """Reads the layers side by side. ``block(i)`` and ``norm()`` load theirs (by default, the RMS norm ``model.norm``);
    ``options`` are fields of Decoder.

    Raises KvernError when the checkpoint lacks a tensor or has one too many; those of ``ignored`` prefixes are no fault.
    """
    if norm is None:
        norm = partial(load_rms_norm, loader, "model.norm", config.hidden_size, config.rms_norm_eps)
    # The embedding and the head first: they take longest.
    (table, packed), last, *blocks = loader.side_by_side(
        partial(_load_ends, config, loader, embedding, head),
        norm,
        *(partial(block, layer) for layer in range(config.num_layers)),
    )
    loader.finish(*ignored, *([f"{head}.weight"] if config.tie_word_embeddings else []))
    # Ranks add up what they have within a layer, which the one op does not.
    stack = pack_stack(blocks) if loader.tp.size == 1 else None
    whole = {"stack": stack, "vocab_size": config.vocab_size, "tp": loader.tp, **options}
    return Decoder(table, blocks, last, packed, **whole)


def load_pre_norm_block(
    config: DecoderConfig,
    loader: WeightLoader,
    prefix: str,
    attention: Callable[[Tensor, StepInputs], Tensor],
    mlp: Callable[[Tensor], Tensor],
    multiplier: float = 1.0,
) -> Block:
    """A block with an RMS norm before attention and one before the MLP, under the names that most checkpoints use."""
    before, after = (
        load_rms_norm(loader, f"{prefix}.{name}", config.hidden_size, config.rms_norm_eps)
        for name in ("input_layernorm", "post_attention_layernorm")
    )
    return Block(attention, mlp, pre_attention=before, pre_mlp=after, multiplier=multiplier)


def _load_ends(
    config: DecoderConfig, loader: WeightLoader, embedding: str, head: str
) -> tuple[Tensor, kernels.PackedLinear]:
    rows = loader.tp.split([loader.tp.vocab_part(config.vocab_size)])
    part = Part(rows)
    table = loader.tensor(f"{embedding}.weight", config.vocab_size, config.hidden_size, part=part)
    if config.tie_word_embeddings:
        return table, loader.head(f"{embedding}.weight", table, part)
    return table, loader.linear(
        [head], [config.vocab_size], config.hidden_size, bias=False, rows=None if rows is None else [rows]
    )
