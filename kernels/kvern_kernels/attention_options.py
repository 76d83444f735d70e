"""What attention does beside the plain softmax of scaled products: one value that every backend takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """A score is `scale` · q·k; `softcap` c > 0 makes it c·tanh(score / c); `alibi` (float32 [Hq]) adds
    slope · (key position - query position). `sinks` (float32 [Hq]) is the score of a key without a value.

    A query sees the keys up to its own, and of these the last `window` (0: all). Not `causal`, it sees all of its
    sequence, or with a window those less than `window` positions from it on either side. A cache of a narrow dtype
    holds keys / k_scale and values / v_scale.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    alibi: Tensor | None = None
    sinks: Tensor | None = None
    causal: bool = True
    k_scale: float = 1.0
    v_scale: float = 1.0
