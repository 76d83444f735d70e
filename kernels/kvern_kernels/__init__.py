"""Kvern's compute ops: pure functions on tensors, each served by the best backend of this machine.

`import kvern_kernels as kernels` is cheap: torch and the compiled library load when an op is first
used. The backend of each op is chosen then and logged once (see `dispatch`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvern_kernels.attention_options import AttentionOptions as AttentionOptions
    from kvern_kernels.decoder import Decoder as Decoder
    from kvern_kernels.decoder import DecoderLayer as DecoderLayer
    from kvern_kernels.dispatch import select as select
    from kvern_kernels.dispatch import select_attention as select_attention
    from kvern_kernels.reference import PackedLinear as PackedLinear
    from kvern_kernels.reference import add_rms_norm as add_rms_norm
    from kvern_kernels.reference import copy_blocks as copy_blocks
    from kvern_kernels.reference import gelu_and_mul as gelu_and_mul
    from kvern_kernels.reference import layer_norm as layer_norm
    from kvern_kernels.reference import linear as linear
    from kvern_kernels.reference import merge_attention as merge_attention
    from kvern_kernels.reference import new_kv_cache as new_kv_cache
    from kvern_kernels.reference import pack_decoder as pack_decoder
    from kvern_kernels.reference import pack_gguf as pack_gguf
    from kvern_kernels.reference import pack_linear as pack_linear
    from kvern_kernels.reference import paged_attention as paged_attention
    from kvern_kernels.reference import rms_norm as rms_norm
    from kvern_kernels.reference import rope_and_store as rope_and_store
    from kvern_kernels.reference import rotary as rotary
    from kvern_kernels.reference import run_decoder as run_decoder
    from kvern_kernels.reference import silu_and_mul as silu_and_mul
    from kvern_kernels.reference import store_kv as store_kv
    from kvern_kernels.reference import swiglu_and_mul as swiglu_and_mul
    from kvern_kernels.reference_lora import lora_expand as lora_expand
    from kvern_kernels.reference_lora import lora_plan as lora_plan
    from kvern_kernels.reference_lora import lora_shrink as lora_shrink
    from kvern_kernels.reference_moe import fused_moe as fused_moe
    from kvern_kernels.reference_moe import moe_route as moe_route
    from kvern_kernels.reference_moe import pack_experts as pack_experts
    from kvern_kernels.reference_quant import pack_awq as pack_awq
    from kvern_kernels.reference_quant import pack_fp8 as pack_fp8
    from kvern_kernels.reference_quant import pack_gptq as pack_gptq
    from kvern_kernels.reference_quant import pack_int8 as pack_int8
    from kvern_kernels.reference_quant import pack_mxfp4 as pack_mxfp4
    from kvern_kernels.reference_quant import quantize_fp8 as quantize_fp8
    from kvern_kernels.reference_quant import quantize_int8 as quantize_int8
    from kvern_kernels.reference_sampling import gather_logprobs as gather_logprobs
    from kvern_kernels.reference_sampling import mask_logits as mask_logits
    from kvern_kernels.reference_sampling import penalize_logits as penalize_logits
    from kvern_kernels.reference_sampling import philox_uniform as philox_uniform
    from kvern_kernels.reference_sampling import sample as sample
    from kvern_kernels.reference_states import causal_conv as causal_conv
    from kvern_kernels.reference_states import gated_delta_scan as gated_delta_scan
    from kvern_kernels.reference_states import mamba_scan as mamba_scan

OPS = (
    "pack_linear",
    "pack_gguf",
    "linear",
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "rotary",
    "store_kv",
    "rope_and_store",
    "paged_attention",
    "merge_attention",
    "silu_and_mul",
    "gelu_and_mul",
    "swiglu_and_mul",
    "copy_blocks",
    "new_kv_cache",
    "pack_decoder",
    "run_decoder",
    "philox_uniform",
    "penalize_logits",
    "mask_logits",
    "sample",
    "gather_logprobs",
    "pack_gptq",
    "pack_awq",
    "pack_int8",
    "pack_fp8",
    "pack_mxfp4",
    "quantize_fp8",
    "quantize_int8",
    "moe_route",
    "pack_experts",
    "fused_moe",
    "lora_plan",
    "lora_shrink",
    "lora_expand",
    "causal_conv",
    "mamba_scan",
    "gated_delta_scan",
)


def __getattr__(name: str) -> Any:
    """Resolve an op at its first use; afterwards it is an ordinary module attribute."""
    if name == "AttentionOptions":
        from kvern_kernels.attention_options import AttentionOptions

        return AttentionOptions
    if name in ("Decoder", "DecoderLayer"):
        from kvern_kernels import decoder

        return getattr(decoder, name)
    if name not in OPS and name not in ("PackedLinear", "select", "select_attention"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvern_kernels import dispatch

    if name in ("select", "select_attention"):
        return getattr(dispatch, name)
    value = dispatch.resolve(name)
    globals()[name] = value
    return value
