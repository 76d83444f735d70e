// Norms, rotary embedding with the store into the cache, and gated activations: one row at a time.
#pragma once

#include "abi.h"
#include "kv_types.h"

namespace KVERN_ISA {

constexpr int64_t PARALLEL_ELEMENTS = 32768;  // fewer are done sooner by one thread
constexpr int MAX_HEAD = 1024;

template <class T>
struct Plain {
  using type = T;
};
template <class T>
struct Plain<const T&> {
  using type = T;
};
template <class T>
using plain = typename Plain<T>::type;  // const T& → T

// Calls f(typed pointer) for data of a run-time type.
template <class F>
INLINE void typed(kvern::Type type, const void* p, F f) {
  switch (type) {
    case kvern::F32: return f((const float*)p);
    case kvern::BF16: return f((const bf16*)p);
    case kvern::F16: return f((const f16*)p);
    default: return;
  }
}

// f(row) for each row, rows of about `elements` each, by as many threads as that is worth.
template <class F>
INLINE void by_rows(int threads, int64_t rows, int64_t elements, F f) {
  int64_t chunk = elements > 0 ? 1 + PARALLEL_ELEMENTS / 4 / elements : rows;
  kvern::parallel(rows * elements > PARALLEL_ELEMENTS ? threads : 1, (rows + chunk - 1) / chunk, [&](int64_t task, int) {
    int64_t end = (task + 1) * chunk < rows ? (task + 1) * chunk : rows;
    for (int64_t r = task * chunk; r < end; ++r) f(r);
  });
}

// f(offset, count) for each 16 elements of a row, the last maybe fewer.
template <class F>
INLINE void by_lanes(int64_t dim, F f) {
  int64_t d = 0;
  for (; d + LANES <= dim; d += LANES) f(d, LANES);
  if (d < dim) f(d, (int)(dim - d));
}
template <class T>
INLINE V16 get(const T* p, int count) {
  return count == LANES ? load(p) : load_some(p, count);
}
template <class T>
INLINE void put(T* p, V16 a, int count) {
  if (count == LANES) {
    store(p, a);
  } else {
    store_some(p, a, count);
  }
}

static float inverse_rms(V16 squares, int64_t dim, float eps) {
  return 1.0f / __builtin_sqrtf(hsum(squares) / (float)dim + eps);
}

template <class X, class W>
static void norm_row(const X* x, const X* residual, X* total, const W* weight, X* out, int64_t dim, float eps) {
  V16 squares = zero();
  by_lanes(dim, [&](int64_t d, int count) {
    V16 a = get(x + d, count);
    if (residual) {
      put(total + d, a + get(residual + d, count), count);
      a = get(total + d, count);  // as rounded
    }
    squares = fma(a, a, squares);
  });
  const X* from = residual ? total : x;
  V16 scale = set1(inverse_rms(squares, dim, eps));
  by_lanes(dim, [&](int64_t d, int count) {
    put(out + d, get(from + d, count) * scale * get(weight + d, count), count);
  });
}

static void norm(const kvern::Norm& a) {
  typed(a.x.type, a.x.data, [&](auto* x) {
    using X = plain<decltype(*x)>;
    typed(a.weight_type, a.weight, [&](auto* weight) {
      const X* residual = (const X*)a.residual.data;
      by_rows(a.threads, a.rows, a.dim, [&](int64_t r) {
        norm_row(x + r * a.x.row, residual ? residual + r * a.residual.row : nullptr,
                 residual ? (X*)a.total + r * a.dim : nullptr, weight, (X*)a.out + r * a.dim, a.dim, a.eps);
      });
    });
  });
}

static void norm_head(float* x, const kvern::Rope& a, const void* weight) {
  if (!weight) return;
  int64_t dim = a.cache.dim;
  V16 squares = zero();
  by_lanes(dim, [&](int64_t d, int count) {
    V16 v = get(x + d, count);
    squares = fma(v, v, squares);
  });
  V16 scale = set1(inverse_rms(squares, dim, a.eps));
  typed(a.norm_type, weight, [&](auto* w) {
    by_lanes(dim, [&](int64_t d, int count) { put(x + d, get(x + d, count) * scale * get(w + d, count), count); });
  });
}

static void rotate_head(float* x, const kvern::Rope& a, const float* cos_sin) {
  const int64_t half = a.rotary / 2;
  const float *cosines = cos_sin, *sines = cos_sin + half;
  if (a.interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      float p = x[2 * i], q = x[2 * i + 1];
      x[2 * i] = p * cosines[i] - q * sines[i];
      x[2 * i + 1] = q * cosines[i] + p * sines[i];
    }
    return;
  }
  by_lanes(half, [&](int64_t i, int count) {
    V16 p = get(x + i, count), q = get(x + half + i, count);
    V16 c = get(cosines + i, count), s = get(sines + i, count);
    put(x + i, p * c - q * s, count);
    put(x + half + i, q * c + p * s, count);
  });
}

INLINE void load_head(const kvern::Rows& rows, int64_t token, int64_t head, float* to, int64_t dim) {
  typed(rows.type, rows.data, [&](auto* data) {
    auto* from = data + token * rows.row + head * rows.head;
    by_lanes(dim, [&](int64_t d, int count) { put(to + d, get(from + d, count), count); });
  });
}

