// Sums of four products of unsigned and signed bytes in sixteen 32-bit lanes, on every instruction set; exact,
// hence the same on all of them. And how codes of 4, 6 and 8 bits become bytes.
#pragma once

#include "simd.h"

namespace KVERN_ISA {

// Bytes: 16 outputs x 4 codes along k. Four: the 4 signed bytes of x that all outputs meet. Ints: 16 sums. `to_ints` takes integral floats,
// `high_bytes` is (x + 128) >> 8, `store_bytes` keeps the low byte of each.
#if defined(__AVX512BW__)

struct Bytes {
  __m512i v;
};
struct Ints {
  __m512i v;
};
INLINE Ints no_ints() { return {_mm512_setzero_si512()}; }
INLINE Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
INLINE void store(uint8_t* p, Bytes b) { _mm512_storeu_si512(p, b.v); }
template <int SHIFT>
INLINE Bytes right(Bytes b) {
  return {_mm512_srli_epi16(b.v, SHIFT)};
}
template <int SHIFT>
INLINE Bytes left(Bytes b) {
  return {_mm512_slli_epi16(b.v, SHIFT)};
}
INLINE Bytes masked(Bytes b, int mask) { return {_mm512_and_si512(b.v, _mm512_set1_epi8((char)mask))}; }
INLINE Bytes operator|(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }
INLINE V16 floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
INLINE Ints load_ints(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
INLINE Ints to_ints(V16 a) { return {_mm512_cvtps_epi32(a.v)}; }
INLINE Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
INLINE Ints high_bytes(Ints a) { return {_mm512_srai_epi32(_mm512_add_epi32(a.v, _mm512_set1_epi32(128)), 8)}; }
INLINE void store_bytes(int8_t* p, Ints a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }
INLINE int32_t total(Ints a) { return _mm512_reduce_add_epi32(a.v); }
INLINE V16 load(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
#if defined(__AVX512VNNI__)
struct Four {
  __m512i v;
};
INLINE Four broadcast_four(const int8_t* x) {
  int32_t four;
  memcpy(&four, x, 4);
  return {_mm512_set1_epi32(four)};
}
INLINE Ints dot(Ints sum, Bytes w, Four x) {
  // Not the intrinsic: GCC 12 copies each accumulator there and back, and runs out of registers.
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(w.v), "v"(x.v));
  return sum;
}
#else
struct Four {
  __m512i even, odd;
};
INLINE Four broadcast_four(const int8_t* x) {
  int32_t four;
  memcpy(&four, x, 4);
  __m512i all = _mm512_set1_epi32(four);
  return {_mm512_srai_epi16(_mm512_slli_epi16(all, 8), 8), _mm512_srai_epi16(all, 8)};
}
INLINE Ints dot(Ints sum, Bytes w, Four x) {
  __m512i even = _mm512_and_si512(w.v, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(w.v, 8);
  __m512i both = _mm512_add_epi32(_mm512_madd_epi16(even, x.even), _mm512_madd_epi16(odd, x.odd));
  return {_mm512_add_epi32(sum.v, both)};
}
#endif

#elif defined(__AVX2__)

struct Bytes {
  __m256i a, b;
};
struct Ints {
  __m256i a, b;
};
struct Four {
  __m256i even, odd;
};
INLINE Ints no_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE Bytes load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
INLINE void store(uint8_t* p, Bytes b) {
  _mm256_storeu_si256((__m256i*)p, b.a);
  _mm256_storeu_si256((__m256i*)p + 1, b.b);
}
template <int SHIFT>
INLINE Bytes right(Bytes b) {
  return {_mm256_srli_epi16(b.a, SHIFT), _mm256_srli_epi16(b.b, SHIFT)};
}
template <int SHIFT>
INLINE Bytes left(Bytes b) {
  return {_mm256_slli_epi16(b.a, SHIFT), _mm256_slli_epi16(b.b, SHIFT)};
}
INLINE Bytes masked(Bytes b, int mask) {
  __m256i m = _mm256_set1_epi8((char)mask);
  return {_mm256_and_si256(b.a, m), _mm256_and_si256(b.b, m)};
}
INLINE Bytes operator|(Bytes x, Bytes y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
INLINE V16 floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE Ints to_ints(V16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INLINE Ints operator+(Ints x, Ints y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
INLINE __m256i high_byte(__m256i x) { return _mm256_srai_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(128)), 8); }
INLINE Ints high_bytes(Ints x) { return {high_byte(x.a), high_byte(x.b)}; }
INLINE void store_bytes(int8_t* p, Ints x) {
  int32_t t[LANES];
  memcpy(t, &x, sizeof t);
  for (int i = 0; i < LANES; ++i) p[i] = (int8_t)(uint8_t)t[i];
}
INLINE int32_t total(Ints x) {
  int32_t t[LANES], sum = 0;
  memcpy(t, &x, sizeof t);
  for (int i = 0; i < LANES; ++i) sum += t[i];
  return sum;
}
INLINE V16 load(const uint8_t* p) {
  __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}
INLINE Four broadcast_four(const int8_t* x) {
  int32_t four;
  memcpy(&four, x, 4);
  __m256i all = _mm256_set1_epi32(four);
  return {_mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), _mm256_srai_epi16(all, 8)};
}
INLINE __m256i dot(__m256i sum, __m256i w, Four x) {
  __m256i even = _mm256_and_si256(w, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(w, 8);
  __m256i both = _mm256_add_epi32(_mm256_madd_epi16(even, x.even), _mm256_madd_epi16(odd, x.odd));
  return _mm256_add_epi32(sum, both);
}
INLINE Ints dot(Ints sum, Bytes w, Four x) { return {dot(sum.a, w.a, x), dot(sum.b, w.b, x)}; }

#else

struct Bytes {
  uint8_t v[64];
};
struct Ints {
  int32_t v[LANES];
};
struct Four {
  int32_t v[4];
};
INLINE Ints no_ints() { return {}; }
INLINE Bytes load_bytes(const uint8_t* p) {
  Bytes b;
  memcpy(b.v, p, 64);
  return b;
}
INLINE void store(uint8_t* p, Bytes b) { memcpy(p, b.v, 64); }
template <int SHIFT>
INLINE Bytes right(Bytes b) {
  for (auto& x : b.v) x >>= SHIFT;
  return b;
}
template <int SHIFT>
INLINE Bytes left(Bytes b) {
  for (auto& x : b.v) x = (uint8_t)(x << SHIFT);
  return b;
}
INLINE Bytes masked(Bytes b, int mask) {
  for (auto& x : b.v) x &= mask;
  return b;
}
INLINE Bytes operator|(Bytes a, Bytes b) {
  for (int i = 0; i < 64; ++i) a.v[i] |= b.v[i];
  return a;
}
INLINE V16 floats(Ints x) {
  float t[LANES];
  for (int i = 0; i < LANES; ++i) t[i] = (float)x.v[i];
  return load(t);
}
INLINE Ints to_ints(V16 x) {
  float t[LANES];
  Ints out;
  store(t, x);
  for (int i = 0; i < LANES; ++i) out.v[i] = (int32_t)t[i];
  return out;
}
INLINE Ints operator+(Ints a, Ints b) {
  for (int i = 0; i < LANES; ++i) a.v[i] += b.v[i];
  return a;
}
INLINE Ints high_bytes(Ints a) {
  for (auto& x : a.v) x = (x + 128) >> 8;
  return a;
}
INLINE void store_bytes(int8_t* p, Ints a) {
  for (int i = 0; i < LANES; ++i) p[i] = (int8_t)(uint8_t)a.v[i];
}
INLINE int32_t total(Ints a) {
  int32_t sum = 0;
  for (int32_t x : a.v) sum += x;
  return sum;
}
INLINE V16 load(const uint8_t* p) {
  float t[LANES];
  for (int i = 0; i < LANES; ++i) t[i] = (float)p[i];
  return load(t);
}
INLINE Four broadcast_four(const int8_t* x) { return {{x[0], x[1], x[2], x[3]}}; }
INLINE Ints dot(Ints sum, Bytes w, Four x) {
  for (int j = 0; j < LANES; ++j) {
    for (int i = 0; i < 4; ++i) sum.v[j] += w.v[4 * j + i] * x.v[i];
  }
  return sum;
}
#endif

// Stored codes: a unit is what is loaded at once, QUADS times 4 codes along k of 16 outputs.
struct Codes4 {  // each byte: code k in the low nibble, k + 4 in the high one
  static constexpr int BITS = 4, QUADS = 2, BYTES = 64;
  struct Unit {
    Bytes both;
  };
  INLINE Unit load(const uint8_t* p) { return {load_bytes(p)}; }
  template <int Q>
  INLINE Bytes quad(const Unit& u) {
    return masked(Q == 0 ? u.both : right<4>(u.both), 15);
  }
};
struct Codes6 {  // two units of low nibbles, then 64 bytes with the two high bits of quads 0 … 3
  static constexpr int BITS = 6, QUADS = 4, BYTES = 192;
  struct Unit {
    Bytes low[2], high;
  };
  INLINE Unit load(const uint8_t* p) { return {{load_bytes(p), load_bytes(p + 64)}, load_bytes(p + 128)}; }
  template <int Q>
  INLINE Bytes quad(const Unit& u) {
    Bytes low = masked(Q % 2 == 0 ? u.low[Q / 2] : right<4>(u.low[Q / 2]), 15);
    Bytes high;
    if constexpr (Q == 0) high = left<4>(u.high);
    if constexpr (Q == 1) high = left<2>(u.high);
    if constexpr (Q == 2) high = u.high;
    if constexpr (Q == 3) high = right<2>(u.high);
    return low | masked(high, 48);
  }
};
struct Codes8 {
  static constexpr int BITS = 8, QUADS = 1, BYTES = 64;
  struct Unit {
    Bytes bytes;
  };
  INLINE Unit load(const uint8_t* p) { return {load_bytes(p)}; }
  template <int Q>
  INLINE Bytes quad(const Unit& u) {
    return u.bytes;
  }
};

}  // namespace KVERN_ISA
