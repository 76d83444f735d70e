// LoRA: hidden = A·x, then out += B·hidden·scale, each row under its own adapter. Every output has one order of
// summation, whichever rows and adapters are beside it.
#pragma once

#include "abi.h"
#include "elementwise.h"

namespace KVERN_ISA {

// out[j] = x · a[j] for N rows of a.
template <int N, class X, class W>
INLINE void dots(const X* x, const W* a, int64_t k, float* out) {
  V16 sums[N];
  UNROLL for (int j = 0; j < N; ++j) sums[j] = zero();
  by_lanes(k, [&](int64_t d, int count) {
    const V16 v = get(x + d, count);
    UNROLL for (int j = 0; j < N; ++j) sums[j] = fma(v, get(a + j * k + d, count), sums[j]);
  });
  UNROLL for (int j = 0; j < N; ++j) out[j] = hsum(sums[j]);
}

static void lora_shrink(const kvern::LoraShrink& s) {
  constexpr int64_t TILE = 16;
  const int64_t tiles = (s.outputs + TILE - 1) / TILE;
  typed(s.x_type, s.x, [&](auto* x) {
    typed(s.a_type, s.a, [&](auto* a) {
      by_rows(s.threads, s.tokens * tiles, TILE * s.k, [&](int64_t task) {
        const int64_t token = task / tiles, adapter = s.adapters[token];
        if (adapter < 0 || adapter >= s.count) return;
        const auto* row = x + token * s.x_row;
        const int64_t end = (task % tiles + 1) * TILE < s.outputs ? (task % tiles + 1) * TILE : s.outputs;
        const auto* weights = a + adapter * s.outputs * s.k;
        float* out = s.out + token * s.outputs;
        int64_t j = task % tiles * TILE;
        for (; j + 4 <= end; j += 4) dots<4>(row, weights + j * s.k, s.k, out + j);
        for (; j < end; ++j) dots<1>(row, weights + j * s.k, s.k, out + j);
      });
    });
  });
}

// N · 16 outputs, the last maybe fewer.
template <int N, class W, class Y>
INLINE void expand(const float* hidden, const W* b, int64_t n, int64_t rank, float scale, Y* out, int last) {
  V16 sums[N];
  UNROLL for (int j = 0; j < N; ++j) sums[j] = zero();
  for (int64_t r = 0; r < rank; ++r) {
    const V16 h = set1(hidden[r]);
    UNROLL for (int j = 0; j < N; ++j) {
      sums[j] = fma(h, get(b + r * n + j * LANES, j == N - 1 ? last : LANES), sums[j]);
    }
  }
  UNROLL for (int j = 0; j < N; ++j) {
    const int count = j == N - 1 ? last : LANES;
    put(out + j * LANES, fma(sums[j], set1(scale), get(out + j * LANES, count)), count);
  }
}

static void lora_expand(const kvern::LoraExpand& s) {
  typed(s.out_type, s.out, [&](auto* constant) {
    using Y = plain<decltype(*constant)>;
    typed(s.b_type, s.b, [&](auto* b) {
      by_rows(s.threads, s.tokens * s.slices, s.n / s.slices * s.rank, [&](int64_t task) {
        const int64_t token = task / s.slices, slice = task % s.slices, adapter = s.adapters[token];
        if (adapter < 0 || adapter >= s.count || s.scales[adapter] == 0) return;
        int64_t begin = 0;
        for (int64_t i = 0; i < slice; ++i) begin += s.widths[i];
        const int64_t end = begin + s.widths[slice];
        const auto* weights = b + adapter * s.rank * s.n;
        const float* hidden = s.hidden + (token * s.slices + slice) * s.rank;
        Y* out = (Y*)s.out + token * s.out_row;
        int64_t c = begin;
        for (; c + 4 * LANES <= end; c += 4 * LANES) {
          expand<4>(hidden, weights + c, s.n, s.rank, s.scales[adapter], out + c, LANES);
        }
        for (; c < end; c += LANES) {
          const int count = c + LANES <= end ? LANES : (int)(end - c);
          expand<1>(hidden, weights + c, s.n, s.rank, s.scales[adapter], out + c, count);
        }
      });
    });
  });
}

}  // namespace KVERN_ISA
