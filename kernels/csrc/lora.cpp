// The C interface of LoRA's two ops; what they compute is in lora.h.
#include "abi.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace kvern;

EXPORT void kvern_lora_shrink(int threads, const void* x, int64_t x_row, int x_type, const void* a, int a_type,
                              const int32_t* adapters, int64_t count, float* out, int64_t tokens, int64_t outputs,
                              int64_t k) {
  active().lora_shrink(
      {x, x_row, (Type)x_type, a, (Type)a_type, adapters, count, out, tokens, outputs, k, threads});
}

EXPORT void kvern_lora_expand(int threads, const float* hidden, const void* b, int b_type, const float* scales,
                              const int32_t* adapters, int64_t count, void* out, int64_t out_row, int out_type,
                              const int64_t* widths, int64_t tokens, int64_t slices, int64_t rank, int64_t n) {
  active().lora_expand({hidden, b, (Type)b_type, scales, adapters, count, out, out_row, (Type)out_type, widths, tokens,
                        slices, rank, n, threads});
}
