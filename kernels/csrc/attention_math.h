// Products of query rows with a part of the context, in two arithmetics: float32, and pairs of bfloat16.
//
// Operands are 32-bit words: one float, or two bfloat16 that follow each other along the sum. A word of a row
// is broadcast and meets a vector of 16 words, one for each key (scores) or column (values). The order of each
// element's sum is fixed, whatever rows share a call.
#pragma once

#include "kv_types.h"

namespace KVERN_ISA {

constexpr int64_t PART = 512;              // keys of one softmax
constexpr int64_t GROUPS = PART / LANES;   // groups of 16 keys
constexpr int64_t SCORE_ROW = PART + 16;   // floats from row to row: not a power of two, which caches dislike
// Registers of sums: rows x groups of keys (or of columns).
constexpr int WIDE = ACCUMULATORS >= 24 ? 4 : ACCUMULATORS >= 6 ? 2 : 1;
constexpr int TILE_ROWS = ACCUMULATORS / WIDE;

INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// A part of the context: of group g, word d of its 16 keys at keys[g] + d * key_row, and word row j of its values
// at values[g] + j * value_row. E: how operands lie, as words or as the cache's elements, which M::words pairs. Elements
// come from memory: while those of a group are used, as many from `after_keys` and `after_values` on are asked for, a
// line at a time between the products, which a burst of prefetches would hold up.
template <class E>
struct Context {
  const E *keys[GROUPS], *values[GROUPS];
  int64_t key_row, value_row;
  const E *after_keys[GROUPS], *after_values[GROUPS];
};

// Calls f.template operator()<N>() for the run-time n in 1 … MAX.
template <int MAX, class F>
INLINE void with_count(int64_t n, F f) {
  if constexpr (MAX > 1) {
    if (n < MAX) return with_count<MAX - 1>(n, f);
  }
  f.template operator()<MAX>();
}

struct F32Math {
  using Word = float;
  static constexpr int WIDTH = 1, DEPTH_MULTIPLE = 1, BAND = 24, EXP_DEGREE = 6;
  static constexpr int64_t FEW_ROWS = TILE_ROWS;  // up to so many read the cache's elements where they lie
  static constexpr int64_t KEY_MULTIPLE = LANES;  // keys that a call takes at a time
  struct Lanes {
    V16 v;
  };
  template <class E>
  INLINE Lanes words(const E* p, int64_t) { return {load(p)}; }
  INLINE V16 dot(Word row, Lanes b, V16 c) { return fma(set1(row), b.v, c); }
  INLINE void put_weights(float* weights, int64_t key, V16 w) { store(weights + key, w); }
  INLINE void begin(int64_t) {}  // before work on this many rows
  INLINE void done() {}
};

#if defined(__AVX512BF16__)
// 16 words (a[i], b[i]) of bfloat16.
INLINE __m512i pair_rows(const bf16* a, const bf16* b) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  __m512i both = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)a));
  both = _mm512_inserti64x4(both, _mm256_loadu_si256((const __m256i*)b), 1);
  return _mm512_permutexvar_epi16(order, both);
}
template <class T>
  requires NARROW<T>
INLINE __m512i pair_rows(const T* a, const T* b) {  // the upper halves of floats, which hold all of them
  const __m512i x = _mm512_castps_si512(load(a).v), y = _mm512_castps_si512(load(b).v);
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
  return _mm512_ternarylogic_epi32(_mm512_srli_epi32(x, 16), y, upper, 0xf8);
}

struct BF16Math {
  using Word = uint32_t;
  static constexpr int WIDTH = 2, DEPTH_MULTIPLE = 1, BAND = 24, EXP_DEGREE = 4;
  static constexpr int64_t FEW_ROWS = TILE_ROWS;
  static constexpr int64_t KEY_MULTIPLE = LANES;
  struct Lanes {
    __m512i v;
  };
  INLINE Lanes words(const Word* p, int64_t) { return {_mm512_loadu_si512(p)}; }
  template <class E>
  INLINE Lanes words(const E* p, int64_t row) { return {pair_rows(p, p + row)}; }
  INLINE V16 dot(Word row, Lanes b, V16 c) {
    return {_mm512_dpbf16_ps(c.v, (__m512bh)_mm512_set1_epi32((int)row), (__m512bh)b.v)};
  }
  INLINE void put_weights(Word* weights, int64_t key, V16 w) {
    _mm256_storeu_si256((__m256i*)((uint16_t*)weights + key), (__m256i)_mm512_cvtneps_pbh(w.v));
  }
  INLINE void begin(int64_t) {}
  INLINE void done() {}
};
#endif

// Elements of E that make a word of M's.
template <class M, class E>
constexpr int64_t PER_WORD = __is_same(E, typename M::Word) ? 1 : M::WIDTH;
template <class M, class E>
constexpr bool FROM_MEMORY = !__is_same(E, typename M::Word);

