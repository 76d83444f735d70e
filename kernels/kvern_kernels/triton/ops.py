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

from kvern_kernels.decoder import run_by_op as run_decoder
from kvern_kernels.reference import new_kv_cache, pack_decoder
from kvern_kernels.triton.activations import gelu_and_mul, silu_and_mul, swiglu_and_mul
from kvern_kernels.triton.attention import merge_attention, paged_attention
from kvern_kernels.triton.gemm import linear
from kvern_kernels.triton.kv import copy_blocks, store_kv
from kvern_kernels.triton.launch import chip, interpreted
from kvern_kernels.triton.lora import lora_expand, lora_plan, lora_shrink
from kvern_kernels.triton.moe import fused_moe, pack_experts
from kvern_kernels.triton.norms import add_rms_norm, layer_norm, rms_norm
from kvern_kernels.triton.packing import (
    PackedLinear,
    pack_awq,
    pack_fp8,
    pack_gguf,
    pack_gptq,
    pack_int8,
    pack_linear,
    pack_mxfp4,
)
from kvern_kernels.triton.quantize import quantize_fp8, quantize_int8
from kvern_kernels.triton.rope import rope_and_store, rotary
from kvern_kernels.triton.routing import moe_route
from kvern_kernels.triton.sampling import (
    gather_logprobs,
    mask_logits,
    penalize_logits,
    philox_uniform,
    sample,
)

NAME = f"triton/{'interpreter' if interpreted() else chip().name}"
DEVICES = ("cpu", "cuda") if interpreted() else ("cuda",)
ONLY_WHEN_ASKED = interpreted()  # far too slow to be anyone's default


__all__ = [
    "DEVICES",
    "NAME",
    "ONLY_WHEN_ASKED",
    "PackedLinear",
    "add_rms_norm",
    "copy_blocks",
    "fused_moe",
    "gather_logprobs",
    "gelu_and_mul",
    "layer_norm",
    "linear",
    "lora_expand",
    "lora_plan",
    "lora_shrink",
    "mask_logits",
    "merge_attention",
    "moe_route",
    "new_kv_cache",
    "pack_awq",
    "pack_decoder",
    "pack_experts",
    "pack_fp8",
    "pack_gguf",
    "pack_gptq",
    "pack_int8",
    "pack_linear",
    "pack_mxfp4",
    "paged_attention",
    "penalize_logits",
    "philox_uniform",
    "quantize_fp8",
    "quantize_int8",
    "rms_norm",
    "rope_and_store",
    "rotary",
    "run_decoder",
    "sample",
    "silu_and_mul",
    "store_kv",
    "swiglu_and_mul",
]
