"""The C++ backend: checks and pointers in the cpu_* modules, arithmetic in kernels/csrc.

A tensor whose dtype or device it does not know goes to the torch reference. Rows may be strided (a
slice of a fused projection); only the last dimension must be dense, and is made so if it isn't.
"""

from kvern_kernels.cpu_attention import copy_blocks as copy_blocks
from kvern_kernels.cpu_attention import new_kv_cache as new_kv_cache
from kvern_kernels.cpu_attention import paged_attention as paged_attention
from kvern_kernels.cpu_base import LIBRARY as LIBRARY
from kvern_kernels.cpu_decoder import pack_decoder as pack_decoder
from kvern_kernels.cpu_decoder import run_decoder as run_decoder
from kvern_kernels.cpu_elementwise import add_rms_norm as add_rms_norm
from kvern_kernels.cpu_elementwise import gelu_and_mul as gelu_and_mul
from kvern_kernels.cpu_elementwise import rms_norm as rms_norm
from kvern_kernels.cpu_elementwise import rope_and_store as rope_and_store
from kvern_kernels.cpu_elementwise import silu_and_mul as silu_and_mul
from kvern_kernels.cpu_elementwise import swiglu_and_mul as swiglu_and_mul
from kvern_kernels.cpu_linear import PackedLinear as PackedLinear
from kvern_kernels.cpu_linear import dequantize as dequantize
from kvern_kernels.cpu_linear import linear as linear
from kvern_kernels.cpu_linear import pack_linear as pack_linear
from kvern_kernels.cpu_lora import lora_expand as lora_expand
from kvern_kernels.cpu_lora import lora_plan as lora_plan
from kvern_kernels.cpu_lora import lora_shrink as lora_shrink
from kvern_kernels.cpu_moe import fused_moe as fused_moe
from kvern_kernels.cpu_moe import moe_route as moe_route
from kvern_kernels.cpu_moe import pack_experts as pack_experts
from kvern_kernels.cpu_quant import pack_awq as pack_awq
from kvern_kernels.cpu_quant import pack_fp8 as pack_fp8
from kvern_kernels.cpu_quant import pack_gguf as pack_gguf
from kvern_kernels.cpu_quant import pack_gptq as pack_gptq
from kvern_kernels.cpu_quant import pack_int8 as pack_int8
from kvern_kernels.cpu_quant import pack_mxfp4 as pack_mxfp4
from kvern_kernels.cpu_states import causal_conv as causal_conv
from kvern_kernels.cpu_states import gated_delta_scan as gated_delta_scan
from kvern_kernels.cpu_states import mamba_scan as mamba_scan

NAME = f"cpu/{LIBRARY.kvern_variant().decode()}"
DEVICES = ("cpu",)
