"""The table of rotary angles, with the scalings that long-context checkpoints name."""

from __future__ import annotations

import math

import torch

from kvern_worker.config import RopeConfig


def cos_sin_table(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """[num_positions, head_dim] float32: the first half of a row is cosines, the second sines.

    ``head_dim``: of the part that is rotated. Scalings that depend on the length take ``num_positions`` for it: one
    table serves all sequences, so that what one has cached is right for another.
    """
    inverse, scale = _frequencies(rope, head_dim, num_positions)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse)
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1)


def _frequencies(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [head_dim / 2] float32, and the factor on cosines and sines."""
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim)
    inverse = 1.0 / powers
    if rope.divisors:
        return inverse / torch.tensor(rope.divisors, dtype=torch.float32), 1.0
    match rope.kind:
        case "linear":
            return inverse / rope.factor, 1.0
        case "llama3":
            return _llama3(rope, inverse), 1.0
        case "yarn":
            return _yarn(rope, powers, head_dim)
        case "longrope":
            return _longrope(rope, powers, num_positions)
        case _:
            # "dynamic" stretches only past the trained length, which is as far as it is served.
            return inverse, 1.0


def _longrope(rope: RopeConfig, powers: torch.Tensor, num_positions: int) -> tuple[torch.Tensor, float]:
    """One divisor per frequency (arXiv 2402.13753), of two sets: up to the trained length and beyond it."""
    long = num_positions > rope.original_max_positions
    divisors = torch.tensor(rope.long_factors if long else rope.short_factors, dtype=torch.float32)
    inverse = 1.0 / (divisors * powers)
    if rope.attention_factor is not None:
        return inverse, rope.attention_factor
    stretch = math.log(max(rope.factor, 1.0)) / math.log(rope.original_max_positions)
    return inverse, math.sqrt(1 + stretch)


def _llama3(rope: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / inverse
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    smooth = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * (inverse / rope.factor) + smooth * inverse
    scaled = torch.where(wavelengths > longest, inverse / rope.factor, inverse)
    return torch.where((wavelengths >= shortest) & (wavelengths <= longest), between, scaled)


def _yarn(rope: RopeConfig, powers: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, float]:
    """NTK-by-parts (arXiv 2309.00071): fast frequencies keep, slow ones interpolate, a ramp between."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    inverse = 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep

    if rope.attention_factor is not None:
        return inverse, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return inverse, yarn_magnitude(rope.factor, rope.mscale) / yarn_magnitude(
            rope.factor, rope.mscale_all_dim
        )
    return inverse, yarn_magnitude(rope.factor)


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """By how much YaRN enlarges rotated queries and keys, against the softmax's flattening over longer contexts."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
