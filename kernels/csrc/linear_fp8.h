// Linear layers on FP8 weights (e4m3fn, OCP OFP8): one byte a weight in memory, bfloat16 in the product, which every
// code is exactly. Sums over a group of inputs are scaled and added in float32, group by group.
//
// Few rows decode in registers as the bytes arrive; many decode a task's panels once. The values and the order of
// the sums are the same.
#pragma once

#include "linear.h"

namespace KVERN_ISA {

using kvern::Fp8;

constexpr int FP8_LINE = 2 * LANES;  // codes decoded at once: 16 outputs, two along k
// e = 0: m · 2^-9 in bfloat16. Other codes are shifted into place, the exponent's bias changed from 7 to 127.
alignas(64) constexpr uint16_t FP8_SUBNORMAL[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
constexpr int FP8_BIAS = (127 - 7) << 7;

#if defined(__AVX512BW__)
INLINE __m512i decode_fp8(const uint8_t* p) {
  const __m512i w = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p));
  const __m512i shifted = _mm512_slli_epi16(_mm512_and_si512(w, _mm512_set1_epi16(0x7f)), 4);
  const __m512i normal = _mm512_add_epi16(shifted, _mm512_set1_epi16(FP8_BIAS));
  const __mmask32 small = _mm512_testn_epi16_mask(w, _mm512_set1_epi16(0x78));
  const __m512i magnitude = _mm512_mask_permutexvar_epi16(normal, small, w, _mm512_load_si512(FP8_SUBNORMAL));
  return _mm512_or_si512(magnitude, _mm512_and_si512(_mm512_slli_epi16(w, 8), _mm512_set1_epi16((short)0x8000)));
}
INLINE void decode_fp8(const uint8_t* p, bf16* out) { _mm512_storeu_si512(out, decode_fp8(p)); }
#elif defined(__AVX2__)
INLINE __m256i decode_fp8(__m128i codes) {
  const __m256i w = _mm256_cvtepu8_epi16(codes);
  const __m256i shifted = _mm256_slli_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0x7f)), 4);
  const __m256i normal = _mm256_add_epi16(shifted, _mm256_set1_epi16(FP8_BIAS));
  const __m256i bytes = _mm256_mullo_epi16(_mm256_and_si256(w, _mm256_set1_epi16(7)), _mm256_set1_epi16(0x0202));
  const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)FP8_SUBNORMAL));
  const __m256i subnormal = _mm256_shuffle_epi8(table, _mm256_add_epi16(bytes, _mm256_set1_epi16(0x0100)));
  const __m256i exponent = _mm256_and_si256(w, _mm256_set1_epi16(0x78));
  const __m256i small = _mm256_cmpeq_epi16(exponent, _mm256_setzero_si256());
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(w, 8), _mm256_set1_epi16((short)0x8000));
  return _mm256_or_si256(_mm256_blendv_epi8(normal, subnormal, small), sign);
}
INLINE void decode_fp8(const uint8_t* p, bf16* out) {
  _mm256_storeu_si256((__m256i*)out, decode_fp8(_mm_loadu_si128((const __m128i*)p)));
  _mm256_storeu_si256((__m256i*)out + 1, decode_fp8(_mm_loadu_si128((const __m128i*)p + 1)));
}
#else
INLINE void decode_fp8(const uint8_t* p, bf16* out) {
  for (int i = 0; i < FP8_LINE; ++i) {
    const int w = p[i], magnitude = w & 0x78 ? ((w & 0x7f) << 4) + FP8_BIAS : FP8_SUBNORMAL[w & 7];
    out[i].bits = (uint16_t)(magnitude | (w & 0x80) << 8);
  }
}
#endif

#if defined(__AVX512BF16__)
struct FP8Dot : BF16Dot {
  using W = uint8_t;
  INLINE Weights weights(const W* p) { return decode_fp8(p); }
};
#endif

// Panels from `codes` on as the weights that Step takes.
template <class Step>
static const typename Step::W* fp8_weights(const uint8_t* codes, int64_t count) {
  if constexpr (sizeof(typename Step::W) == 1) {
    return codes;
  } else {
    bf16* weights = (bf16*)kvern::scratch(6, count * (int64_t)sizeof(bf16));
    for (int64_t i = 0; i < count; i += FP8_LINE) decode_fp8(codes + i, weights + i);
    return weights;
  }
}

template <class Step>
static void linear_fp8_with(const kvern::Linear& a, const typename Step::X* x, int64_t x_row) {
  const Fp8& w = *(const Fp8*)a.weight;
  const int64_t panel = w.k * LANES;
  const Tiling t = tiling(a);
  kvern::parallel(a.threads, t.tasks(), [&](int64_t task, int) {
    const int64_t first = t.first(task), count = t.count(task), end = t.end(task);
    const typename Step::W* weights = fp8_weights<Step>(w.codes + first * panel, count * panel);
    alignas(64) float totals[MAX_ROWS * MAX_PANELS * LANES];
    Part part = {w.scales + first * w.groups * LANES, w.groups * LANES, totals, true, false};
    const Out out = {a.y, a.n, a.y_type, a.bias, a.n, a.m, &part};
    for (int64_t m = t.begin(task); m < end; m += t.rows) {
      const int64_t rows = end - m < t.rows ? end - m : t.rows;
      for (int64_t g = 0; g < w.groups; ++g) {
        const int64_t i = g * w.group, depth = w.k - i < w.group ? w.k - i : w.group;
        part.scales = w.scales + (first * w.groups + g) * LANES;
        part.first = g == 0, part.last = g + 1 == w.groups;
        find_tile<Step>(rows, count)(x + m * x_row + i, x_row, weights + i * LANES, panel, depth, out, m, first * LANES);
      }
    }
  });
}

// From this many rows on weights are decoded once a task instead of once a tile.
constexpr int64_t DECODE_ROWS = 2 * MAX_ROWS;

static void linear_fp8(const kvern::Linear& a) {
  int64_t row;
#if defined(__AVX512BF16__)
  if (a.x_type == kvern::BF16) {
    const bf16* x = as_type<bf16>(a, kvern::BF16, K_MULTIPLE, &row);
    if (a.m < DECODE_ROWS) return linear_fp8_with<FP8Dot>(a, x, row);
    return linear_fp8_with<BF16Dot>(a, x, row);
  }
#endif
  const float* x = as_type<float>(a, kvern::F32, K_MULTIPLE, &row);
  linear_fp8_with<BF16Step>(a, x, row);
}

}  // namespace KVERN_ISA
