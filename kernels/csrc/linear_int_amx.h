// Integer weights on the processor's matrix tiles (AMX): 16 rows x 16 outputs x 64 along k at once. The sums are
// those of linear_int.h, exact, and are scaled and added group by group just the same.
#pragma once

#include "linear_amx.h"

namespace KVERN_ISA {

// Tiles 0-3 sums, 4 and 5 bytes of x (high and low, or two bands of rows), 6 and 7 codes of two panels.
INLINE void configure_bytes(int depth) {
  TileConfig c;
  for (int t = 0; t < 8; ++t) {
    c.row_bytes[t] = (uint16_t)(t == 4 || t == 5 ? depth : 64);
    c.rows[t] = (uint8_t)(t >= 6 ? depth / 4 : 16);
  }
  load_configuration(c);
}

// Sums over one group: first and second bytes of x (16 rows each) with two panels → sums[4][16][16].
INLINE void group_sums(const int8_t* first, const int8_t* second, int64_t x_row, const uint8_t* codes, int64_t panel,
                       int64_t group, int64_t depth, bool both, int32_t* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < group; i += depth) {
    _tile_loadd(6, codes + i * LANES, 64);
    _tile_loadd(4, first + i, x_row);
    _tile_dpbsud(0, 4, 6);
    _tile_loadd(7, codes + panel + i * LANES, 64);
    _tile_dpbsud(1, 4, 7);
    if (both) {
      _tile_loadd(5, second + i, x_row);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  if (both) {
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
  }
}

template <class C, bool WIDE>
static void int_amx_task(const kvern::Linear& a, const Quantized& q, const Activations& x, int64_t begin, int64_t end) {
  constexpr int64_t rows_of_block = WIDE ? 16 : 32;
  const int64_t panel = q.k * LANES, depth = q.group % 64 == 0 ? 64 : 32;
  const Out out = {a.y, a.n, a.y_type, a.bias, a.n, a.m};
  Factors factors[AMX_PANELS];
  task_factors(q, begin, end - begin, factors);
  const uint8_t* codes = q.codes + begin * codes_bytes<C>(q);
  if constexpr (C::BYTES != 64 || C::QUADS != 1) {
    uint8_t* bytes = (uint8_t*)kvern::scratch(6, AMX_PANELS * panel);
    for (int64_t p = 0; p < end - begin; ++p) spread_codes<C>(q, codes + p * codes_bytes<C>(q), bytes + p * panel);
    codes = bytes;
  }
  configure_bytes((int)depth);
  alignas(64) int32_t sums[4 * 256];
  alignas(64) float acc[rows_of_block * 2 * LANES];
  for (int64_t m = 0; m < a.m; m += rows_of_block) {
    const int64_t rows = a.m - m < rows_of_block ? a.m - m : rows_of_block;
    const bool both = WIDE || rows > 16;
    const int8_t *first = x.high + m * q.k, *second = WIDE ? x.low + m * q.k : first + 16 * q.k;
    for (int64_t p = begin; p < end; p += 2) {
      const int64_t count = p + 1 < end ? 2 : 1;
      const Factors* f = factors + (p - begin);
      memset(acc, 0, sizeof acc);
      for (int64_t g = 0; g < q.groups; ++g) {
        const int64_t at = g * q.group;
        group_sums(first + at, second + at, q.k, codes + (p - begin) * panel + at * LANES, count == 2 ? panel : 0,
                   q.group, depth, both, sums);
        for (int64_t c = 0; c < count; ++c) {
          const V16 scale = load(f[c].scales + g * LANES), minimum = load(f[c].minima + g * LANES);
          for (int64_t r = 0; r < rows; ++r) {
            const int32_t* high = sums + (WIDE ? c : r / 16 * 2 + c) * 256 + r % 16 * LANES;
            float* to = acc + (r * count + c) * LANES;
            const Ints low = WIDE ? load_ints(high + 512) : no_ints();
            store(to, fold<WIDE>(load(to), load_ints(high), low, scale, minimum, x.sums[(m + r) * q.groups + g]));
          }
        }
      }
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < count; ++c) {
          float* to = acc + (r * count + c) * LANES;
          store(to, load(to) * set1(x.scales[m + r]));
        }
      }
      finish(acc, (int)rows, (int)count, out, m, p * LANES);
    }
  }
  _tile_release();
}

template <class C>
static void linear_int_amx(const kvern::Linear& a, const Quantized& q) {
  const Activations x = quantize_rows(a, q);
  const int64_t panels = (a.n + LANES - 1) / LANES, width = amx_width(panels, a.threads);
  kvern::parallel(a.threads, (panels + width - 1) / width, [&](int64_t task, int) {
    const int64_t begin = task * width, end = begin + width < panels ? begin + width : panels;
    if (x.low) {
      int_amx_task<C, true>(a, q, x, begin, end);
    } else {
      int_amx_task<C, false>(a, q, x, begin, end);
    }
  });
}

// From this many rows on tiles are faster than byte products in vectors; short groups leave them half empty.
static bool amx_pays(const kvern::Linear& a, const Quantized& q) {
  const bool integers = q.activation_bits == 8 || a.x_type != kvern::F32;
  return integers && q.group % 32 == 0 && a.m >= (q.group >= 64 ? 6 : 12);
}

static bool linear_int_amx(const kvern::Linear& a) {
  const Quantized& q = *(const Quantized*)a.weight;
  if (!amx_pays(a, q)) return false;
  if (q.bits == 4) {
    linear_int_amx<Codes4>(a, q);
  } else if (q.bits == 6) {
    linear_int_amx<Codes6>(a, q);
  } else {
    linear_int_amx<Codes8>(a, q);
  }
  return true;
}

}  // namespace KVERN_ISA
