"""What the C++ backend's modules share: the library, its types, and pointers into tensors."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from kvern_kernels import library

LIBRARY = library.load()

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
KV_TYPES = TYPES | {torch.float8_e4m3fn: 16, torch.float8_e5m2: 17, torch.int8: 18}
_HUGE_PAGE = 2 << 20
threads = torch.get_num_threads


def aligned(count: int, dtype: torch.dtype) -> Tensor:
    """`count` zeroed elements on a page boundary, in huge pages where the system grants them."""
    size = max(count * dtype.itemsize, 1)
    memory = mmap.mmap(-1, size)
    if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)


def dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def address_of(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
