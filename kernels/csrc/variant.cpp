// All ops for one instruction set, or only those that multiply matrices where nothing else differs from a base.
// Compiled once per variant with -DKVERN_ISA=name and its -m flags; no standard C++ headers, whose inline
// functions could leak one variant's instructions into another.
#include "abi.h"
#include "linear.h"
#include "linear_fp8.h"
#include "linear_int.h"
#if defined(__AMX_BF16__)
#include "linear_int_amx.h"
#endif
#if !defined(KVERN_MATRIX_ONLY) || defined(__AVX512BF16__)
#include "attention.h"
#endif
#if !defined(KVERN_MATRIX_ONLY)
#include "elementwise.h"
#include "lora.h"
#endif

namespace KVERN_ISA {

static void linear(const kvern::Linear& a) {
  if (a.weight_type == kvern::F32) return linear_of<F32Step>(a, kvern::F32, 1);
  if (a.weight_type == kvern::QUANTIZED) {
#if defined(__AMX_INT8__)
    if (linear_int_amx(a)) return;
#endif
    return linear_int(a);
  }
  if (a.weight_type == kvern::E4M3) return linear_fp8(a);
#if defined(__AMX_BF16__)
  if (a.x_type == kvern::BF16) {
    int64_t row;
    const bf16* x = as_type<bf16>(a, kvern::BF16, K_MULTIPLE, &row);
    return linear_amx(a, x, row);
  }
#elif defined(__AVX512BF16__)
  if (a.x_type == kvern::BF16) return linear_of<BF16Dot>(a, kvern::BF16, K_MULTIPLE);
#endif
  linear_of<BF16Step>(a, kvern::F32, K_MULTIPLE);
}

}  // namespace KVERN_ISA

#define TEXT(x) #x
#define NAME(x) TEXT(x)

namespace kvern {
namespace KVERN_ISA {
extern const Ops ops;
#if defined(KVERN_MATRIX_ONLY) && defined(__AVX512BF16__)
const Ops ops = {NAME(KVERN_ISA), ::KVERN_ISA::linear, ::KVERN_ISA::dequantize, ::KVERN_ISA::attention, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
#elif defined(KVERN_MATRIX_ONLY)
const Ops ops = {NAME(KVERN_ISA), ::KVERN_ISA::linear, ::KVERN_ISA::dequantize, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
#else
const Ops ops = {NAME(KVERN_ISA), ::KVERN_ISA::linear, ::KVERN_ISA::dequantize, ::KVERN_ISA::attention, ::KVERN_ISA::rope_and_store,
                 ::KVERN_ISA::norm, ::KVERN_ISA::gate, ::KVERN_ISA::combine, ::KVERN_ISA::lora_shrink, ::KVERN_ISA::lora_expand};
#endif
}  // namespace KVERN_ISA
}  // namespace kvern
