"""Philox4x32-10: the random number of a token is a function of (seed, position), and of nothing else.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). Because there is no state, a sequence that
is preempted, recovered or batched otherwise draws the same numbers again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

Words = npt.NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Ten rounds over arrays of 32-bit words (held in uint64), elementwise; returns four such arrays."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product_0, product_1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
        c0, c2 = (product_1 >> _32) ^ c1 ^ k0, (product_0 >> _32) ^ c3 ^ k1
        c1, c3 = product_1 & _LOW, product_0 & _LOW
        k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """[n] numbers in [0, 1) with 53 bits, for the tokens at ``positions`` of sequences with these seeds."""
    at = positions.astype(np.uint64)
    zero = np.zeros_like(at)
    high, low, _, _ = philox4x32((at & _LOW, at >> _32, zero, zero), (seeds & _LOW, seeds >> _32))
    bits = ((high << _32) | low) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
