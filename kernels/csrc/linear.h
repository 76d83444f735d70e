// Linear layers: outer products of rows of x with panels of 16 outputs.
//
// Every output element has a lane of its own and adds its products in the order of k, whatever the
// number of rows and however they are tiled: a row's bits don't depend on its neighbours. A tile is
// ROWS x PANELS accumulators in registers over all of k. At few rows it reads as many weight streams as
// it has panels, which is what a core needs to reach its share of the memory bandwidth; at many rows
// the panels stay in the second-level cache while the rows pass by.
#pragma once

#include "abi.h"
#include "simd.h"

namespace KVERN_ISA {

constexpr int64_t PREFETCH_BYTES = 1024;
constexpr int MAX_ROWS = ACCUMULATORS >= 24 ? 8 : ACCUMULATORS >= 6 ? 6 : 3;
constexpr int MAX_PANELS = ACCUMULATORS >= 24 ? 8 : ACCUMULATORS >= 6 ? 4 : 2;
constexpr int64_t K_MULTIPLE = 32;  // bfloat16 panels are padded along k to this: a matrix tile's depth
constexpr int64_t ROW_BLOCK = 32 * MAX_ROWS;

// How a kind of weights multiplies: a panel is read K weights of 16 outputs at a time, which meet a broadcast of x.

struct F32Step {
  using W = float;
  using X = float;
  static constexpr int K = 1;
  using Weights = V16;
  using Broadcast = V16;
  INLINE Weights weights(const W* p) { return load(p); }
  INLINE Broadcast broadcast(const X* x) { return set1(x[0]); }
  INLINE V16 multiply(V16 acc, const Weights& w, const Broadcast& x) { return fma(x, w, acc); }
};

struct BF16Step {  // bfloat16 weights widened, float x
  using W = bf16;
  using X = float;
  static constexpr int K = 2;
  struct Pair {
    V16 first, second;
  };
  using Weights = Pair;
  using Broadcast = Pair;
  INLINE Weights weights(const W* p) {
    Pair w;
    load_pairs(p, w.first, w.second);
    return w;
  }
  INLINE Broadcast broadcast(const X* x) { return {set1(x[0]), set1(x[1])}; }
  INLINE V16 multiply(V16 acc, const Weights& w, const Broadcast& x) {
    return fma(x.second, w.second, fma(x.first, w.first, acc));
  }
};

#if defined(__AVX512BF16__)
struct BF16Dot {  // bfloat16 weights and x, the processor's pair product
  using W = bf16;
  using X = bf16;
  static constexpr int K = 2;
  using Weights = __m512i;
  using Broadcast = int32_t;
  INLINE Weights weights(const W* p) { return _mm512_loadu_si512(p); }
  INLINE Broadcast broadcast(const X* x) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return pair;
  }
  INLINE V16 multiply(V16 acc, const Weights& w, Broadcast x) {
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)w, (__m512bh)_mm512_set1_epi32(x))};
  }
};
#endif

// The sums are over a part of k only: scaled, they are added to `totals`, which after the last part are the result.
struct Part {
  const float* scales;  // [panel][16], the panels `scale_panel` apart
  int64_t scale_panel;
  float* totals;  // as the sums lie
  bool first, last;
};

struct Out {
  void* y;
  int64_t row;
  kvern::Type type;
  const float* bias;
  int64_t n, rows;
  const Part* part = nullptr;
};

static void add_part(const float* sums, int rows, int panels, const Part& part) {
  for (int m = 0; m < rows; ++m) {
    for (int p = 0; p < panels; ++p) {
      const int at = (m * panels + p) * LANES;
      const V16 sum = load(sums + at), scale = load(part.scales + p * part.scale_panel);
      store(part.totals + at, part.first ? sum * scale : fma(sum, scale, load(part.totals + at)));
    }
  }
}

