"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): what is cached is one vector for all heads.

A token's keys and values are linear in a latent c [rank] that all heads share, beside one rotated key part of all heads.
Only these are cached. Each head's key matrix is moved to the query's side, qᵀ(Wc) = (Wᵀq)ᵀc, and its value matrix behind
the attention, so that attention itself runs over the cache as with one key head of rotary + rank components, and
nothing is expanded per cached token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import kvern_kernels as kernels
from kvern_worker.layers.attention import StepInputs
from kvern_worker.layers.norm import Norm


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """x [T, hidden] → [T, hidden].

    ``queries`` turn x into [T, heads · (plain + rotary)], one after the other: a projection, or two with a norm between.
    ``compress`` gives [T, rank + rotary], ``norm`` is of the latent. ``absorb``, per head: [plain] → [rank], Wᵀ above;
    ``expand``, per head: [rank] → [value]. ``keys``, ``values``: a cache of one head of rotary + rank components (the
    kernels read keys and values in different layouts, so that it lies there twice).
    """

    queries: tuple[kernels.PackedLinear, ...]
    query_norm: Norm | None
    compress: kernels.PackedLinear
    norm: Norm
    absorb: list[kernels.PackedLinear]
    expand: list[kernels.PackedLinear]
    o: kernels.PackedLinear
    keys: Tensor
    values: Tensor
    cos_sin: Tensor
    scale: float
    interleaved: bool = True

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        rotary = self.cos_sin.shape[1]
        rank = self.keys.shape[3] - rotary
        plain, turned = self._queries(x).split_with_sizes([self.absorb[0].in_features, rotary], 2)
        latent, key = kernels.linear(x, self.compress).split_with_sizes([rank, rotary], 1)
        cached = torch.cat((key, self.norm(latent)), 1).unsqueeze(1)
        q = kernels.rope_and_store(
            *(torch.cat((turned, _by_head(plain, self.absorb)), 2), cached, cached),
            *(step.positions, self.cos_sin, step.slot_mapping, self.keys, self.values),
            interleaved=self.interleaved,
        )
        mixed = kernels.paged_attention(
            *(q, self.keys, self.values, step.block_tables, step.query_start, step.seq_lens),
            kernels.AttentionOptions(self.scale),
        )
        return kernels.linear(_by_head(mixed[:, :, rotary:], self.expand).flatten(1), self.o)

    def _queries(self, x: Tensor) -> Tensor:
        """[T, heads, plain + rotary]."""
        q = kernels.linear(x, self.queries[0])
        if self.query_norm is not None:
            q = kernels.linear(self.query_norm(q), self.queries[1])
        return q.unflatten(1, (len(self.absorb), -1))


def _by_head(x: Tensor, matrices: list[kernels.PackedLinear]) -> Tensor:
    """x [T, heads, K] → [T, heads, N], each head by its matrix."""
    return torch.stack([kernels.linear(x[:, head], matrix) for head, matrix in enumerate(matrices)], 1)
