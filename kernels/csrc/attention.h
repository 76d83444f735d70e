// Paged attention: one call for prefill chunks and decodes.
//
// A task is a tile of query rows (tokens x the heads that share a key head) of one sequence. It walks the
// keys in tiles of 64 at fixed positions, with an online softmax that restarts every SPLIT keys; the
// parts are folded in the order of the context. Whether one thread walks all parts or many threads one
// part each, and which rows share a task, changes no bit: each row does the same arithmetic, and a tile
// that a row does not see leaves its state as it is.
#pragma once

#include "abi.h"
#include "simd.h"

namespace KVERN_ISA {

constexpr int KEYS = 64;            // keys per tile
constexpr int PARTS = KEYS / LANES; // vectors of keys per tile
constexpr int64_t SPLIT = 512;      // keys per part, a multiple of KEYS
constexpr int QUERY_ROWS = 48;      // rows per task at most, unless a single token has more heads
constexpr int TILE_ROWS = ACCUMULATORS / PARTS > 6 ? 6 : ACCUMULATORS / PARTS < 1 ? 1 : ACCUMULATORS / PARTS;
constexpr int64_t DIRECT_ROWS = 2 * TILE_ROWS;  // with more rows, narrow keys are widened once per tile
constexpr float NEVER = -__builtin_inff();

// The softmax state of `rows` query rows: running maximum, sum of weights, weighted values [rows][padded].
struct State {
  float *maximum, *sum, *acc;
};

INLINE void clear(const State& s, int64_t rows, int64_t padded) {
  for (int64_t r = 0; r < rows; ++r) s.maximum[r] = NEVER, s.sum[r] = 0.0f;
  memset(s.acc, 0, rows * padded * sizeof(float));
}

// Sixteen keys of a tile: component d of its keys at keys + d * key_row; its values' rows at values.
template <class T>
struct Part {
  const T *keys, *values;
};
template <class T>
struct Tile64 {
  Part<T> parts[PARTS];
  int64_t key_row, value_row;
};

template <class T, int ROWS>
static void score_rows(const float* q, int64_t padded, const Tile64<T>& t, int64_t dim, float* scores) {
  V16 acc[ROWS][PARTS];
  UNROLL for (int r = 0; r < ROWS; ++r) {
    UNROLL for (int p = 0; p < PARTS; ++p) acc[r][p] = zero();
  }
  for (int64_t d = 0; d < dim; ++d) {
    V16 keys[PARTS];
    UNROLL for (int p = 0; p < PARTS; ++p) keys[p] = load(t.parts[p].keys + d * t.key_row);
    UNROLL for (int r = 0; r < ROWS; ++r) {
      V16 b = set1(q[r * padded + d]);
      UNROLL for (int p = 0; p < PARTS; ++p) acc[r][p] = fma(b, keys[p], acc[r][p]);
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r) {
    UNROLL for (int p = 0; p < PARTS; ++p) store(scores + r * KEYS + p * LANES, acc[r][p]);
  }
}

// acc[rows][16 * COLUMNS] += weights[rows][first..last of the tile's keys] x values.
template <class T, int ROWS, int COLUMNS>
static void mix_rows(const float* weights, const Tile64<T>& t, int first, int last, float* out, int64_t padded,
                     int64_t column) {
  V16 acc[ROWS][COLUMNS];
  UNROLL for (int r = 0; r < ROWS; ++r) {
    UNROLL for (int c = 0; c < COLUMNS; ++c) acc[r][c] = load(out + r * padded + column + c * LANES);
  }
  for (int p = first / LANES; p * LANES < last; ++p) {
    int from = first > p * LANES ? first - p * LANES : 0, to = last - p * LANES < LANES ? last - p * LANES : LANES;
    const T* row = t.parts[p].values + from * t.value_row + column;
    const float* w = weights + p * LANES;
    for (int j = from; j < to; ++j, row += t.value_row) {
      V16 values[COLUMNS];
      UNROLL for (int c = 0; c < COLUMNS; ++c) values[c] = load(row + c * LANES);
      UNROLL for (int r = 0; r < ROWS; ++r) {
        V16 b = set1(w[r * KEYS + j]);
        UNROLL for (int c = 0; c < COLUMNS; ++c) acc[r][c] = fma(b, values[c], acc[r][c]);
      }
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r) {
    UNROLL for (int c = 0; c < COLUMNS; ++c) store(out + r * padded + column + c * LANES, acc[r][c]);
  }
}

// Calls f.template operator()<N>() for the run-time n in 1 … MAX.
template <int MAX, class F>
INLINE void with_count(int64_t n, F f) {
  if constexpr (MAX > 1) {
    if (n < MAX) return with_count<MAX - 1>(n, f);
  }
  f.template operator()<MAX>();
}

template <class T>
static void score(const float* q, int64_t rows, int64_t padded, const Tile64<T>& t, int64_t dim, float* scores) {
  for (int64_t r = 0; r < rows; r += TILE_ROWS) {
    with_count<TILE_ROWS>(rows - r, [&]<int ROWS>() {
      score_rows<T, ROWS>(q + r * padded, padded, t, dim, scores + r * KEYS);
    });
  }
}
template <class T>
static void mix(const float* weights, int64_t rows, const Tile64<T>& t, int first, int last, float* acc,
                int64_t padded) {
  for (int64_t column = 0; column < padded; column += PARTS * LANES) {
    with_count<PARTS>((padded - column) / LANES, [&]<int COLUMNS>() {
      for (int64_t r = 0; r < rows; r += TILE_ROWS) {
        with_count<TILE_ROWS>(rows - r, [&]<int ROWS>() {
          mix_rows<T, ROWS, COLUMNS>(weights + r * KEYS, t, first, last, acc + r * padded, padded, column);
        });
      }
    });
  }
}

// Scores of one row become weights e^(score - maximum); keys outside [first, last) weigh nothing.
INLINE void softmax_row(float* scores, int64_t first, int64_t last, float softcap, float* maximum, float* sum,
                        float* acc, int64_t padded) {
  V16 s[PARTS];
  UNROLL for (int p = 0; p < PARTS; ++p) s[p] = load(scores + p * LANES);
  if (softcap > 0.0f) {
    for (int p = 0; p < PARTS; ++p) s[p] = tanh(s[p] * set1(1.0f / softcap)) * set1(softcap);
  }
  if (first > 0 || last < KEYS) {
    for (int p = 0; p < PARTS; ++p) store(scores + p * LANES, s[p]);
    for (int64_t j = 0; j < first; ++j) scores[j] = NEVER;
    for (int64_t j = last; j < KEYS; ++j) scores[j] = NEVER;
    for (int p = 0; p < PARTS; ++p) s[p] = load(scores + p * LANES);
  }
  float peak = hmax(max(max(s[0], s[1]), max(s[2], s[3])));
  float now = peak > *maximum ? peak : *maximum;
  V16 origin = set1(now);
  V16 total = zero();
  UNROLL for (int p = 0; p < PARTS; ++p) {
    s[p] = exp(s[p] - origin);
    store(scores + p * LANES, s[p]);
    total = total + s[p];
  }
  if (now != *maximum) {
    V16 shrink = exp(set1(*maximum - now));
    float factor[LANES];
    store(factor, shrink);
    *sum *= factor[0];
    for (int64_t d = 0; d < padded; d += LANES) store(acc + d, load(acc + d) * shrink);
    *maximum = now;
  }
  *sum += hsum(total);
}

// Adds the finished part to the total, row by row.
static void fold(const State& total, const State& part, int64_t rows, int64_t padded) {
  for (int64_t r = 0; r < rows; ++r) {
    if (part.maximum[r] == NEVER) continue;
    float now = part.maximum[r] > total.maximum[r] ? part.maximum[r] : total.maximum[r];
    V16 keep = exp(set1(total.maximum[r] - now)), add = exp(set1(part.maximum[r] - now));
    float k[LANES], a[LANES];
    store(k, keep);
    store(a, add);
    total.sum[r] = total.sum[r] * k[0] + part.sum[r] * a[0];
    total.maximum[r] = now;
    for (int64_t d = 0; d < padded; d += LANES) {
      float* at = total.acc + r * padded + d;
      store(at, fma(load(at), keep, load(part.acc + r * padded + d) * add));
    }
  }
}

// A tile of query rows: `tokens` tokens from `token` on, the last of them at key position `last_key`.
struct Queries {
  int64_t sequence, token, tokens, first_key;  // first_key: position of the first token
};

template <class T>
struct Walk {
  const kvern::Attention& a;
  int64_t group = 0, rows_max = 0, padded = 0;
  bool direct = false;  // the cache's layout can be read in place

  // Floats that a task needs: queries, scores, one State, converted keys and values.
  int64_t task_floats() const { return rows_max * (2 * padded + KEYS + 2) + 2 * KEYS * padded; }

  void load_queries(const Queries& w, int64_t head, float* q) const {
    for (int64_t t = 0; t < w.tokens; ++t) {
      for (int64_t g = 0; g < group; ++g) {
        int64_t at = (w.token + t) * a.q.row + (head * group + g) * a.q.head;
        float* row = q + (t * group + g) * padded;
        switch (a.q.type) {
          case kvern::F32: load_row((const float*)a.q.data + at, row); break;
          case kvern::BF16: load_row((const bf16*)a.q.data + at, row); break;
          case kvern::F16: load_row((const f16*)a.q.data + at, row); break;
        }
      }
    }
  }
  template <class Q>
  void load_row(const Q* from, float* to) const {
    V16 scale = set1(a.scale);
    int64_t dim = a.cache.dim;
    for (int64_t d = 0; d < padded; d += LANES) {
      store(to + d, (d + LANES <= dim ? load(from + d) : load_some(from + d, (int)(dim - d))) * scale);
    }
  }

  // Where the 16 keys from `position` on lie; only for layouts that can be read in place.
  Part<T> part_at(const int32_t* table, int64_t head, int64_t position, int64_t length) const {
    const kvern::Cache& c = a.cache;
    if (position >= length) position = 0;  // masked: any readable keys do
    int64_t block = table[position / c.block_size], offset = position % c.block_size;
    const int64_t *ks = c.key_strides, *vs = c.value_strides;
    return {(const T*)c.keys + block * ks[0] + head * ks[1] + offset,
            (const T*)c.values + block * vs[0] + head * vs[1] + offset * vs[2]};
  }
  Tile64<T> tile_at(const int32_t* table, int64_t head, int64_t position, int64_t length) const {
    Tile64<T> t;
    for (int p = 0; p < PARTS; ++p) t.parts[p] = part_at(table, head, position + p * LANES, length);
    t.key_row = a.cache.key_strides[3];
    t.value_row = a.cache.value_strides[2];
    return t;
  }
  void prefetch(const Tile64<T>& t) const {
    constexpr int64_t line = 64 / sizeof(T);
    for (int p = 0; p < PARTS; ++p) {
      for (int64_t i = 0; i < a.cache.dim * LANES; i += line) {
        __builtin_prefetch(t.parts[p].keys + i);
        __builtin_prefetch(t.parts[p].values + i);
      }
    }
  }

  // The tile as floats: keys [dim][64], values [64][padded]; zeros beyond the sequence.
  Tile64<float> widened(const int32_t* table, int64_t head, int64_t position, int64_t length, float* buffer) const {
    const kvern::Cache& c = a.cache;
    const int64_t *ks = c.key_strides, *vs = c.value_strides;
    float *keys = buffer, *values = buffer + KEYS * padded;
    if (direct) {
      Tile64<T> t = tile_at(table, head, position, length);
      for (int p = 0; p < PARTS; ++p) {
        for (int64_t d = 0; d < c.dim; ++d) store(keys + d * KEYS + p * LANES, load(t.parts[p].keys + d * t.key_row));
        for (int j = 0; j < LANES; ++j) {
          float* to = values + (p * LANES + j) * padded;
          for (int64_t d = 0; d < padded; d += LANES) store(to + d, load(t.parts[p].values + j * t.value_row + d));
        }
      }
    } else {
      memset(buffer, 0, 2 * KEYS * padded * sizeof(float));
      for (int j = 0; j < KEYS && position + j < length; ++j) {
        int64_t block = table[(position + j) / c.block_size], offset = (position + j) % c.block_size;
        const T* key = (const T*)c.keys + block * ks[0] + head * ks[1] + offset * ks[2];
        const T* value = (const T*)c.values + block * vs[0] + head * vs[1] + offset * vs[2];
        for (int64_t d = 0; d < c.dim; ++d) {
          keys[d * KEYS + j] = to_float(key[d * ks[3]]);
          values[j * padded + d] = to_float(value[d * vs[3]]);
        }
      }
    }
    Tile64<float> wide;
    for (int p = 0; p < PARTS; ++p) wide.parts[p] = {keys + p * LANES, values + p * LANES * padded};
    wide.key_row = KEYS;
    wide.value_row = padded;
    return wide;
  }

  template <class V>
  void attend(const Queries& w, const Tile64<V>& t, int64_t position, const float* q, float* scores,
              const State& s) const {
    const int64_t rows = w.tokens * group;
    score(q, rows, padded, t, a.cache.dim, scores);
    int first_of_all = KEYS, last_of_all = 0;
    for (int64_t r = 0; r < rows; ++r) {
      int64_t key = w.first_key + r / group;  // the row's own position
      int64_t last = key + 1 - position, first = a.window > 0 ? last - a.window : 0;
      last = last > KEYS ? KEYS : last;
      first = first < 0 ? 0 : first;
      if (first >= last) {
        memset(scores + r * KEYS, 0, KEYS * sizeof(float));
        continue;
      }
      softmax_row(scores + r * KEYS, first, last, a.softcap, s.maximum + r, s.sum + r, s.acc + r * padded, padded);
      first_of_all = first < first_of_all ? (int)first : first_of_all;
      last_of_all = last > last_of_all ? (int)last : last_of_all;
    }
    if (first_of_all < last_of_all) mix(scores, rows, t, first_of_all, last_of_all, s.acc, padded);
  }

  // One part of the context, keys [begin, end), into `s`.
  void part(const Queries& w, int64_t head, int64_t begin, int64_t end, const float* q, float* scores, float* wide,
            const State& s) const {
    const int32_t* table = a.block_tables + w.sequence * a.table_row;
    const int64_t rows = w.tokens * group, last_key = w.first_key + w.tokens - 1;
    clear(s, rows, padded);
    if (end > last_key + 1) end = last_key + 1;
    if (a.window > 0 && w.first_key - a.window + 1 > begin) begin = (w.first_key - a.window + 1) / KEYS * KEYS;
    if (direct && (sizeof(T) == 4 || rows <= DIRECT_ROWS)) {
      for (int64_t at = begin; at < end; at += KEYS) {
        Tile64<T> t = tile_at(table, head, at, end);
        if (at + KEYS < end) prefetch(tile_at(table, head, at + KEYS, end));
        attend(w, t, at, q, scores, s);
      }
    } else {
      for (int64_t at = begin; at < end; at += KEYS) {
        attend(w, widened(table, head, at, end, wide), at, q, scores, s);
      }
    }
  }

  void write(const Queries& w, int64_t head, const State& s) const {
    int64_t dim = a.cache.dim;
    for (int64_t r = 0; r < w.tokens * group; ++r) {
      int64_t at = ((w.token + r / group) * a.query_heads + head * group + r % group) * dim;
      V16 norm = set1(1.0f / s.sum[r]);
      for (int64_t d = 0; d < dim; d += LANES) {
        V16 value = load(s.acc + r * padded + d) * norm;
        int count = dim - d < LANES ? (int)(dim - d) : LANES;
        switch (a.q.type) {
          case kvern::F32: store_some((float*)a.out + at + d, value, count); break;
          case kvern::BF16: store_some((bf16*)a.out + at + d, value, count); break;
          case kvern::F16: store_some((f16*)a.out + at + d, value, count); break;
        }
      }
    }
  }

  State state_at(float* p) const { return {p, p + rows_max, p + 2 * rows_max}; }
  int64_t state_floats() const { return rows_max * (padded + 2); }

  void run();
};

template <class T>
void Walk<T>::run() {
  const kvern::Cache& c = a.cache;
  group = a.query_heads / c.heads;
  padded = (c.dim + LANES - 1) / LANES * LANES;
  direct = c.block_size % LANES == 0 && c.dim % LANES == 0 && c.key_strides[2] == 1 && c.value_strides[3] == 1;
  const int64_t tile_tokens = group >= QUERY_ROWS ? 1 : QUERY_ROWS / group;
  rows_max = (tile_tokens * group + LANES - 1) / LANES * LANES;

  int64_t items = 0, splits = 1;
  for (int64_t s = 0; s < a.sequences; ++s) {
    items += (a.query_start[s + 1] - a.query_start[s] + tile_tokens - 1) / tile_tokens;
    if (a.seq_lens[s] > splits * SPLIT) splits = (a.seq_lens[s] + SPLIT - 1) / SPLIT;
  }
  if (items == 0) return;
  Queries* work = (Queries*)kvern::scratch(0, items * (int64_t)sizeof(Queries));
  int64_t n = 0;
  for (int64_t s = 0; s < a.sequences; ++s) {
    int64_t count = a.query_start[s + 1] - a.query_start[s];
    for (int64_t t = 0; t < count; t += tile_tokens) {
      int64_t tokens = count - t < tile_tokens ? count - t : tile_tokens;
      work[n++] = {s, a.query_start[s] + t, tokens, a.seq_lens[s] - count + t};
    }
  }
  const int64_t pairs = items * c.heads;
  const bool divide = splits > 1 && a.threads > 1 && pairs < 3 * a.threads;
  const int64_t tasks = divide ? pairs * splits : pairs;
  const int64_t per_thread = task_floats() + state_floats() + LANES;
  float* private_floats = (float*)kvern::scratch(1, a.threads * per_thread * 4);
  float* parts = divide ? (float*)kvern::scratch(2, tasks * state_floats() * 4) : nullptr;
  auto mine = [&](int thread) { return private_floats + thread * per_thread; };
  auto total_of = [&](int thread) { return state_at(mine(thread) + task_floats()); };
  kvern::parallel(a.threads, tasks, [&](int64_t task, int thread) {
    float *q = mine(thread), *scores = q + rows_max * padded, *wide = scores + rows_max * KEYS;
    const int64_t pair = divide ? task / splits : tasks - 1 - task;
    const Queries& w = work[pair / c.heads];
    const int64_t head = pair % c.heads, end = w.first_key + w.tokens;
    load_queries(w, head, q);
    if (divide) {
      int64_t begin = task % splits * SPLIT;
      if (begin < end) part(w, head, begin, begin + SPLIT, q, scores, wide, state_at(parts + task * state_floats()));
      return;
    }
    State part_state = state_at(wide + 2 * KEYS * padded), total = total_of(thread);
    clear(total, w.tokens * group, padded);
    for (int64_t begin = 0; begin < end; begin += SPLIT) {
      if (a.window > 0 && begin + SPLIT <= w.first_key - a.window + 1) continue;
      part(w, head, begin, begin + SPLIT, q, scores, wide, part_state);
      fold(total, part_state, w.tokens * group, padded);
    }
    write(w, head, total);
  });
  if (!divide) return;
  kvern::parallel(a.threads, pairs, [&](int64_t pair, int thread) {
    const Queries& w = work[pair / c.heads];
    State total = total_of(thread);
    clear(total, w.tokens * group, padded);
    for (int64_t i = 0; i < splits && i * SPLIT < w.first_key + w.tokens; ++i) {
      fold(total, state_at(parts + (pair * splits + i) * state_floats()), w.tokens * group, padded);
    }
    write(w, pair % c.heads, total);
  });
}

static void attention(const kvern::Attention& a) {
  switch (a.cache.type) {
    case kvern::F32: return Walk<float>{a}.run();
    case kvern::BF16: return Walk<bf16>{a}.run();
    case kvern::F16: return Walk<f16>{a}.run();
  }
}

}  // namespace KVERN_ISA