// Bias and conversion of a finished tile; one function for all tiles keeps the library small.
template <class T>
static void finish_as(const float* sums, int rows, int panels, const Out& out, int64_t m0, int64_t n0) {
  for (int m = 0; m < rows; ++m) {
    T* y = (T*)out.y + (m0 + m) * out.row;
    for (int p = 0; p < panels; ++p) {
      int64_t n = n0 + p * LANES;
      V16 value = load(sums + (m * panels + p) * LANES);
      if (out.bias) value = value + load(out.bias + n);
      if (out.n - n >= LANES) {
        store(y + n, value);
      } else {
        store_some(y + n, value, (int)(out.n - n));
      }
    }
  }
}
static __attribute__((noinline)) void finish(const float* sums, int rows, int panels, const Out& out, int64_t m0,
                                             int64_t n0) {
  if (out.part) {
    add_part(sums, rows, panels, *out.part);
    if (!out.part->last) return;
    sums = out.part->totals;
  }
  switch (out.type) {
    case kvern::F32: return finish_as<float>(sums, rows, panels, out, m0, n0);
    case kvern::BF16: return finish_as<bf16>(sums, rows, panels, out, m0, n0);
    case kvern::F16: return finish_as<f16>(sums, rows, panels, out, m0, n0);
  }
}

template <class Step, int ROWS, int PANELS>
static void tile(const typename Step::X* x, int64_t x_row, const typename Step::W* w, int64_t panel, int64_t k,
                 const Out& out, int64_t m0, int64_t n0) {
  V16 acc[ROWS][PANELS];
  UNROLL for (int m = 0; m < ROWS; ++m) {
    UNROLL for (int p = 0; p < PANELS; ++p) acc[m][p] = zero();
  }
  for (int64_t i = 0; i < k; i += Step::K, w += Step::K * LANES) {
    typename Step::Weights weights[PANELS];
    UNROLL for (int p = 0; p < PANELS; ++p) {
      weights[p] = Step::weights(w + p * panel);
      __builtin_prefetch((const char*)(w + p * panel) + PREFETCH_BYTES);
    }
    UNROLL for (int m = 0; m < ROWS; ++m) {
      auto b = Step::broadcast(x + m * x_row + i);
      UNROLL for (int p = 0; p < PANELS; ++p) acc[m][p] = Step::multiply(acc[m][p], weights[p], b);
    }
  }
  alignas(64) float sums[ROWS * PANELS * LANES];
  UNROLL for (int m = 0; m < ROWS; ++m) {
    UNROLL for (int p = 0; p < PANELS; ++p) store(sums + (m * PANELS + p) * LANES, acc[m][p]);
  }
  finish(sums, ROWS, PANELS, out, m0, n0);
}

template <class Step>
using Tile = void (*)(const typename Step::X*, int64_t, const typename Step::W*, int64_t, int64_t, const Out&, int64_t,
                      int64_t);

// Panels that fit beside `rows` rows.
constexpr int widest(int rows) {
  int panels = ACCUMULATORS / rows;
  return panels < 1 ? 1 : panels > MAX_PANELS ? MAX_PANELS : panels;
}

template <class Step, int ROWS, int PANELS>
constexpr Tile<Step> tile_or_null() {
  if constexpr (ROWS <= MAX_ROWS && PANELS <= widest(ROWS)) {
    return tile<Step, ROWS, PANELS>;
  } else {
    return nullptr;
  }
}
template <class Step, int ROWS>
struct TileRow {
  Tile<Step> at[8] = {tile_or_null<Step, ROWS, 1>(), tile_or_null<Step, ROWS, 2>(), tile_or_null<Step, ROWS, 3>(),
                      tile_or_null<Step, ROWS, 4>(), tile_or_null<Step, ROWS, 5>(), tile_or_null<Step, ROWS, 6>(),
                      tile_or_null<Step, ROWS, 7>(), tile_or_null<Step, ROWS, 8>()};
};
template <class Step>
INLINE Tile<Step> find_tile(int64_t rows, int64_t panels) {
  static constexpr TileRow<Step, 1> r1;
  static constexpr TileRow<Step, 2> r2;
  static constexpr TileRow<Step, 3> r3;
  static constexpr TileRow<Step, 4> r4;
  static constexpr TileRow<Step, 5> r5;
  static constexpr TileRow<Step, 6> r6;
  static constexpr TileRow<Step, 7> r7;
  static constexpr TileRow<Step, 8> r8;
  const Tile<Step>* const rows_of[] = {r1.at, r2.at, r3.at, r4.at, r5.at, r6.at, r7.at, r8.at};
  return rows_of[rows - 1][panels - 1];
}

