// V16 in four vectors of four floats by the compiler's own vector types: SSE2, NEON and anything else.
// Included by simd.h inside namespace KVERN_ISA.

typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));

#if defined(__ARM_NEON)
constexpr int ACCUMULATORS = 6;
#else
constexpr int ACCUMULATORS = 3;
#endif

struct V16 {
  Float4 v[4];
};

template <class F>
INLINE V16 each(F f) {
  V16 r;
  UNROLL for (int i = 0; i < 4; ++i) r.v[i] = f(i);
  return r;
}
INLINE Float4 splat(float x) { return Float4{x, x, x, x}; }
INLINE Float4 pick(Int4 mask, Float4 yes, Float4 no) { return (Float4)((mask & (Int4)yes) | (~mask & (Int4)no)); }

INLINE V16 zero() {
  return each([](int) { return splat(0.0f); });
}
INLINE V16 set1(float x) {
  return each([=](int) { return splat(x); });
}
INLINE V16 fma(V16 a, V16 b, V16 c) {
#if defined(__ARM_NEON)
  return each([&](int i) { return (Float4)vfmaq_f32((float32x4_t)c.v[i], (float32x4_t)a.v[i], (float32x4_t)b.v[i]); });
#else
  return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
#endif
}
INLINE V16 operator+(V16 a, V16 b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
INLINE V16 operator-(V16 a, V16 b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
INLINE V16 operator*(V16 a, V16 b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
INLINE V16 operator/(V16 a, V16 b) {
  return each([&](int i) { return a.v[i] / b.v[i]; });
}
INLINE V16 max(V16 a, V16 b) {
  return each([&](int i) { return pick((Int4)(a.v[i] > b.v[i]), a.v[i], b.v[i]); });
}
INLINE V16 min(V16 a, V16 b) {
  return each([&](int i) { return pick((Int4)(a.v[i] < b.v[i]), a.v[i], b.v[i]); });
}
INLINE V16 zero_below(V16 x, V16 low, V16 y) {
  return each([&](int i) {
    Float4 kept = pick((Int4)(x.v[i] < low.v[i]), splat(0.0f), y.v[i]);
    return pick((Int4)(x.v[i] == x.v[i]), kept, x.v[i]);
  });
}
INLINE V16 load(const float* p) {
  V16 r;
  memcpy(&r, p, sizeof r);
  return r;
}
INLINE void store(float* p, V16 a) { memcpy(p, &a, sizeof a); }

INLINE float from_bits(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
INLINE uint32_t to_bits(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return bits;
}
INLINE V16 load(const bf16* p) {
  float t[LANES];
  for (int i = 0; i < LANES; ++i) t[i] = from_bits((uint32_t)p[i].bits << 16);
  return load(t);
}
INLINE void store(bf16* p, V16 a) {
  float t[LANES];
  store(t, a);
  for (int i = 0; i < LANES; ++i) {
    uint32_t bits = to_bits(t[i]);
    uint32_t rounded = t[i] != t[i] ? bits | 0x400000 : bits + 0x7fff + ((bits >> 16) & 1);
    p[i].bits = (uint16_t)(rounded >> 16);
  }
}
INLINE float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest >= 0x400) return from_bits(sign | ((rest << 13) + 0x38000000));
  return from_bits(sign | to_bits((float)rest * 5.9604644775390625e-8f));
}
INLINE uint16_t float_to_half(float f) {
  uint32_t bits = to_bits(f), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00 | ((rest >> 13) & 0x3ff));
  if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (rest < 0x38800000) {  // a half subnormal: adding 0.5 rounds to a multiple of 2^-24
    return (uint16_t)(sign | (to_bits(from_bits(rest) + 0.5f) - 0x3f000000));
  }
  return (uint16_t)(sign | ((rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13));
}
INLINE V16 load(const f16* p) {
  float t[LANES];
  for (int i = 0; i < LANES; ++i) t[i] = half_to_float(p[i].bits);
  return load(t);
}
INLINE void store(f16* p, V16 a) {
  float t[LANES];
  store(t, a);
  for (int i = 0; i < LANES; ++i) p[i].bits = float_to_half(t[i]);
}
INLINE V16 load(const int8_t* p) {
  float t[LANES];
  for (int i = 0; i < LANES; ++i) t[i] = (float)p[i];
  return load(t);
}
INLINE void load_pairs(const bf16* p, V16& first, V16& second) {
  UNROLL for (int i = 0; i < 4; ++i) {
    Int4 w;
    memcpy(&w, p + 8 * i, sizeof w);
    first.v[i] = (Float4)(w << 16);
    second.v[i] = (Float4)(w & (int32_t)0xffff0000);
  }
}
// Adding 1.5 * 2^23 leaves the nearest integer in the low bits; inputs here are below 2^8.
INLINE V16 round(V16 a) {
  return each([&](int i) { return (a.v[i] + splat(12582912.0f)) - splat(12582912.0f); });
}
INLINE V16 scale_by_power(V16 a, V16 n) {
  return each([&](int i) {
    Int4 e = (Int4)(n.v[i] + splat(12582912.0f)) - (Int4)splat(12582912.0f);
    return a.v[i] * (Float4)((e + 127) << 23);
  });
}