template <class M, int ROWS, int GROUPS_AT_ONCE, class E>
static void score_block(const typename M::Word* q, int64_t depth, const Context<E>& c, int64_t group, float* scores) {
  V16 acc[ROWS][GROUPS_AT_ONCE];
  const E *keys[GROUPS_AT_ONCE], *after[GROUPS_AT_ONCE];
  UNROLL for (int g = 0; g < GROUPS_AT_ONCE; ++g) keys[g] = c.keys[group + g];
  if constexpr (FROM_MEMORY<M, E>) {
    UNROLL for (int g = 0; g < GROUPS_AT_ONCE; ++g) after[g] = c.after_keys[group + g];
  }
  UNROLL for (int r = 0; r < ROWS; ++r) {
    UNROLL for (int g = 0; g < GROUPS_AT_ONCE; ++g) acc[r][g] = zero();
  }
  for (int64_t d = 0; d < depth; ++d) {
    typename M::Lanes b[GROUPS_AT_ONCE];
    UNROLL for (int g = 0; g < GROUPS_AT_ONCE; ++g) {
      b[g] = M::words(keys[g] + d * PER_WORD<M, E> * c.key_row, c.key_row);
      if constexpr (FROM_MEMORY<M, E>) __builtin_prefetch(after[g] + d * PER_WORD<M, E> * LANES, 0, 2);
    }
    UNROLL for (int r = 0; r < ROWS; ++r) {
      UNROLL for (int g = 0; g < GROUPS_AT_ONCE; ++g) acc[r][g] = M::dot(q[r * depth + d], b[g], acc[r][g]);
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r) {
    UNROLL for (int g = 0; g < GROUPS_AT_ONCE; ++g) {
      store(scores + r * SCORE_ROW + (group + g) * LANES, acc[r][g]);
    }
  }
}

// scores[rows][SCORE_ROW] of the keys of groups [first, last); q is [rows][depth] words.
template <class M, class E>
static void score(const typename M::Word* q, int64_t rows, int64_t depth, const Context<E>& c, int64_t first,
                  int64_t last, float* scores) {
  for (int64_t g = first; g < last; g += WIDE) {
    with_count<WIDE>(last - g, [&]<int COUNT>() {
      for (int64_t r = 0; r < rows; r += TILE_ROWS) {
        with_count<TILE_ROWS>(rows - r, [&]<int ROWS>() {
          score_block<M, ROWS, COUNT>(q + r * depth, depth, c, g, scores + r * SCORE_ROW);
        });
      }
    });
  }
}

template <class M, int ROWS, int COLUMNS, class E>
static void mix_block(const typename M::Word* weights, const Context<E>& c, int64_t first, int64_t last, int64_t column,
                      float* out, int64_t out_row) {
  constexpr int64_t row_words = SCORE_ROW / M::WIDTH, group_words = LANES / M::WIDTH;
  V16 acc[ROWS][COLUMNS];
  UNROLL for (int r = 0; r < ROWS; ++r) {
    UNROLL for (int i = 0; i < COLUMNS; ++i) acc[r][i] = load(out + r * out_row + column + i * LANES);
  }
  const int64_t from = first / M::WIDTH, to = (last + M::WIDTH - 1) / M::WIDTH;  // word rows
  for (int64_t j = from; j < to;) {
    const int64_t g = j / group_words, end = (g + 1) * group_words < to ? (g + 1) * group_words : to;
    const int64_t step = PER_WORD<M, E> * c.value_row;
    const E* row = c.values[g] + (j - g * group_words) * step + column;
    const E* after = nullptr;
    if constexpr (FROM_MEMORY<M, E>) after = c.after_values[g] + (j - g * group_words) * step + column;
    for (; j < end; ++j, row += step) {
      typename M::Lanes b[COLUMNS];
      UNROLL for (int i = 0; i < COLUMNS; ++i) b[i] = M::words(row + i * LANES, c.value_row);
      if constexpr (FROM_MEMORY<M, E>) {
        UNROLL for (int i = 0; i < COLUMNS * LANES; i += 64 / (int)sizeof(E)) {
          __builtin_prefetch(after + i, 0, 2);
          if constexpr (PER_WORD<M, E> > 1) __builtin_prefetch(after + i + c.value_row, 0, 2);
        }
        after += step;
      }
      UNROLL for (int r = 0; r < ROWS; ++r) {
        UNROLL for (int i = 0; i < COLUMNS; ++i) acc[r][i] = M::dot(weights[r * row_words + j], b[i], acc[r][i]);
      }
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r) {
    UNROLL for (int i = 0; i < COLUMNS; ++i) store(out + r * out_row + column + i * LANES, acc[r][i]);
  }
}

// out[rows][width] += weights[rows][keys first … last - 1] x values. A row's sum goes through the keys in order.
template <class M, class E>
static void mix(const typename M::Word* weights, int64_t rows, const Context<E>& c, int64_t first, int64_t last,
                float* out, int64_t width) {
  constexpr int64_t row_words = SCORE_ROW / M::WIDTH;
  for (int64_t column = 0; column < width; column += WIDE * LANES) {
    with_count<WIDE>((width - column) / LANES, [&]<int COLUMNS>() {
      for (int64_t r = 0; r < rows; r += TILE_ROWS) {
        with_count<TILE_ROWS>(rows - r, [&]<int ROWS>() {
          mix_block<M, ROWS, COLUMNS>(weights + r * row_words, c, first, last, column, out + r * width, width);
        });
      }
    });
  }
}

}  // namespace KVERN_ISA
