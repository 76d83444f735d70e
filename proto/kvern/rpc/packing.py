"""Packed little-endian 32-bit arrays: ``bytes`` on the wire, numpy in the process, no copy on reading."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

I32 = np.dtype("<i4")
U32 = np.dtype("<u4")


def pack_i32(values: npt.ArrayLike | Sequence[int]) -> bytes:
    return np.ascontiguousarray(values, dtype=I32).tobytes()


def pack_u32(values: npt.ArrayLike | Sequence[int]) -> bytes:
    return np.ascontiguousarray(values, dtype=U32).tobytes()


def unpack_i32(packed: bytes) -> npt.NDArray[np.int32]:
    """A read-only view of shape [n]. Raises ValueError when the length is not a multiple of 4."""
    return np.frombuffer(packed, dtype=I32)


def unpack_u32(packed: bytes) -> npt.NDArray[np.uint32]:
    """A read-only view of shape [n]. Raises ValueError when the length is not a multiple of 4."""
    return np.frombuffer(packed, dtype=U32)
