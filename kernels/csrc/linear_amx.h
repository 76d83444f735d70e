// bfloat16 linear layers on the processor's matrix tiles (AMX): 16 rows x 16 outputs x 32 along k at once.
//
// A panel is already a row of B tiles. One row or sixteen, a row's bits are the same: the unit works on each
// row of A by itself, in the order of k.
#pragma once

#include "linear_int.h"

namespace KVERN_ISA {

constexpr int64_t TILE_ROWS_AMX = 16, TILE_K = 32;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// GCC's tile intrinsics do not tell the compiler which memory they read: all that was written is written before.
INLINE void load_configuration(const TileConfig& c) {
  asm volatile("" : : "r"(&c) : "memory");
  _tile_loadconfig(&c);
}

// Tiles 0-3 sums, 4 and 5 rows of x, 6 and 7 weights. With one band of rows: sums 0-3, x in 4; with two
// bands of 16: the lower band sums in 2 and 3, its x in 5.
INLINE void configure(int upper, int lower) {
  TileConfig c;
  for (int t = 0; t < 8; ++t) {
    bool weights = t >= 6, below = lower > 0 && (t == 2 || t == 3 || t == 5);
    c.row_bytes[t] = 64;
    c.rows[t] = (uint8_t)(weights ? 16 : below ? lower : upper);
  }
  load_configuration(c);
}

struct AmxPlace {
  const bf16* x;
  int64_t x_row;
  const bf16* w;
  int64_t panel, k;
};

INLINE void prefetch_tile(const bf16* w) {
  UNROLL for (int i = 0; i < 16; ++i) __builtin_prefetch((const char*)w + 2048 + 64 * i);
}

// One band of up to 16 rows, PANELS in 1 … 4.
template <int PANELS>
static void band(const AmxPlace& a, float* sums) {
  const int64_t stride = a.x_row * 2;
  const bf16* w = a.w;
  _tile_zero(0);
  if constexpr (PANELS > 1) _tile_zero(1);
  if constexpr (PANELS > 2) _tile_zero(2);
  if constexpr (PANELS > 3) _tile_zero(3);
  for (int64_t i = 0; i < a.k; i += TILE_K, w += TILE_K * LANES) {
    _tile_loadd(4, a.x + i, stride);
    _tile_loadd(6, w, 64);
    prefetch_tile(w);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (PANELS > 1) {
      _tile_loadd(7, w + a.panel, 64);
      prefetch_tile(w + a.panel);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (PANELS > 2) {
      _tile_loadd(6, w + 2 * a.panel, 64);
      prefetch_tile(w + 2 * a.panel);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (PANELS > 3) {
      _tile_loadd(7, w + 3 * a.panel, 64);
      prefetch_tile(w + 3 * a.panel);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  constexpr int64_t row = PANELS * LANES * 4;
  _tile_stored(0, sums, row);
  if constexpr (PANELS > 1) _tile_stored(1, sums + LANES, row);
  if constexpr (PANELS > 2) _tile_stored(2, sums + 2 * LANES, row);
  if constexpr (PANELS > 3) _tile_stored(3, sums + 3 * LANES, row);
}

// Two bands of up to 16 rows and two panels over `k` more of the depth. Partial sums of 32 bits lie in `sums`
// between the calls, unrounded: the bits are those of one pass. A lower band of no rows is left out.
template <bool BOTH>
static void square(const AmxPlace& a, float* sums, bool first) {
  const int64_t stride = a.x_row * 2;
  const bf16 *w = a.w, *below = a.x + TILE_ROWS_AMX * a.x_row;
  constexpr int64_t row = 2 * LANES * 4;
  float* lower = sums + TILE_ROWS_AMX * 2 * LANES;
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, row);
    _tile_loadd(1, sums + LANES, row);
    if constexpr (BOTH) {
      _tile_loadd(2, lower, row);
      _tile_loadd(3, lower + LANES, row);
    }
  }
  for (int64_t i = 0; i < a.k; i += TILE_K, w += TILE_K * LANES) {
    _tile_loadd(6, w, 64);
    prefetch_tile(w);
    _tile_loadd(4, a.x + i, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + a.panel, 64);
    prefetch_tile(w + a.panel);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (BOTH) {
      _tile_loadd(5, below + i, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, row);
  _tile_stored(1, sums + LANES, row);
  if constexpr (BOTH) {
    _tile_stored(2, lower, row);
    _tile_stored(3, lower + LANES, row);
  }
}

// Up to 16 rows: four weight streams a thread.
static void linear_amx_few(const kvern::Linear& a, const bf16* x, int64_t x_row, const Out& out) {
  const int64_t k = (a.k + TILE_K - 1) / TILE_K * TILE_K, panel = k * LANES, panels = (a.n + LANES - 1) / LANES;
  const bf16* weight = (const bf16*)a.weight;
  kvern::parallel(a.threads, (panels + 3) / 4, [&](int64_t task, int) {
    alignas(64) float sums[TILE_ROWS_AMX * 4 * LANES];
    const int64_t first = task * 4, count = first + 4 > panels ? panels - first : 4;
    configure((int)a.m, 0);
    const AmxPlace place = {x, x_row, weight + first * panel, panel, k};
    if (count == 4) {
      band<4>(place, sums);
    } else if (count == 3) {
      band<3>(place, sums);
    } else if (count == 2) {
      band<2>(place, sums);
    } else {
      band<1>(place, sums);
    }
    finish(sums, (int)a.m, (int)count, out, 0, first * LANES);
    _tile_release();
  });
}

// Panels of a task that stay in the second-level cache while all rows pass by, and depth of a pass: 32 rows of x
// stay in the first-level cache while the task's panels pass by.
constexpr int64_t AMX_PANELS = 8, AMX_DEPTH = 512;

static int64_t amx_width(int64_t panels, int threads) {
  int64_t width = AMX_PANELS;
  while (width > 2 && panels < 3 * width * threads) width -= 2;
  return width;
}

static void linear_amx_many(const kvern::Linear& a, const bf16* x, int64_t x_row, const Out& out) {
  constexpr int64_t rows_of_block = 2 * TILE_ROWS_AMX;
  const int64_t k = (a.k + TILE_K - 1) / TILE_K * TILE_K, panel = k * LANES, panels = (a.n + LANES - 1) / LANES;
  const int64_t width = amx_width(panels, a.threads);
  const bf16* weight = (const bf16*)a.weight;
  kvern::parallel(a.threads, (panels + width - 1) / width, [&](int64_t task, int) {
    alignas(64) float sums[AMX_PANELS / 2][rows_of_block * 2 * LANES];
    const int64_t begin = task * width, end = begin + width < panels ? begin + width : panels;
    int64_t upper = 0, lower = 0;
    for (int64_t m = 0; m < a.m; m += rows_of_block) {
      const int64_t rows = a.m - m < rows_of_block ? a.m - m : rows_of_block;
      const int64_t now_upper = rows > TILE_ROWS_AMX ? TILE_ROWS_AMX : rows, now_lower = rows - now_upper;
      if (now_upper != upper || now_lower != lower) configure((int)now_upper, (int)now_lower);
      upper = now_upper, lower = now_lower;
      for (int64_t i = 0; i < k; i += AMX_DEPTH) {
        const int64_t depth = k - i < AMX_DEPTH ? k - i : AMX_DEPTH;
        for (int64_t p = begin; p < end; p += 2) {
          // The last panel of an odd number is its own neighbour.
          const AmxPlace place = {x + m * x_row + i, x_row, weight + p * panel + i * LANES, p + 1 < end ? panel : 0,
                                  depth};
          if (lower > 0) {
            square<true>(place, sums[(p - begin) / 2], i == 0);
          } else {
            square<false>(place, sums[(p - begin) / 2], i == 0);
          }
        }
      }
      for (int64_t p = begin; p < end; p += 2) {
        float* pair = sums[(p - begin) / 2];
        if (p + 1 == end) {
          for (int64_t r = 1; r < rows; ++r) memcpy(pair + r * LANES, pair + r * 2 * LANES, LANES * 4);
        }
        finish(pair, (int)rows, p + 1 < end ? 2 : 1, out, m, p * LANES);
      }
    }
    _tile_release();
  });
}

static void linear_amx(const kvern::Linear& a, const bf16* x, int64_t x_row) {
  const Out out = {a.y, a.n, a.y_type, a.bias, a.n, a.m};
  if (a.m > TILE_ROWS_AMX) return linear_amx_many(a, x, x_row, out);
  linear_amx_few(a, x, x_row, out);
}

}  // namespace KVERN_ISA
