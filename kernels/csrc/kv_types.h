// The element types of a KV cache below 16 bits: a sign and seven bits that name one of 128 magnitudes, each of
// which bfloat16 holds exactly. FP8 is OCP's (e4m3 without infinities, e5m2); int8 codes are multiples of a
// scale that each token and head has of its own, stored behind the codes of its block (see Cache in abi.h).
#pragma once

#include "abi.h"
#include "simd.h"

namespace KVERN_ISA {

struct e4m3 {
  uint8_t bits;
};
struct e5m2 {
  uint8_t bits;
};
struct code8 {
  int8_t value;
};

template <class T>
constexpr bool NARROW = sizeof(T) == 1;
template <class T>
constexpr bool SCALED = false;
template <>
constexpr bool SCALED<code8> = true;

constexpr float power_of_2(int n) { return n >= 0 ? (float)(1u << n) : 1.0f / (float)(1u << -n); }
// What the seven bits m mean.
constexpr float magnitude(e4m3, int m) {
  if (m == 0x7f) return __builtin_nanf("");
  return m < 8 ? (float)m * power_of_2(-9) : (float)(8 + m % 8) * power_of_2(m / 8 - 10);
}
constexpr float magnitude(e5m2, int m) {
  if (m > 0x7c) return __builtin_nanf("");
  if (m == 0x7c) return __builtin_inff();
  return m < 4 ? (float)m * power_of_2(-16) : (float)(4 + m % 4) * power_of_2(m / 4 - 17);
}
constexpr float magnitude(code8, int m) { return (float)m; }

// The magnitudes as bfloat16.
template <class T>
struct Magnitudes {
  alignas(64) uint16_t bits[128];
  constexpr Magnitudes() : bits() {
    for (int m = 0; m < 128; ++m) bits[m] = (uint16_t)(__builtin_bit_cast(uint32_t, magnitude(T{}, m)) >> 16);
  }
};
template <class T>
constexpr Magnitudes<T> MAGNITUDES = {};

#if defined(__AVX512BW__)
// 16 codes as floats; e5m2 is the upper byte of a half.
template <class T>
INLINE V16 load_codes(const void* p) {
  const __m128i codes = _mm_loadu_si128((const __m128i*)p);
  if constexpr (SCALED<T>) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))};
  } else if constexpr (__is_same(T, e5m2)) {
    return {_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8))};
  } else {
    const __m512i wide = _mm512_cvtepi8_epi32(codes), m = _mm512_and_si512(wide, _mm512_set1_epi32(0x7f));
    __m512i bits = _mm512_add_epi32(_mm512_slli_epi32(m, 20), _mm512_set1_epi32(120 << 23));
    // Subnormals by a product: to shift them would make floats that the processor is slow with.
    __m512 value = _mm512_mask_mul_ps(_mm512_castsi512_ps(bits), _mm512_cmplt_epi32_mask(m, _mm512_set1_epi32(8)),
                                      _mm512_cvtepi32_ps(m), _mm512_set1_ps(power_of_2(-9)));
    __mmask16 nan = _mm512_cmpeq_epi32_mask(m, _mm512_set1_epi32(0x7f));
    value = _mm512_mask_mov_ps(value, nan, _mm512_set1_ps(__builtin_nanf("")));
    const __m512i sign = _mm512_set1_epi32((int)0x80000000);
    return {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(value), wide, sign, 0xf8))};
  }
}
#else
template <class T>
INLINE V16 load_codes(const void* p) {
  bf16 t[LANES];
  for (int i = 0; i < LANES; ++i) {
    uint8_t code = ((const uint8_t*)p)[i];
    uint8_t m = SCALED<T> && code > 127 ? (uint8_t)-code : code;
    t[i].bits = (uint16_t)(MAGNITUDES<T>.bits[m & 127] | (code & 128) << 8);
  }
  return load(t);
}
#endif
INLINE V16 load(const e4m3* p) { return load_codes<e4m3>(p); }
INLINE V16 load(const e5m2* p) { return load_codes<e5m2>(p); }
INLINE V16 load(const code8* p) { return load_codes<code8>(p); }

// Nearest (ties to even), saturating; NaN stays NaN. MANTISSA bits behind the leading one, LEAST the exponent of
// the smallest normal number.
template <int MANTISSA, int LEAST>
INLINE uint8_t to_fp8(float x, float largest) {
  uint32_t bits = __builtin_bit_cast(uint32_t, x), sign = bits >> 24 & 0x80;
  float size = __builtin_bit_cast(float, bits & 0x7fffffff);
  if (size != size) return (uint8_t)(sign | 0x7f);
  size = size < largest ? size : largest;
  bits = __builtin_bit_cast(uint32_t, size);
  const float shifter = power_of_2(LEAST - MANTISSA + 23);  // its last bit weighs as much as a subnormal's
  uint32_t subnormal = __builtin_bit_cast(uint32_t, size + shifter) - __builtin_bit_cast(uint32_t, shifter);
  constexpr int drop = 23 - MANTISSA;
  uint32_t normal = ((bits + (1u << (drop - 1)) - 1 + (bits >> drop & 1)) >> drop) - ((uint32_t)(LEAST + 126) << MANTISSA);
  return (uint8_t)(sign | (size < power_of_2(LEAST) ? subnormal : normal));
}
INLINE e4m3 narrow_to(float x, e4m3) { return {to_fp8<3, -6>(x, 448.0f)}; }
INLINE e5m2 narrow_to(float x, e5m2) { return {to_fp8<2, -14>(x, 57344.0f)}; }
INLINE code8 narrow_to(float x, code8) { return {(int8_t)__builtin_rintf(x)}; }

template <class T>
  requires NARROW<T>
INLINE void store(T* p, V16 x) {
  float t[LANES];
  store(t, x);
  for (int i = 0; i < LANES; ++i) p[i] = narrow_to(t[i], T{});
}

// Calls f(pointer of the element type) for a cache of a run-time type.
template <class F>
INLINE void typed_cache(kvern::Type type, void* p, F f) {
  switch (type) {
    case kvern::F32: return f((float*)p);
    case kvern::BF16: return f((bf16*)p);
    case kvern::F16: return f((f16*)p);
    case kvern::E4M3: return f((e4m3*)p);
    case kvern::E5M2: return f((e5m2*)p);
    case kvern::I8: return f((code8*)p);
    default: return;
  }
}

}  // namespace KVERN_ISA
