// The products of attention_math.h on the processor's matrix tiles: 16 rows x 16 keys x 32 components at once.
// The unit works on each row by itself, so a row's bits do not depend on how many there are.
#pragma once

#include "attention_math.h"
#include "linear_amx.h"

namespace KVERN_ISA {

struct AmxMath : BF16Math {
  static constexpr int DEPTH_MULTIPLE = 16, BAND = 32;  // words; rows
  static constexpr int64_t FEW_ROWS = 0;
  static constexpr int64_t KEY_MULTIPLE = 2 * LANES;
  // Waits for all that is under way, so it is called when the number of rows changes, and no oftener.
  INLINE void begin(int64_t rows) {
    configure((int)least(rows, TILE_ROWS_AMX), (int)most(rows - TILE_ROWS_AMX, 0));
  }
  INLINE void done() { _tile_release(); }
};

// Up to 32 rows x 32 outputs, added to what is there with `onto`: a is rows of words, b and b2 rows of 16 words.
INLINE void tile_square(const uint32_t* a, int64_t a_row, bool lower, const uint32_t* b, const uint32_t* b2,
                        int64_t b_row, int64_t b_step, int64_t steps, float* out, int64_t out_row, bool onto) {
  float* out_below = out + TILE_ROWS_AMX * out_row;
  if (onto) {
    _tile_loadd(0, out, out_row * 4);
    _tile_loadd(1, out + LANES, out_row * 4);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  if (lower) {
    if (onto) {
      _tile_loadd(2, out_below, out_row * 4);
      _tile_loadd(3, out_below + LANES, out_row * 4);
    } else {
      _tile_zero(2);
      _tile_zero(3);
    }
    const uint32_t* below = a + TILE_ROWS_AMX * a_row;
    for (int64_t i = 0; i < steps; ++i) {
      _tile_loadd(6, b + i * b_step, b_row * 4);
      _tile_loadd(4, a + i * LANES, a_row * 4);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b2 + i * b_step, b_row * 4);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, below + i * LANES, a_row * 4);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(2, out_below, out_row * 4);
    _tile_stored(3, out_below + LANES, out_row * 4);
  } else {
    for (int64_t i = 0; i < steps; ++i) {
      _tile_loadd(6, b + i * b_step, b_row * 4);
      _tile_loadd(4, a + i * LANES, a_row * 4);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b2 + i * b_step, b_row * 4);
      _tile_dpbf16ps(1, 4, 7);
    }
  }
  _tile_stored(0, out, out_row * 4);
  _tile_stored(1, out + LANES, out_row * 4);
}

template <>
void score<AmxMath, uint32_t>(const uint32_t* q, int64_t rows, int64_t depth, const Context<uint32_t>& c, int64_t first,
                              int64_t last, float* scores) {
  for (int64_t g = first; g < last; g += 2) {
    tile_square(q, depth, rows > TILE_ROWS_AMX, c.keys[g], c.keys[g + 1], LANES, TILE_ROWS_AMX * LANES, depth / LANES,
                scores + g * LANES, SCORE_ROW, false);
  }
}

// The groups' values lie one behind the other, and width has room for 32 columns.
template <>
void mix<AmxMath, uint32_t>(const uint32_t* weights, int64_t rows, const Context<uint32_t>& c, int64_t first,
                            int64_t last, float* out, int64_t width) {
  const uint32_t* values = c.values[first / LANES];
  for (int64_t column = 0; column < width; column += 2 * LANES) {
    tile_square(weights + first / 2, SCORE_ROW / 2, rows > TILE_ROWS_AMX, values + column, values + column + LANES,
                c.value_row, TILE_ROWS_AMX * c.value_row, (last - first) / TILE_K, out + column, width, true);
  }
}

}  // namespace KVERN_ISA
