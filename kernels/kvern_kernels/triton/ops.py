"""The backend that the dispatcher loads for GPU tensors: every op that has a Triton kernel.

Raises ImportError with the reason where kernels can't run. Ops that are missing here are served by the
torch reference, on the same device.
"""

from __future__ import annotations

import torch

if not torch.cuda.is_available():
    from triton import knobs

    if not knobs.runtime.interpret:
        why = "torch was built without CUDA or ROCm" if not torch.backends.cuda.is_built() else "no GPU found"
        raise ImportError(f"{why} (TRITON_INTERPRET=1 runs the kernels, slowly, on CPU tensors)")

from kvern_kernels.triton.activations import gelu_and_mul, silu_and_mul
from kvern_kernels.triton.attention import merge_attention, paged_attention
from kvern_kernels.triton.launch import chip, interpreted

NAME = f"triton/{'interpreter' if interpreted() else chip().name}"
DEVICES = ("cpu", "cuda") if interpreted() else ("cuda",)
ONLY_WHEN_ASKED = interpreted()  # far too slow to be anyone's default

__all__ = [
    "DEVICES",
    "NAME",
    "ONLY_WHEN_ASKED",
    "gelu_and_mul",
    "merge_attention",
    "paged_attention",
    "silu_and_mul",
]
