// From the paged cache to the operands of attention_math.h: groups of 16 keys, found through the block table and
// packed into words, or read where they lie if they are words already.
#pragma once

#include "attention_math.h"

namespace KVERN_ISA {

// `depth` word rows of 16 from `dim` rows of 16 elements, `row` apart; zeros after the last.
template <class T>
static void pack_rows(const T* from, int64_t row, int64_t dim, int64_t depth, float* to) {
  for (int64_t d = 0; d < dim; ++d) store(to + d * LANES, load(from + d * row));
  for (int64_t d = dim; d < depth; ++d) store(to + d * LANES, zero());
}
// `count` of 16 rows of `dim` elements → 16 rows of `width` words; zeros elsewhere.
template <class T>
static void pack_columns(const T* from, int64_t row, int64_t count, int64_t dim, int64_t width, float* to) {
  for (int64_t j = 0; j < LANES; ++j) {
    for (int64_t d = 0; d < width; d += LANES) {
      const T* at = from + j * row + d;
      const int64_t left = j < count ? dim - d : 0;
      store(to + j * width + d, left >= LANES ? load(at) : left > 0 ? load_some(at, (int)left) : zero());
    }
  }
}
#if defined(__AVX512BF16__)
INLINE void store_words(uint32_t* to, __m512i words) { _mm512_storeu_si512(to, words); }
template <class T>
constexpr T NOTHING[LANES] = {};
template <class T>
static void pack_rows(const T* from, int64_t row, int64_t dim, int64_t depth, uint32_t* to) {
  int64_t d = 0;
  for (; 2 * d + 1 < dim; ++d, from += 2 * row) store_words(to + d * LANES, pair_rows(from, from + row));
  if (2 * d < dim) store_words(to + d++ * LANES, pair_rows(from, NOTHING<T>));
  for (; d < depth; ++d) store_words(to + d * LANES, _mm512_setzero_si512());
}
template <class T>
static void pack_columns(const T* from, int64_t row, int64_t count, int64_t dim, int64_t width, uint32_t* to) {
  for (int64_t j = 0; j < LANES; j += 2, from += 2 * row, to += width) {
    int64_t d = 0;
    if (j + 1 < count) {
      for (; d + LANES <= dim; d += LANES) store_words(to + d, pair_rows(from + d, from + row + d));
    }
    for (; d < width; d += LANES) {
      T ends[2][LANES] = {};
      const int64_t left = least(dim - d, LANES);
      if (left > 0 && j < count) memcpy(ends[0], from + d, left * sizeof(T));
      if (left > 0 && j + 1 < count) memcpy(ends[1], from + row + d, left * sizeof(T));
      store_words(to + d, pair_rows(ends[0], ends[1]));
    }
  }
}
#endif

// One sequence's keys and values of one head.
template <class T>
struct Source {
  const kvern::Cache& c;
  const int32_t* table;
  int64_t head;
  T* stage;  // (dim + value_dim) * 16 elements: groups that do not lie as packing wants them are gathered here
  const bool keys_dense = c.block_size % LANES == 0 && c.key_strides[2] == 1;
  const bool values_dense = c.block_size % LANES == 0 && c.value_strides[3] == 1;

  // Whether float32 arithmetic can read a float32 cache where it lies.
  bool dense() const { return keys_dense && values_dense && c.value_dim % LANES == 0; }
  // Whether the keys of a group follow each other in memory, component after component, as its values do.
  bool contiguous() const { return c.key_strides[3] == LANES; }
  const T* key_at(int64_t position) const {
    const int64_t block = table[position / c.block_size], *s = c.key_strides;
    return (const T*)c.keys + block * s[0] + head * s[1] + position % c.block_size * s[2];
  }
  const T* value_at(int64_t position) const {
    const int64_t block = table[position / c.block_size], *s = c.value_strides;
    return (const T*)c.values + block * s[0] + head * s[1] + position % c.block_size * s[2];
  }
  // 16 keys from `position` on, of which `count` are the sequence's: rows of components, *row apart.
  const T* key_rows(int64_t position, int64_t count, int64_t* row) const {
    if (keys_dense) return *row = c.key_strides[3], key_at(position);
    for (int64_t j = 0; j < count; ++j) {
      const T* from = key_at(position + j);
      for (int64_t d = 0; d < c.dim; ++d) stage[d * LANES + j] = from[d * c.key_strides[3]];
    }
    return *row = LANES, stage;
  }
  const T* value_rows(int64_t position, int64_t count, int64_t* row) const {
    if (values_dense) return *row = c.value_strides[2], value_at(position);
    T* to = stage + c.dim * LANES;
    for (int64_t j = 0; j < count; ++j) {
      const T* from = value_at(position + j);
      for (int64_t d = 0; d < c.value_dim; ++d) to[j * c.value_dim + d] = from[d * c.value_strides[3]];
    }
    return *row = c.value_dim, to;
  }
  // The scales of 16 keys (or values), zeros after `count`.
  void scales(bool of_values, int64_t position, int64_t count, float* to) const {
    const int64_t dim = of_values ? c.value_dim : c.dim, *s = of_values ? c.value_strides : c.key_strides;
    if (count == LANES && c.block_size % LANES == 0) {
      const int64_t block = table[position / c.block_size], offset = position % c.block_size;
      const char* codes = (const char*)(of_values ? c.values : c.keys) + block * s[0] + head * s[1];
      memcpy(to, codes + dim * c.block_size + 4 * offset, LANES * 4);
      return;
    }
    for (int64_t j = 0; j < LANES; ++j) {
      if (j >= count) {
        to[j] = 0.0f;
        continue;
      }
      const int64_t block = table[(position + j) / c.block_size], offset = (position + j) % c.block_size;
      const char* codes = (const char*)(of_values ? c.values : c.keys) + block * s[0] + head * s[1];
      memcpy(to + j, codes + dim * c.block_size + 4 * offset, 4);
    }
  }
  void prefetch_keys(int64_t position) const {
    if (!keys_dense) return;
    const T* from = key_at(position);
    const int64_t row = c.key_strides[3], step = row * (int64_t)sizeof(T) >= 64 ? 1 : 64 / (row * (int64_t)sizeof(T));
    for (int64_t d = 0; d < c.dim; d += step) __builtin_prefetch(from + d * row, 0, 2);
  }
  void prefetch_values(int64_t position) const {
    if (!values_dense) return;
    const T* from = value_at(position);
    const int64_t row = c.value_strides[2], bytes = c.value_dim * (int64_t)sizeof(T);
    for (int64_t j = 0; j < LANES; ++j) {
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)(from + j * row) + i, 0, 2);
    }
  }
};

}  // namespace KVERN_ISA