// One head of one token, x[dim], into its slot of a cache, whatever its layout.
INLINE void store_head(const float* x, int64_t dim, void* cache, const int64_t* strides, const kvern::Cache& c,
                       int64_t slot, int64_t head) {
  const int64_t block = slot / c.block_size * strides[0] + head * strides[1], offset = slot % c.block_size;
  typed_cache(c.type, cache, [&]<class T>(T* data) {
    V16 factor = set1(1.0f);
    if constexpr (SCALED<T>) {
      V16 sizes = zero(), doubt = zero();  // doubt: NaN if any element is not finite
      by_lanes(dim, [&](int64_t d, int count) {
        V16 v = get(x + d, count);
        sizes = max(sizes, max(v, zero() - v));
        doubt = fma(v, zero(), doubt);
      });
      const float largest = hmax(sizes), scale = largest / 127.0f + hsum(doubt);
      memcpy((char*)(data + block) + dim * c.block_size + 4 * offset, &scale, 4);
      factor = set1(largest > 0.0f ? 127.0f / largest : 0.0f);
    }
    T* to = data + block + offset * strides[2];
    by_lanes(dim, [&](int64_t d, int count) {
      V16 v = get(x + d, count);
      if constexpr (SCALED<T>) v = v * factor;
      if (strides[3] == 1) return put(to + d, v, count);
      T lanes[LANES];
      store(lanes, v);
      for (int i = 0; i < count; ++i) to[(d + i) * strides[3]] = lanes[i];
    });
  });
}

static void rope_and_store(const kvern::Rope& a) {
  const int64_t dim = a.cache.dim, heads = a.cache.heads;
  by_rows(a.threads, a.tokens, a.query_heads * dim, [&](int64_t t) {
    alignas(64) float x[MAX_HEAD];
    int64_t position = a.positions_64 ? ((const int64_t*)a.positions)[t] : ((const int32_t*)a.positions)[t];
    const float* cos_sin = a.cos_sin + position * a.rotary;
    for (int64_t h = 0; h < a.query_heads; ++h) {
      load_head(a.q, t, h, x, dim);
      norm_head(x, a, a.q_norm);
      rotate_head(x, a, cos_sin);
      typed(a.q.type, a.q_out, [&](auto* data) {
        using T = plain<decltype(*data)>;
        T* out = (T*)data + (t * a.query_heads + h) * dim;
        by_lanes(dim, [&](int64_t d, int count) { put(out + d, get(x + d, count), count); });
      });
    }
    int64_t slot = a.slots[t];
    if (slot < 0) return;
    for (int64_t h = 0; h < heads; ++h) {
      load_head(a.k, t, h, x, dim);
      norm_head(x, a, a.k_norm);
      rotate_head(x, a, cos_sin);
      store_head(x, dim, a.cache.keys, a.cache.key_strides, a.cache, slot, h);
      load_head(a.v, t, h, x, a.cache.value_dim);
      store_head(x, a.cache.value_dim, a.cache.values, a.cache.value_strides, a.cache, slot, h);
    }
  });
}

INLINE V16 silu(V16 x) { return x / (set1(1.0f) + exp(zero() - x)); }
// x/2 (1 + tanh u) = x / (1 + e^-2u)
INLINE V16 gelu_tanh(V16 x) {
  V16 u = set1(0.7978845608028654f) * fma(set1(0.044715f) * x * x, x, x);
  return x / (set1(1.0f) + exp(set1(-2.0f) * u));
}

// g sigmoid(1.702 g) (u + 1) of a gate up to 7 and u within 7 of 0 (GPT-OSS).
INLINE V16 swiglu_oai(V16 gate, V16 up) {
  // The bound comes first: what comes second is kept if it is NaN.
  const V16 g = min(set1(7.0f), gate), u = min(set1(7.0f), max(set1(-7.0f), up));
  return g / (set1(1.0f) + exp(set1(-1.702f) * g)) * (u + set1(1.0f));
}
INLINE V16 gated(kvern::Activation activation, V16 gate, V16 up) {
  if (activation == kvern::SWIGLU_OAI) return swiglu_oai(gate, up);
  return (activation == kvern::GELU ? gelu_tanh(gate) : silu(gate)) * up;
}

static void gate(const kvern::Gate& a) {
  typed(a.x.type, a.x.data, [&](auto* x) {
    using X = plain<decltype(*x)>;
    by_rows(a.threads, a.rows, 4 * a.inner, [&](int64_t r) {
      const X *gates = x + r * a.x.row, *ups = gates + a.inner;
      X* out = (X*)a.out + r * a.inner;
      by_lanes(a.inner, [&](int64_t i, int count) {
        put(out + i, gated(a.activation, get(gates + i, count), get(ups + i, count)), count);
      });
    });
  });
}

static void combine(const kvern::Combine& a) {
  typed(a.type, a.out, [&](auto* data) {
    using T = plain<decltype(*data)>;
    by_rows(a.threads, a.rows, a.top_k * a.width, [&](int64_t r) {
      const int64_t* places = a.places + r * a.top_k;
      const float* weights = a.weights + r * a.top_k;
      T* out = (T*)data + r * a.width;
      by_lanes(a.width, [&](int64_t d, int count) {
        V16 sum = zero();
        for (int64_t j = 0; j < a.top_k; ++j) {
          if (places[j] >= 0) sum = sum + set1(weights[j]) * get(a.parts + places[j] * a.width + d, count);
        }
        put(out + d, sum, count);
      });
    });
  });
}

}  // namespace KVERN_ISA
