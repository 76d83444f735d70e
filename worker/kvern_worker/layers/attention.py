"""What a step tells every layer, and the KV cache that they share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import kvern_kernels as kernels
from kvern_kernels import kv_cache


@dataclass(slots=True)
class StepInputs:
    """The flat batch of one step: T tokens of S sequences, each sequence's tokens together.

    ``token_ids``, ``positions``, ``slot_mapping`` int64 [T]; ``block_tables`` int32 [S, blocks];
    ``query_start`` int32 [S + 1]; ``seq_lens`` int32 [S], keys including this step's.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor


def warm_up_step() -> StepInputs:
    """One token that is stored nowhere."""
    return StepInputs(
        token_ids=torch.zeros(1, dtype=torch.int64),
        positions=torch.zeros(1, dtype=torch.int64),
        slot_mapping=torch.full((1,), -1, dtype=torch.int64),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        query_start=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.ones(1, dtype=torch.int32),
    )


class KvCache:
    """Keys and values of all layers, [num_blocks, kv_heads, block_size, head_dim] each. Memory is only touched
    when a block is first written."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = [
            kernels.new_kv_cache(num_blocks, num_kv_heads, block_size, head_dim, dtype)
            for _ in range(num_layers)
        ]

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Block ``sources[i]`` onto ``targets[i]`` (int64) in every layer."""
        for keys, values in self.layers:
            kernels.copy_blocks(keys, values, sources, targets)


def block_bytes(
    num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> int:
    """What one block takes over all layers, keys and values, int8's scales included."""
    return 2 * num_layers * kv_cache.block_bytes(num_kv_heads, block_size, head_dim, dtype)
