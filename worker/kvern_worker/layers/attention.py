"""What a step tells every layer, and the KV cache that they share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import kvern_kernels as kernels
from kvern_kernels import kv_cache
from kvern_worker.config import StateShapes


@dataclass(slots=True)
class StepImages:
    """Tokens that stand for images. ``features`` [M, hidden] are the embeddings of the tokens at ``rows`` (int64 [M]) of
    the step, if there are any; ``rotary``: int64 [3, T] positions in time, height and width, where they differ."""

    rows: Tensor
    features: Tensor | None
    rotary: Tensor | None

    def merge(self, embeddings: Tensor) -> None:
        """Overwrites what the placeholders' own embeddings are, [T, hidden]."""
        if self.features is not None:
            embeddings.index_copy_(0, self.rows, self.features.to(embeddings.dtype))


@dataclass(slots=True)
class StepInputs:
    """The flat batch of one step: T tokens of S sequences, each sequence's tokens together.

    ``token_ids``, ``positions``, ``slot_mapping`` int64 [T]; ``block_tables`` int32 [S, blocks];
    ``query_start`` int32 [S + 1]; ``seq_lens`` int32 [S], keys including this step's. ``state_rows`` int64 [S]: where each
    sequence's state lies (-1: nowhere), ``fresh`` bool [S]: whether it is at its first token. ``images``: None in a step without any.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor
    state_rows: Tensor
    fresh: Tensor
    images: StepImages | None = None


def warm_up_step() -> StepInputs:
    """One token that is stored nowhere."""
    return StepInputs(
        token_ids=torch.zeros(1, dtype=torch.int64),
        positions=torch.zeros(1, dtype=torch.int64),
        slot_mapping=torch.full((1,), -1, dtype=torch.int64),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        query_start=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.ones(1, dtype=torch.int32),
        state_rows=torch.full((1,), -1, dtype=torch.int64),
        fresh=torch.ones(1, dtype=torch.bool),
    )


class KvCache:
    """What layers keep of sequences. ``layers``: keys and values, [num_blocks, kv_heads, block_size, head_dim] each.
    ``states``: of the layers that ``states`` describes, [slots + num_checkpoints, ...] float32 tensors; a sequence's is in
    the row of its slot, checkpoints are in the rows behind. Memory is only touched when a block or row is first written.
    """

    def __init__(
        self,
        layers: Iterable[int],
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        states: StateShapes | None = None,
        slots: int = 0,
        num_checkpoints: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_checkpoints = num_checkpoints
        self._slots = slots
        self._make = partial(
            kernels.new_kv_cache,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
        )
        self.layers = {layer: self._make(num_blocks) for layer in layers}
        rows = slots + num_checkpoints
        states = states or StateShapes((), ())
        self.states = {
            layer: tuple(torch.empty(rows, *shape) for shape in states.shapes) for layer in states.layers
        }

    def resize(self, num_blocks: int) -> None:
        """Another number of blocks, in the tensors that layers hold already. What was in them is lost."""
        for layer in self.layers.values():
            for held, made in zip(layer, self._make(num_blocks), strict=True):
                held.set_(made.untyped_storage(), 0, made.shape, made.stride())
        self.num_blocks = num_blocks

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Block ``sources[i]`` onto ``targets[i]`` (int64) in every layer."""
        for keys, values in self.layers.values():
            kernels.copy_blocks(keys, values, sources, targets)

    def save_states(self, slots: Tensor, checkpoints: Tensor) -> None:
        """The state of ``slots[i]`` into checkpoint ``checkpoints[i]`` (int64, distinct)."""
        self._copy_states(slots, checkpoints + self._slots)

    def restore_states(self, checkpoints: Tensor, slots: Tensor) -> None:
        """Checkpoint ``checkpoints[i]`` into the state of ``slots[i]`` (int64, distinct)."""
        self._copy_states(checkpoints + self._slots, slots)

    def _copy_states(self, sources: Tensor, targets: Tensor) -> None:
        for states in self.states.values():
            for state in states:
                state[targets] = state[sources]


def block_bytes(
    num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> int:
    """What one block takes over all layers, keys and values, int8's scales included."""
    return 2 * num_layers * kv_cache.block_bytes(num_kv_heads, block_size, head_dim, dtype)
