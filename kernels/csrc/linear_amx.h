// bfloat16 linear layers on the processor's matrix tiles (AMX): 16 rows x 16 outputs x 32 along k at once.
//
// A panel is already a row of B tiles. One row or sixteen, a row's bits are the same: the unit works on each
// row of A by itself, in the order of k.
#pragma once

#include "linear.h"

namespace KVERN_ISA {

constexpr int64_t TILE_ROWS_AMX = 16, TILE_K = 32;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0-3 sums, 4 and 5 rows of x, 6 and 7 weights. With one band of rows: sums 0-3, x in 4; with two
// bands of 16: the lower band sums in 2 and 3, its x in 5.
INLINE void configure(int upper, int lower) {
  TileConfig c;
  for (int t = 0; t < 8; ++t) {
    bool weights = t >= 6, below = lower > 0 && (t == 2 || t == 3 || t == 5);
    c.row_bytes[t] = 64;
    c.rows[t] = (uint8_t)(weights ? 16 : below ? lower : upper);
  }
  _tile_loadconfig(&c);
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

// Two bands of rows and two panels.
static void square(const AmxPlace& a, float* sums) {
  const int64_t stride = a.x_row * 2;
  const bf16 *w = a.w, *below = a.x + TILE_ROWS_AMX * a.x_row;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < a.k; i += TILE_K, w += TILE_K * LANES) {
    _tile_loadd(6, w, 64);
    _tile_loadd(4, a.x + i, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + a.panel, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, below + i, stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  constexpr int64_t row = 2 * LANES * 4;
  float* lower = sums + TILE_ROWS_AMX * 2 * LANES;
  _tile_stored(0, sums, row);
  _tile_stored(1, sums + LANES, row);
  _tile_stored(2, lower, row);
  _tile_stored(3, lower + LANES, row);
}

static void linear_amx(const kvern::Linear& a, const bf16* x, int64_t x_row) {
  constexpr int64_t block = 256;  // rows per task
  const int64_t k = (a.k + TILE_K - 1) / TILE_K * TILE_K, panel = k * LANES, panels = (a.n + LANES - 1) / LANES;
  const bool many = a.m > TILE_ROWS_AMX;
  const int64_t width = many ? 2 : 4, groups = (panels + width - 1) / width, blocks = (a.m + block - 1) / block;
  const bf16* weight = (const bf16*)a.weight;
  const Out out = {a.y, a.n, a.y_type, a.bias, a.n, a.m};
  kvern::parallel(a.threads, groups * blocks, [&](int64_t task, int) {
    alignas(64) float sums[2 * TILE_ROWS_AMX * 2 * LANES];
    int64_t upper = 0, lower = 0;
    int64_t first = task / blocks * width, count = first + width > panels ? panels - first : width;
    int64_t begin = task % blocks * block, end = begin + block < a.m ? begin + block : a.m;
    for (int64_t m = begin; m < end;) {
      int64_t rows = end - m > TILE_ROWS_AMX && count == 2 ? 2 * TILE_ROWS_AMX : TILE_ROWS_AMX;
      rows = end - m < rows ? end - m : rows;
      int64_t now_upper = rows > TILE_ROWS_AMX ? TILE_ROWS_AMX : rows, now_lower = rows - now_upper;
      if (now_upper != upper || now_lower != lower) {
        configure((int)now_upper, (int)now_lower);
        upper = now_upper, lower = now_lower;
      }
      AmxPlace place = {x + m * x_row, x_row, weight + first * panel, panel, k};
      if (lower > 0) {
        square(place, sums);
      } else if (count == 4) {
        band<4>(place, sums);
      } else if (count == 3) {
        band<3>(place, sums);
      } else if (count == 2) {
        band<2>(place, sums);
      } else {
        band<1>(place, sums);
      }
      finish(sums, (int)rows, (int)count, out, m, first * LANES);
      m += rows;
    }
    _tile_release();
  });
}

}  // namespace KVERN_ISA
