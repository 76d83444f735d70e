// Linear layers on integer weights: w = scale · code + minimum, with one scale and minimum a group along k.
//
// x is quantized per row: x ≈ scale · (256 · high + low), two signed bytes (16 bits: finer than bfloat16 wherever
// it matters), or scale · high (8 bits). Products of bytes are summed in integers over a group, exactly and hence
// in any order; each group's sum is scaled and added in float32, group by group. So a row's bits depend neither
// on the other rows nor on which unit multiplies. The minimum meets the sum of x over its group.
//
// float32 x takes another way: weights are dequantized, panel by panel, for the float32 tiles.
#pragma once

#include "integers.h"
#include "linear.h"

namespace KVERN_ISA {

using kvern::Quantized;

// Scales and minima of one panel: `scales[g * 16]` and `minima[g * 16]` for group g.
struct Factors {
  const float *scales, *minima;
};

// Bytes that a group (or, for K-quants, a super-block of groups) of 16 outputs takes, see Quantized.
template <kvern::FactorKind KIND>
static void read_factors_of(const Quantized& q, const uint8_t* p, float* scales, float* minima) {
  const V16 zero = set1(-(float)q.zero);
  for (int64_t g = 0; g < q.groups; g += q.groups_per_super) {
    V16 super = set1(1), super_minimum = set1(1);
    if constexpr (KIND >= kvern::SUPER_MINIMUM) {
      super = load((const f16*)p);
      p += 32;
    }
    if constexpr (KIND == kvern::SUPER_MINIMUM) {
      super_minimum = load((const f16*)p);
      p += 32;
    }
    for (int64_t i = g; i < g + q.groups_per_super; ++i) {
      V16 scale, minimum;
      if constexpr (KIND == kvern::FLOAT_ZERO) {
        scale = load((const float*)p), minimum = scale * zero;
        p += 64;
      } else if constexpr (KIND == kvern::FLOAT_MINIMUM) {
        scale = load((const float*)p), minimum = load((const float*)p + LANES);
        p += 128;
      } else if constexpr (KIND == kvern::HALF_ZERO) {
        scale = load((const f16*)p), minimum = scale * zero;
        p += 32;
      } else if constexpr (KIND == kvern::HALF_ZEROS) {
        scale = load((const f16*)p), minimum = V16(scale * load(p + 32)) * set1(-1);
        p += 48;
      } else if constexpr (KIND == kvern::HALF_MINIMUM) {
        scale = load((const f16*)p), minimum = load((const f16*)p + LANES);
        p += 64;
      } else if constexpr (KIND == kvern::SUPER_MINIMUM) {
        scale = super * load(p), minimum = super_minimum * load(p + 16) * set1(-1);
        p += 32;
      } else {
        scale = super * load((const int8_t*)p), minimum = scale * zero;
        p += 16;
      }
      store(scales + i * LANES, scale);
      store(minima + i * LANES, minimum);
    }
  }
}
static void read_factors(const Quantized& q, int64_t panel, float* scales, float* minima) {
  const uint8_t* p = q.factors + panel * q.factor_bytes;
  switch (q.kind) {
    case kvern::FLOAT_ZERO: return read_factors_of<kvern::FLOAT_ZERO>(q, p, scales, minima);
    case kvern::FLOAT_MINIMUM: return read_factors_of<kvern::FLOAT_MINIMUM>(q, p, scales, minima);
    case kvern::HALF_ZERO: return read_factors_of<kvern::HALF_ZERO>(q, p, scales, minima);
    case kvern::HALF_ZEROS: return read_factors_of<kvern::HALF_ZEROS>(q, p, scales, minima);
    case kvern::HALF_MINIMUM: return read_factors_of<kvern::HALF_MINIMUM>(q, p, scales, minima);
    case kvern::SUPER_MINIMUM: return read_factors_of<kvern::SUPER_MINIMUM>(q, p, scales, minima);
    case kvern::SUPER_ZERO: return read_factors_of<kvern::SUPER_ZERO>(q, p, scales, minima);
  }
}

// ---- x as integers ----

struct Activations {
  int8_t *high, *low;  // [m rounded up][k], k padded; low is null for 8 bits
  float* sums;         // [m][groups] of the integers
  float* scales;       // [m]
};

template <class T>
static void quantize_row(const T* x, const Quantized& q, int64_t k, int64_t m, const Activations& out) {
  const int64_t padded = q.k;
  float* row = (float*)kvern::scratch(5, padded * 4 + 64);
  V16 peak = zero(), taint = zero();
  if (q.order) {
    for (int64_t i = 0; i < k; ++i) row[i] = to_float(x[q.order[i]]);
  }
  for (int64_t i = 0; i < k; i += LANES) {
    const int count = (int)(k - i < LANES ? k - i : LANES);
    V16 v = q.order ? load_some(row + i, count) : count == LANES ? load(x + i) : load_some(x + i, count);
    store(row + i, v);
    peak = max(peak, max(v, zero() - v));
    taint = fma(v, zero(), taint);  // NaN where x is not finite
  }
  for (int64_t i = (k + LANES - 1) / LANES * LANES; i < padded; ++i) row[i] = 0;
  float top = hmax(peak);
  const float steps = out.low ? 32639.0f : 127.0f, ruin = hsum(taint);
  if (top < 1e-30f || ruin != ruin) top = 0;
  const float scale = top / steps;
  const V16 inverse = set1(top > 0 ? steps / top : 0.0f), divisor = set1(scale);
  out.scales[m] = scale + ruin;
  int8_t *high = out.high + m * padded, *low = out.low ? out.low + m * padded : nullptr;
  const int64_t group = q.group;
  for (int64_t g = 0; g < q.groups; ++g) {
    Ints sum = no_ints();
    for (int64_t i = g * group; i < (g + 1) * group; i += LANES) {
      const V16 v = load(row + i);
      // 8-bit activations are those of the reference to the last tie.
      const Ints codes = to_ints(top == 0 ? zero() : low ? round(v * inverse) : round(v / divisor));
      sum = sum + codes;
      if (low) {
        store_bytes(high + i, high_bytes(codes));
        store_bytes(low + i, codes);
      } else {
        store_bytes(high + i, codes);
      }
    }
    out.sums[m * q.groups + g] = (float)total(sum);
  }
}

constexpr int64_t ROW_MULTIPLE = 32;  // two tiles of rows

static Activations quantize_rows(const kvern::Linear& a, const Quantized& q) {
  const int64_t rows = (a.m + ROW_MULTIPLE - 1) / ROW_MULTIPLE * ROW_MULTIPLE, plane = rows * q.k;
  const bool wide = q.activation_bits == 16;
  char* memory = (char*)kvern::scratch(0, (wide ? 2 : 1) * plane + rows * (q.groups + 1) * 4 + 64);
  Activations out = {(int8_t*)memory, wide ? (int8_t*)memory + plane : nullptr, nullptr, nullptr};
  out.sums = (float*)(memory + (wide ? 2 : 1) * plane);
  out.scales = out.sums + rows * q.groups;
  const int64_t tail = (rows - a.m) * q.k;
  memset(out.high + a.m * q.k, 0, tail);
  if (wide) memset(out.low + a.m * q.k, 0, tail);
  memset(out.sums + a.m * q.groups, 0, (rows - a.m) * q.groups * 4);
  memset(out.scales + a.m, 0, (rows - a.m) * 4);
  constexpr int64_t block = 8;
  kvern::parallel(a.m > 4 ? a.threads : 1, (a.m + block - 1) / block, [&](int64_t task, int) {
    const int64_t end = (task + 1) * block < a.m ? (task + 1) * block : a.m;
    for (int64_t m = task * block; m < end; ++m) {
      switch (a.x_type) {
        case kvern::BF16: quantize_row((const bf16*)a.x + m * a.x_row, q, a.k, m, out); break;
        case kvern::F16: quantize_row((const f16*)a.x + m * a.x_row, q, a.k, m, out); break;
        default: quantize_row((const float*)a.x + m * a.x_row, q, a.k, m, out);
      }
    }
  });
  return out;
}

// ---- tiles ----

// acc + scale · sum + minimum · sum of x: one group of one row and 16 outputs.
template <bool WIDE>
INLINE V16 fold(V16 acc, Ints high, Ints low, V16 scale, V16 minimum, float x_sum) {
  V16 sum = floats(high);
  if constexpr (WIDE) sum = fma(sum, set1(256), floats(low));
  return fma(minimum, set1(x_sum), fma(scale, sum, acc));
}

struct IntPlace {
  const Quantized& q;
  const Activations& x;
  const uint8_t* codes;    // of the first panel
  int64_t panel;           // bytes of a panel's codes
  const Factors* factors;  // of each panel
  int64_t jump;            // from the end of a panel to where this thread's next task most likely begins
};

template <class C, bool WIDE, int ROWS, int PANELS>
static void int_tile(const IntPlace& a, const Out& out, int64_t m0, int64_t rows, int64_t n0) {
  const int64_t k = a.q.k, groups = a.q.groups, group = a.q.group;
  const int8_t *high = a.x.high + m0 * k, *low = a.x.low + (WIDE ? m0 * k : 0);
  const uint8_t* codes = a.codes;
  const uint8_t* last = codes + a.panel - PREFETCH_BYTES;
  V16 acc[ROWS][PANELS];
  UNROLL for (int m = 0; m < ROWS; ++m) {
    UNROLL for (int p = 0; p < PANELS; ++p) acc[m][p] = zero();
  }
  int64_t i = 0;
  for (int64_t g = 0; g < groups; ++g) {
    Ints highs[ROWS][PANELS], lows[ROWS][PANELS];
    UNROLL for (int m = 0; m < ROWS; ++m) {
      UNROLL for (int p = 0; p < PANELS; ++p) highs[m][p] = lows[m][p] = no_ints();
    }
    for (const int64_t end = i + group; i < end; i += 4 * C::QUADS, codes += C::BYTES) {
      const uint8_t* ahead = codes + PREFETCH_BYTES + (codes < last ? 0 : a.jump);
      typename C::Unit units[PANELS];
      UNROLL for (int p = 0; p < PANELS; ++p) {
        units[p] = C::load(codes + p * a.panel);
        UNROLL for (int line = 0; line < C::BYTES; line += 64) __builtin_prefetch(ahead + p * a.panel + line);
      }
      auto quad = [&]<int Q>() __attribute__((always_inline)) {
        Bytes w[PANELS];
        UNROLL for (int p = 0; p < PANELS; ++p) w[p] = C::template quad<Q>(units[p]);
        UNROLL for (int m = 0; m < ROWS; ++m) {
          const Four x = broadcast_four(high + m * k + i + 4 * Q);
          UNROLL for (int p = 0; p < PANELS; ++p) highs[m][p] = dot(highs[m][p], w[p], x);
          if constexpr (WIDE) {
            const Four y = broadcast_four(low + m * k + i + 4 * Q);
            UNROLL for (int p = 0; p < PANELS; ++p) lows[m][p] = dot(lows[m][p], w[p], y);
          }
        }
      };
      quad.template operator()<0>();
      if constexpr (C::QUADS > 1) quad.template operator()<1>();
      if constexpr (C::QUADS > 2) quad.template operator()<2>();
      if constexpr (C::QUADS > 3) quad.template operator()<3>();
    }
    UNROLL for (int p = 0; p < PANELS; ++p) {
      const V16 scale = load(a.factors[p].scales + g * LANES), minimum = load(a.factors[p].minima + g * LANES);
      UNROLL for (int m = 0; m < ROWS; ++m) {
        const float sum = a.x.sums[(m0 + m) * groups + g];
        acc[m][p] = fold<WIDE>(acc[m][p], highs[m][p], lows[m][p], scale, minimum, sum);
      }
    }
  }
  alignas(64) float sums[ROWS * PANELS * LANES];
  UNROLL for (int m = 0; m < ROWS; ++m) {
    const V16 scale = set1(a.x.scales[m0 + m]);
    UNROLL for (int p = 0; p < PANELS; ++p) store(sums + (m * PANELS + p) * LANES, acc[m][p] * scale);
  }
  finish(sums, (int)(rows < ROWS ? rows : ROWS), PANELS, out, m0, n0);
}

// Tiles: as many sums as fit the registers beside what they are made of; one row has more weight streams instead.
#if defined(__AVX512BW__)
constexpr int int_rows_of_tile(bool wide) { return wide ? 4 : 8; }
constexpr int int_panels(int64_t rows, bool wide) {
  return rows == 1 ? 8 : rows <= (wide ? 2 : 4) ? 4 : 3;
}
#else
constexpr int int_rows_of_tile(bool) { return 2; }
constexpr int int_panels(int64_t rows, bool wide) { return rows > 1 && wide ? 1 : 2; }
#endif
constexpr int INT_PANELS = int_panels(1, true);

template <class C, bool WIDE, int ROWS, int PANELS = int_panels(ROWS, WIDE)>
static void int_rows(IntPlace a, const Out& out, int64_t m, int64_t rows, int64_t panels, int64_t n) {
  for (; panels >= PANELS; panels -= PANELS) {
    int_tile<C, WIDE, ROWS, PANELS>(a, out, m, rows, n);
    a.codes += PANELS * a.panel, a.factors += PANELS, n += PANELS * LANES;
  }
  if constexpr (PANELS > 1) {
    if (panels > 0) int_rows<C, WIDE, ROWS, (PANELS + 1) / 2>(a, out, m, rows, panels, n);
  }
}

template <class C, bool WIDE>
static void int_block(const IntPlace& a, const Out& out, int64_t m, int64_t end, int64_t panels, int64_t n) {
  constexpr int MOST = int_rows_of_tile(WIDE);
  while (m < end) {
    const int64_t left = end - m;
    if (left == 1) {
      int_rows<C, WIDE, 1>(a, out, m, 1, panels, n);
      m += 1;
    } else if (left == 2 || MOST == 2) {
      int_rows<C, WIDE, 2>(a, out, m, left, panels, n);
      m += 2;
    } else if (left <= 4 || MOST == 4) {
      int_rows<C, WIDE, MOST < 4 ? MOST : 4>(a, out, m, left, panels, n);
      m += 4;
    } else {
      int_rows<C, WIDE, MOST>(a, out, m, left, panels, n);
      m += MOST;
    }
  }
}

template <class C>
static int64_t codes_bytes(const Quantized& q) {
  return q.k / (4 * C::QUADS) * C::BYTES;
}

// Codes of a panel as bytes [k / 4][16][4]: panels of Codes8.
template <class C>
static void spread_codes(const Quantized& q, const uint8_t* codes, uint8_t* out) {
  for (int64_t i = 0; i < q.k; i += 4 * C::QUADS, codes += C::BYTES, out += 64 * C::QUADS) {
    const auto unit = C::load(codes);
    store(out, C::template quad<0>(unit));
    if constexpr (C::QUADS > 1) store(out + 64, C::template quad<1>(unit));
    if constexpr (C::QUADS > 2) store(out + 128, C::template quad<2>(unit));
    if constexpr (C::QUADS > 3) store(out + 192, C::template quad<3>(unit));
  }
}

// Factors of `count` panels from `first` on, in this thread's scratch memory.
static void task_factors(const Quantized& q, int64_t first, int64_t count, Factors* factors) {
  float* memory = (float*)kvern::scratch(4, 2 * count * q.groups * LANES * 4);
  for (int64_t p = 0; p < count; ++p) {
    float *scales = memory + 2 * p * q.groups * LANES, *minima = scales + q.groups * LANES;
    read_factors(q, first + p, scales, minima);
    factors[p] = {scales, minima};
  }
}

// From this many rows on, codes of 4 and 6 bits become bytes once a task instead of once a tile.
constexpr int64_t SPREAD_ROWS = 9;

template <class C, bool WIDE>
static void linear_int_with(const kvern::Linear& a, const Quantized& q, const Activations& x) {
  const int64_t panels = (a.n + LANES - 1) / LANES, panel = codes_bytes<C>(q);
  const int64_t width = panels_per_task(panels, int_panels(a.m, WIDE), a.threads);
  const int64_t groups = (panels + width - 1) / width, blocks = (a.m + ROW_BLOCK - 1) / ROW_BLOCK;
  const bool spread = C::BITS < 8 && a.m >= SPREAD_ROWS;
  const Out out = {a.y, a.n, a.y_type, a.bias, a.n, a.m};
  kvern::parallel(a.threads, groups * blocks, [&](int64_t task, int) {
    const int64_t first = task / blocks * width, count = first + width > panels ? panels - first : width;
    const int64_t m = task % blocks * ROW_BLOCK, end = m + ROW_BLOCK < a.m ? m + ROW_BLOCK : a.m;
    Factors factors[INT_PANELS];
    const uint8_t *codes = q.codes + first * panel, *coming = q.factors + (first + a.threads * width) * q.factor_bytes;
    for (int64_t i = 0; i < width * q.factor_bytes; i += 64) __builtin_prefetch(coming + i);
    task_factors(q, first, count, factors);
    if (!spread) {
      const IntPlace place = {q, x, codes, panel, factors, (a.threads * width - 1) * panel};
      return int_block<C, WIDE>(place, out, m, end, count, first * LANES);
    }
    const int64_t bytes = q.k * LANES;
    uint8_t* wide = (uint8_t*)kvern::scratch(6, width * bytes);
    for (int64_t p = 0; p < count; ++p) spread_codes<C>(q, codes + p * panel, wide + p * bytes);
    int_block<Codes8, WIDE>({q, x, wide, bytes, factors, 0}, out, m, end, count, first * LANES);
  });
}

template <class C>
static void linear_int_of(const kvern::Linear& a, const Quantized& q) {
  const Activations x = quantize_rows(a, q);
  if (x.low) return linear_int_with<C, true>(a, q, x);
  linear_int_with<C, false>(a, q, x);
}

// ---- weights as float32 ----

// One panel → [k][16]. Codes less a constant zero point first, so that there is one rounding everywhere.
template <class C>
static void dequantize_panel(const Quantized& q, int64_t panel, const Factors& f, float* out) {
  const uint8_t* codes = q.codes + panel * codes_bytes<C>(q);
  const bool zero_point = q.kind == kvern::FLOAT_ZERO || q.kind == kvern::HALF_ZERO || q.kind == kvern::SUPER_ZERO;
  const float zero = (float)q.zero;
  for (int64_t i = 0; i < q.k; codes += C::BYTES) {
    alignas(64) uint8_t bytes[C::QUADS][64];
    const auto unit = C::load(codes);
    store(bytes[0], C::template quad<0>(unit));
    if constexpr (C::QUADS > 1) store(bytes[1], C::template quad<1>(unit));
    if constexpr (C::QUADS > 2) store(bytes[2], C::template quad<2>(unit));
    if constexpr (C::QUADS > 3) store(bytes[3], C::template quad<3>(unit));
    for (int u = 0; u < C::QUADS; ++u) {
      for (int c = 0; c < 4; ++c, ++i) {
        const V16 scale = load(f.scales + i / q.group * LANES), minimum = load(f.minima + i / q.group * LANES);
        float t[LANES];
        for (int j = 0; j < LANES; ++j) t[j] = (float)bytes[u][4 * j + c] - (zero_point ? zero : 0.0f);
        store(out + i * LANES, zero_point ? load(t) * scale : fma(load(t), scale, minimum));
      }
    }
  }
}

static void dequantize(const Quantized& q, int64_t panel, float* out) {
  Factors f;
  task_factors(q, panel, 1, &f);
  if (q.bits == 4) return dequantize_panel<Codes4>(q, panel, f, out);
  if (q.bits == 6) return dequantize_panel<Codes6>(q, panel, f, out);
  dequantize_panel<Codes8>(q, panel, f, out);
}

// x in float32, in the order of the codes and padded with zeros.
static const float* ordered(const kvern::Linear& a, const Quantized& q) {
  float* x = (float*)kvern::scratch(0, a.m * q.k * 4);
  for (int64_t m = 0; m < a.m; ++m) {
    const float* from = (const float*)a.x + m * a.x_row;
    float* to = x + m * q.k;
    for (int64_t i = 0; i < a.k; ++i) to[i] = from[q.order ? q.order[i] : i];
    memset(to + a.k, 0, (q.k - a.k) * 4);
  }
  return x;
}

static void linear_dequantized(const kvern::Linear& a, const Quantized& q) {
  const float* x = ordered(a, q);
  const int64_t panels = (a.n + LANES - 1) / LANES;
  const Out out = {a.y, a.n, a.y_type, a.bias, a.n, a.m};
  kvern::parallel(a.threads, panels, [&](int64_t panel, int) {
    float* weights = (float*)kvern::scratch(6, q.k * LANES * 4);
    dequantize(q, panel, weights);
    for (int64_t m = 0; m < a.m; m += MAX_ROWS) {
      const int64_t rows = a.m - m < MAX_ROWS ? a.m - m : MAX_ROWS;
      find_tile<F32Step>(rows, 1)(x + m * q.k, q.k, weights, 0, q.k, out, m, panel * LANES);
    }
  });
}

static void linear_int(const kvern::Linear& a) {
  const Quantized& q = *(const Quantized*)a.weight;
  if (a.x_type == kvern::F32 && q.activation_bits == 16) return linear_dequantized(a, q);
  if (q.bits == 4) return linear_int_of<Codes4>(a, q);
  if (q.bits == 6) return linear_int_of<Codes6>(a, q);
  linear_int_of<Codes8>(a, q);
}

}  // namespace KVERN_ISA