// Panels per task: the widest that keeps every thread busy to the end.
static int64_t panels_per_task(int64_t panels, int64_t widest, int threads) {
  int64_t best = 1, best_cost = INT64_MAX;
  for (int64_t width = widest; width >= 1; --width) {
    int64_t tasks = (panels + width - 1) / width;
    int64_t cost = (tasks + threads - 1) / threads * (2 * width + 1);
    if (cost < best_cost) best = width, best_cost = cost;
  }
  return best;
}

// Tasks: `width` panels and a block of rows each, the rows in tiles of up to `rows`.
struct Tiling {
  int64_t m, panels, rows, width, blocks;

  int64_t tasks() const { return (panels + width - 1) / width * blocks; }
  int64_t first(int64_t task) const { return task / blocks * width; }
  int64_t count(int64_t task) const { return first(task) + width > panels ? panels - first(task) : width; }
  int64_t begin(int64_t task) const { return task % blocks * ROW_BLOCK; }
  int64_t end(int64_t task) const { return begin(task) + ROW_BLOCK < m ? begin(task) + ROW_BLOCK : m; }
};

static Tiling tiling(const kvern::Linear& a) {
  const int64_t panels = (a.n + LANES - 1) / LANES, blocks = (a.m + ROW_BLOCK - 1) / ROW_BLOCK;
  const int64_t tiles_of_block = (a.m < ROW_BLOCK ? a.m + MAX_ROWS - 1 : ROW_BLOCK) / MAX_ROWS;
  const int64_t rows = a.m < ROW_BLOCK ? (a.m + tiles_of_block - 1) / tiles_of_block : MAX_ROWS;
  return {a.m, panels, rows, panels_per_task(panels, widest((int)rows), a.threads), blocks};
}

template <class Step>
static void linear_with(const kvern::Linear& a, const typename Step::X* x, int64_t x_row, int64_t k) {
  const int64_t panel = k * LANES;
  const Tiling t = tiling(a);
  const typename Step::W* weight = (const typename Step::W*)a.weight;
  const Out out = {a.y, a.n, a.y_type, a.bias, a.n, a.m};
  kvern::parallel(a.threads, t.tasks(), [&](int64_t task, int) {
    const int64_t first = t.first(task), count = t.count(task), end = t.end(task);
    for (int64_t m = t.begin(task); m < end; m += t.rows) {
      const int64_t rows = end - m < t.rows ? end - m : t.rows;
      find_tile<Step>(rows, count)(x + m * x_row, x_row, weight + first * panel, panel, k, out, m, first * LANES);
    }
  });
}

template <class From, class To>
static void convert_rows(const From* from, int64_t from_row, To* to, int64_t to_row, int64_t rows, int64_t k) {
  for (int64_t m = 0; m < rows; ++m) {
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) store(to + m * to_row + i, load(from + m * from_row + i));
    if (i < k) store_some(to + m * to_row + i, load_some(from + m * from_row + i, (int)(k - i)), (int)(k - i));
    for (i = k; i < to_row; ++i) memset(to + m * to_row + i, 0, sizeof(To));
  }
}

template <class X>
static const X* converted(const kvern::Linear& a, int64_t padded) {
  X* x = (X*)kvern::scratch(0, a.m * padded * (int64_t)sizeof(X));
  switch (a.x_type) {
    case kvern::F32: convert_rows((const float*)a.x, a.x_row, x, padded, a.m, a.k); break;
    case kvern::BF16: convert_rows((const bf16*)a.x, a.x_row, x, padded, a.m, a.k); break;
    case kvern::F16: convert_rows((const f16*)a.x, a.x_row, x, padded, a.m, a.k); break;
  }
  return x;
}

// x as it is when it has the type and the depth that the weights ask for, else a converted copy.
template <class X>
static const X* as_type(const kvern::Linear& a, kvern::Type type, int64_t depth, int64_t* row) {
  const int64_t padded = (a.k + depth - 1) / depth * depth;
  if (a.x_type == type && padded == a.k) {
    *row = a.x_row;
    return (const X*)a.x;
  }
  *row = padded;
  return converted<X>(a, padded);
}

template <class Step>
static void linear_of(const kvern::Linear& a, kvern::Type type, int64_t depth) {
  int64_t row;
  const auto* x = as_type<typename Step::X>(a, type, depth, &row);
  linear_with<Step>(a, x, row, (a.k + depth - 1) / depth * depth);
}

}  // namespace KVERN_ISA
