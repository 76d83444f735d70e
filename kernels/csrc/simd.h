// Sixteen float lanes, V16, on every instruction set: one AVX-512 register, two AVX2, four of SSE or NEON.
//
// Included once per variant inside namespace KVERN_ISA, so that no inline function compiled with one
// variant's flags can be linked into another. Arithmetic is explicit (fused multiply-add is always
// `fma`, contraction is off), so a formula gives the same bits wherever it is written.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace KVERN_ISA {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

constexpr int LANES = 16;

#if defined(__AVX512F__)

// Accumulators that fit the register file beside operands, in V16.
constexpr int ACCUMULATORS = 24;

struct V16 {
  __m512 v;
};
INLINE V16 zero() { return {_mm512_setzero_ps()}; }
INLINE V16 set1(float x) { return {_mm512_set1_ps(x)}; }
INLINE V16 fma(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
INLINE V16 operator+(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
INLINE V16 operator-(V16 a, V16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
INLINE V16 operator*(V16 a, V16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE V16 operator/(V16 a, V16 b) { return {_mm512_div_ps(a.v, b.v)}; }
INLINE V16 max(V16 a, V16 b) { return {_mm512_max_ps(a.v, b.v)}; }
INLINE V16 min(V16 a, V16 b) { return {_mm512_min_ps(a.v, b.v)}; }
INLINE V16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE __m512 widen(__m256i h) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
INLINE V16 load(const bf16* p) { return {widen(_mm256_loadu_si256((const __m256i*)p))}; }
INLINE V16 load(const f16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
INLINE void store(float* p, V16 a) { _mm512_storeu_ps(p, a.v); }
INLINE void store(f16* p, V16 a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE void store(bf16* p, V16 a) {
  __m512i bits = _mm512_castps_si512(a.v);
  __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, lsb), _mm512_set1_epi32(0x7fff));
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
// 16 pairs of bfloat16 as two vectors: the first of each pair, the second of each pair.
INLINE void load_pairs(const bf16* p, V16& first, V16& second) {
  __m512i w = _mm512_loadu_si512(p);
  first.v = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
  second.v = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000)));
}
// x·2^n for integral n held as floats, and n = round(x).
INLINE V16 round(V16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
INLINE V16 scale_by_power(V16 a, V16 n) {
  __m512i e = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23);
  return {_mm512_mul_ps(a.v, _mm512_castsi512_ps(e))};
}

// 16 signed bytes as floats.
INLINE V16 load(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
// y where x > low, 0 elsewhere, NaN where x is NaN.
INLINE V16 zero_below(V16 x, V16 low, V16 y) {
  __mmask16 below = _mm512_cmp_ps_mask(x.v, low.v, _CMP_LT_OQ);
  __m512 kept = _mm512_mask_mov_ps(y.v, below, _mm512_setzero_ps());
  return {_mm512_mask_mov_ps(kept, _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), x.v)};
}

#elif defined(__AVX2__)

constexpr int ACCUMULATORS = 6;

struct V16 {
  __m256 a, b;
};
INLINE V16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE V16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE V16 fma(V16 x, V16 y, V16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE V16 operator+(V16 x, V16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE V16 operator-(V16 x, V16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE V16 operator*(V16 x, V16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE V16 operator/(V16 x, V16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE V16 max(V16 x, V16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE V16 min(V16 x, V16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE V16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE __m256 widen(const void* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
INLINE V16 load(const bf16* p) { return {widen(p), widen(p + 8)}; }
INLINE V16 load(const f16* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
INLINE void store(float* p, V16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
INLINE void store(f16* p, V16 x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
INLINE __m256i narrow(__m256 a) {
  __m256i bits = _mm256_castps_si256(a);
  __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, lsb), _mm256_set1_epi32(0x7fff));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), nan);
  return _mm256_srli_epi32(rounded, 16);
}
INLINE void store(bf16* p, V16 x) {
  __m256i packed = _mm256_packus_epi32(narrow(x.a), narrow(x.b));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
INLINE void load_pairs(const bf16* p, V16& first, V16& second) {
  __m256i lo = _mm256_loadu_si256((const __m256i*)p), hi = _mm256_loadu_si256((const __m256i*)(p + 16));
  __m256i upper = _mm256_set1_epi32((int)0xffff0000);
  first = {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
  second = {_mm256_castsi256_ps(_mm256_and_si256(lo, upper)), _mm256_castsi256_ps(_mm256_and_si256(hi, upper))};
}
INLINE V16 round(V16 x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
INLINE __m256 power_of_two(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE V16 scale_by_power(V16 x, V16 n) {
  return {_mm256_mul_ps(x.a, power_of_two(n.a)), _mm256_mul_ps(x.b, power_of_two(n.b))};
}
INLINE V16 load(const int8_t* p) {
  __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
INLINE __m256 zero_below(__m256 x, __m256 low, __m256 y) {
  __m256 kept = _mm256_andnot_ps(_mm256_cmp_ps(x, low, _CMP_LT_OQ), y);
  return _mm256_blendv_ps(kept, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
INLINE V16 zero_below(V16 x, V16 low, V16 y) {
  return {zero_below(x.a, low.a, y.a), zero_below(x.b, low.b, y.b)};
}

#else
#include "simd_portable.h"
#endif

// Halves onto each other in a fixed tree, the same on every variant.
#if defined(__AVX2__)
INLINE __m256 lower(V16 a) {
#if defined(__AVX512F__)
  return _mm512_castps512_ps256(a.v);
#else
  return a.a;
#endif
}
INLINE __m256 upper(V16 a) {
#if defined(__AVX512F__)
  return _mm512_extractf32x8_ps(a.v, 1);
#else
  return a.b;
#endif
}
INLINE float hsum(V16 a) {
  __m256 eight = _mm256_add_ps(lower(a), upper(a));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE float hmax(V16 a) {
  __m256 eight = _mm256_max_ps(lower(a), upper(a));
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
INLINE float hsum(V16 a) {
  float t[LANES];
  store(t, a);
  UNROLL for (int width = 8; width > 0; width /= 2) {
    UNROLL for (int i = 0; i < width; ++i) t[i] += t[i + width];
  }
  return t[0];
}
INLINE float hmax(V16 a) {
  float t[LANES];
  store(t, a);
  UNROLL for (int width = 8; width > 0; width /= 2) {
    UNROLL for (int i = 0; i < width; ++i) t[i] = t[i] > t[i + width] ? t[i] : t[i + width];
  }
  return t[0];
}
#endif

// e^x: Cody-Waite reduction and a degree-6 polynomial, 2 ulp; 0 below -87.3, infinity above 88.3.
INLINE V16 exp(V16 x) {
  V16 low = set1(-87.336f);
  V16 clamped = min(max(x, low), set1(89.0f));
  V16 n = round(clamped * set1(1.44269504088896341f));
  V16 r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  V16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.0f));
  return zero_below(x, low, scale_by_power(p, n));
}
// 2^x for x up to 127, 1 exactly at 0, 0 below -126: a polynomial around the nearest integer, of degree 4 (3e-6,
// for weights that become bfloat16) or 6 (rounding only).
template <int DEGREE>
INLINE V16 exp2(V16 x) {
  static constexpr float C4[] = {1.0f, 0.693124175f, 0.240240991f, 0.0559064262f, 0.00958285294f};
  static constexpr float C6[] = {1.0f,           0.693147182f,   0.240226477f,    0.0555033237f,
                          0.00961843692f, 0.00133988750f, 0.000153533620f};
  const float* c = DEGREE == 4 ? C4 : C6;
  static_assert(DEGREE == 4 || DEGREE == 6);
#if defined(__AVX512F__)
  const V16 magic = set1(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the nearest integer
  V16 sum = x + magic, r = x - (sum - magic);
  V16 p = set1(c[DEGREE]);
  UNROLL for (int i = DEGREE - 1; i >= 0; --i) p = fma(p, r, set1(c[i]));
  __mmask16 kept = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);  // NaN too, which stays NaN
  __m512i power = _mm512_slli_epi32(_mm512_castps_si512(sum.v), 23);
  return {_mm512_castsi512_ps(_mm512_maskz_add_epi32(kept, _mm512_castps_si512(p.v), power))};
#else
  const V16 low = set1(-126.0f);
  V16 clamped = max(x, low), n = round(clamped), r = clamped - n;
  V16 p = set1(c[DEGREE]);
  UNROLL for (int i = DEGREE - 1; i >= 0; --i) p = fma(p, r, set1(c[i]));
  return zero_below(x, low, scale_by_power(p, n));
#endif
}
INLINE V16 tanh(V16 x) { return set1(1.0f) - set1(2.0f) / (exp(x * set1(2.0f)) + set1(1.0f)); }

// Up to 16 elements, for the ends of rows.
template <class T>
INLINE V16 load_some(const T* p, int count) {
  T t[LANES] = {};
  memcpy(t, p, count * sizeof(T));
  return load(t);
}
template <class T>
INLINE void store_some(T* p, V16 a, int count) {
  T t[LANES];
  store(t, a);
  memcpy(p, t, count * sizeof(T));
}
INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
INLINE float to_float(f16 x) {
  float t[LANES];
  store(t, load_some(&x, 1));
  return t[0];
}

}  // namespace KVERN_ISA
