// Paged attention: one call for prefill chunks and decodes.
//
// A task is a tile of query rows (tokens x the heads that share a key head) of one sequence. It walks the context
// in parts of 512 keys at fixed positions: all scores of a part, their softmax, their values; the parts are folded
// in the order of the context. Whether one thread walks all parts or many threads one part each, and which rows
// share a task, changes no bit: each row does the same arithmetic, and keys that it does not see weigh zero.
//
//   for each part:  for each band of rows:  scores (keys packed when first needed) → weights → values → fold
#pragma once

#include "attention_pack.h"
#include "attention_softmax.h"
#if defined(__AMX_BF16__)
#include "attention_amx.h"
#endif

namespace KVERN_ISA {

constexpr int64_t QUERY_ROWS = 128;             // rows of a task at most, unless a single token has more heads
constexpr int64_t GROUPS_AT_ONCE = 4;           // groups packed before they are used, while they are in the cache

// A tile of query rows: `tokens` tokens from `token` on, the first of them at key position `first_key`; none of them
// sees keys from `end` on.
struct Queries {
  int64_t sequence, token, tokens, first_key, end;
};

// M: the arithmetic; T: the cache's type.
template <class M, class T>
struct Walk {
  using Word = typename M::Word;
  const kvern::Attention& a;
  int64_t group = 0, rows_max = 0, depth = 0, width = 0;

  // What a thread needs, in 64-byte pieces.
  struct Buffers {
    Word *q, *weights, *keys, *values;
    float *scores, *key_scales, *value_scales;
    T* stage;
    State band, total;
    char* end;
    mutable int64_t begun = 0;  // rows that the arithmetic is set to
  };

  Buffers carve(char* at) const {
    auto take = [&](int64_t bytes) {
      char* here = at;
      at += round_up(bytes, 64);
      return here;
    };
    Buffers b;
    b.q = (Word*)take(rows_max * depth * 4);
    b.weights = (Word*)take(M::BAND * SCORE_ROW * 4 / M::WIDTH);
    b.keys = (Word*)take(PART * depth * 4);
    b.values = (Word*)take(PART / M::WIDTH * width * 4);
    b.scores = (float*)take(M::BAND * SCORE_ROW * 4);
    b.key_scales = (float*)take(PART * 4);
    b.value_scales = (float*)take(PART * 4);
    b.stage = (T*)take((a.cache.dim + a.cache.value_dim) * LANES * sizeof(T));
    b.band = state_at((float*)take(state_floats(M::BAND) * 4), M::BAND);
    b.total = state_at((float*)take(state_floats(rows_max) * 4), rows_max);
    b.end = at;
    return b;
  }
  State state_at(float* p, int64_t rows) const { return {p + rows * width, p + rows * (width + 1), p}; }
  int64_t state_floats(int64_t rows) const { return round_up(rows * (width + 2), LANES); }

  void load_queries(const Queries& w, int64_t head, Word* q) const {
    const int64_t dim = a.cache.dim;
    for (int64_t r = 0; r < w.tokens * group; ++r, q += depth) {
      const int64_t at = (w.token + r / group) * a.q.row + (head * group + r % group) * a.q.head;
      if constexpr (M::WIDTH == 2) {
        memset(q, 0, depth * 4);
        memcpy(q, (const bf16*)a.q.data + at, dim * 2);
      } else {
        for (int64_t d = 0; d < dim; d += LANES) {
          const int count = (int)least(dim - d, LANES);
          V16 x = zero();
          switch (a.q.type) {
            case kvern::F32: x = load_some((const float*)a.q.data + at + d, count); break;
            case kvern::BF16: x = load_some((const bf16*)a.q.data + at + d, count); break;
            case kvern::F16: x = load_some((const f16*)a.q.data + at + d, count); break;
            default: break;
          }
          store_some(q + d, x, count);
        }
      }
    }
  }

  // One part of the context, of one sequence and head. Groups are packed when first needed. Where one band of rows is
  // all that needs them, they go through few buffers over and over, which then stay in the nearest cache.
  struct Part {
    const Source<T> source;
    int64_t begin, end;  // of the part, of the sequence
    bool in_place, once, direct;
    Context<Word> c;
    Context<T> elements;
    int64_t keys_ready = -1, values_ready = -1;  // groups before these are

    int64_t position(int64_t group) const { return begin + group * LANES; }
    // Keys of a group that are the sequence's.
    int64_t count(int64_t group) const { return least(end - position(group), LANES); }
    int64_t place(int64_t group) const { return once ? group % GROUPS_AT_ONCE : group; }
    // The end of the piece, from `group` on and up to `to`, that is to be packed and then used.
    int64_t piece(int64_t group, int64_t ready, int64_t to) const {
      const int64_t next = (group / GROUPS_AT_ONCE + 1) * GROUPS_AT_ONCE;
      return ready >= to ? to : least(next, to);
    }
  };

  void ready_keys(Part& p, int64_t to, const Buffers& b) const {
    for (; p.keys_ready < to; ++p.keys_ready) {
      const int64_t g = p.keys_ready, position = p.position(g), count = p.count(g);
      Word* words = b.keys + p.place(g) * depth * LANES;
      p.c.keys[g] = words;
      if constexpr (SCALED<T>) {
        p.source.scales(false, position, count, b.key_scales + g * LANES);
        p.source.scales(true, position, count, b.value_scales + g * LANES);
      }
      if (count <= 0) continue;  // masked: any readable keys do
      const int64_t ahead = position + GROUPS_AT_ONCE * LANES;
      if (ahead < p.end) p.source.prefetch_keys(ahead);
      if (g >= GROUPS - GROUPS_AT_ONCE) p.source.prefetch_values(ahead - PART);
      if (p.in_place) {
        p.c.keys[g] = (const Word*)p.source.key_at(position);
      } else {
        int64_t row;
        const T* rows = p.source.key_rows(position, count, &row);
        pack_rows(rows, row, a.cache.dim, depth, words);
      }
    }
  }
  void ready_values(Part& p, int64_t to, const Buffers& b) const {
    for (; p.values_ready < to; ++p.values_ready) {
      const int64_t g = p.values_ready, position = p.position(g), count = p.count(g);
      Word* words = b.values + p.place(g) * LANES / M::WIDTH * width;
      p.c.values[g] = words;
      if (count <= 0) {
        memset(words, 0, LANES / M::WIDTH * width * 4);
        continue;
      }
      const int64_t ahead = position + GROUPS_AT_ONCE * LANES;
      if (ahead < p.end && g < GROUPS - GROUPS_AT_ONCE) p.source.prefetch_values(ahead);
      if (ahead < p.end && g >= GROUPS - GROUPS_AT_ONCE) p.source.prefetch_keys(ahead);
      if (p.in_place) {
        p.c.values[g] = (const Word*)p.source.value_at(position);
      } else {
        int64_t row;
        const T* rows = p.source.value_rows(position, count, &row);
        pack_columns(rows, row, count, a.cache.value_dim, width, words);
      }
    }
  }

  // Where the keys end that a row sees.
  int64_t end_of(const Queries& w, int64_t r) const {
    const int64_t key = w.first_key + r / group, length = a.seq_lens[w.sequence];
    const int64_t end = a.causal ? key + 1 : a.window > 0 ? least(key + a.window, length) : length;
    return a.key_ends ? most(end, least(a.key_ends[w.token + r / group], length)) : end;
  }

  // As ready_keys and score (or ready_values and mix), of groups that lie as they are needed: few rows use each
  // element too seldom for packing to pay. `whole`: the groups before the sequence's last, if that isn't full.
  void score_direct(Part& p, int64_t group, int64_t whole, const Word* q, int64_t rows, const Buffers& b) const {
    for (int64_t g = group; g < whole; ++g) {
      const int64_t position = p.position(g), ahead = position + GROUPS_AT_ONCE * LANES;
      if constexpr (SCALED<T>) {
        p.source.scales(false, position, LANES, b.key_scales + g * LANES);
        p.source.scales(true, position, LANES, b.value_scales + g * LANES);
      }
      const T* keys = p.elements.keys[g] = p.source.key_at(position);
      if (p.source.contiguous()) {
        p.elements.after_keys[g] = g >= GROUPS - GROUPS_AT_ONCE ? p.source.value_at(ahead - PART)
                                   : ahead < p.end              ? p.source.key_at(ahead)
                                                                : keys;
        continue;
      }
      p.elements.after_keys[g] = keys;
      if (ahead < p.end) p.source.prefetch_keys(ahead);
      if (g >= GROUPS - GROUPS_AT_ONCE) p.source.prefetch_values(ahead - PART);
    }
    score<M>(q, rows, depth, p.elements, group, whole, b.scores);
  }
  void mix_direct(Part& p, int64_t first, int64_t last, int64_t rows, const Buffers& b) const {
    for (int64_t g = first / LANES; g * LANES < last; ++g) {
      const int64_t position = p.position(g), ahead = position + GROUPS_AT_ONCE * LANES;
      const T* values = p.elements.values[g] = p.source.value_at(position);
      const bool in_part = g < GROUPS - GROUPS_AT_ONCE;
      p.elements.after_values[g] = ahead >= p.end             ? values
                                   : in_part                  ? p.source.value_at(ahead)
                                   : p.source.contiguous()    ? p.source.key_at(ahead)
                                                              : values;
      if (ahead < p.end && !in_part && !p.source.contiguous()) p.source.prefetch_keys(ahead);
    }
    mix<M>(b.weights, rows, p.elements, first, last, b.band.acc, width);
  }

  // The part from key `begin` on, folded into `out`, or put there as it is.
  void part(const Queries& w, int64_t head, int64_t begin, const Buffers& b, const State& out, bool folding) const {
    const int64_t rows = w.tokens * group, length = least(w.end - begin, PART);
    const Source<T> source = {a.cache, a.block_tables + w.sequence * a.table_row, head, b.stage};
    Part p = {source, begin, w.end};
    p.in_place = __is_same(Word, T) && p.source.dense();
    p.once = rows <= M::BAND;
    p.direct = M::FEW_ROWS >= rows && !p.in_place && sizeof(T) < 4 && p.source.dense() && a.cache.dim % M::WIDTH == 0;
    p.elements.key_row = a.cache.key_strides[3], p.elements.value_row = a.cache.value_strides[2];
    p.c.key_row = p.in_place ? a.cache.key_strides[3] : LANES;
    p.c.value_row = p.in_place ? a.cache.value_strides[2] : width;
    for (int64_t row = 0; row < rows; row += M::BAND) {
      const int64_t count = least(rows - row, M::BAND);
      auto key_of = [&](int64_t r) { return w.first_key + r / group - begin; };  // the row's own key
      auto first_of = [&](int64_t r) { return a.window > 0 ? most(key_of(r) - a.window + 1, 0) : 0; };
      auto last_of = [&](int64_t r) { return least(end_of(w, r) - begin, length); };
      if (!folding) {
        for (int64_t r = row; r < row + count; ++r) out.maximum[r] = NEVER;
      }
      const int64_t first = first_of(row);
      int64_t last = last_of(row + count - 1);
      if (a.key_ends) {  // the only rule by which a later row may see less
        for (int64_t r = row; r < row + count; ++r) last = most(last, last_of(r));
      }
      if (first >= last) continue;
      const int64_t from = first / M::KEY_MULTIPLE * M::KEY_MULTIPLE, to = round_up(last, M::KEY_MULTIPLE);
      if (b.begun != count) M::begin(count), b.begun = count;
      if (p.keys_ready < 0) p.keys_ready = p.values_ready = from / LANES;
      for (int64_t g = from / LANES, until; g < to / LANES; g = until) {
        until = p.piece(g, p.keys_ready, to / LANES);
        if constexpr (M::FEW_ROWS > 0) {
          const int64_t whole = least(until, (p.end - p.begin) / LANES);
          if (p.direct && whole > g) {
            score_direct(p, g, whole, b.q, count, b);
            p.keys_ready = until = whole;
            continue;
          }
        }
        ready_keys(p, until, b);
        score<M>(b.q + row * depth, count, depth, p.c, g, until, b.scores);
      }
      for (int64_t i = 0; i < count; ++i) {
        const int64_t r = row + i, head_of = head * group + r % group;
        Word* weights = b.weights + i * (SCORE_ROW / M::WIDTH);
        if (first_of(r) >= last_of(r)) {
          memset((char*)weights + from * 4 / M::WIDTH, 0, (to - from) * 4 / M::WIDTH);
          b.band.maximum[i] = NEVER;
          continue;
        }
        const ScoreRule rule = {a.scale, a.softcap, a.slopes ? a.slopes[head_of] : 0.0f,
                                SCALED<T> ? b.key_scales : nullptr};
        softmax_row<M>(rule, b.scores + i * SCORE_ROW, from, to, first_of(r), last_of(r), -key_of(r),
                       SCALED<T> ? b.value_scales : nullptr, weights, b.band.maximum + i, b.band.sum + i);
      }
      memset(b.band.acc, 0, count * width * 4);
      for (int64_t g = from / LANES, until; g < to / LANES; g = until) {
        until = p.once ? p.piece(g, p.values_ready, to / LANES) : to / LANES;
        if constexpr (M::FEW_ROWS > 0) {
          const int64_t whole = least(until, (p.end - p.begin) / LANES);
          if (p.direct && whole > g) {
            mix_direct(p, most(first, g * LANES), least(last, whole * LANES), count, b);
            p.values_ready = until = whole;
            continue;
          }
        }
        ready_values(p, until, b);
        const bool whole = M::KEY_MULTIPLE > LANES;
        mix<M>(b.weights, count, p.c, whole ? g * LANES : most(first, g * LANES),
               whole ? until * LANES : least(last, until * LANES), b.band.acc, width);
      }
      for (int64_t i = 0; i < count; ++i) {
        const int64_t r = row + i;
        if (b.band.maximum[i] == NEVER) continue;
        if (folding) {
          fold_row(out.maximum + r, out.sum + r, out.acc + r * width, b.band.maximum[i], b.band.sum[i],
                   b.band.acc + i * width, width);
        } else {
          out.maximum[r] = b.band.maximum[i], out.sum[r] = b.band.sum[i];
          memcpy(out.acc + r * width, b.band.acc + i * width, width * 4);
        }
      }
    }
  }

  void write(const Queries& w, int64_t head, const State& s) const {
    const int64_t dim = a.cache.value_dim;
    for (int64_t r = 0; r < w.tokens * group; ++r) {
      const int64_t head_of = head * group + r % group, at = (w.token + r / group) * a.query_heads + head_of;
      float norm = 1.0f, sum = s.sum[r], maximum = s.maximum[r];
      if (a.sinks) {  // a key without a value
        const float sink = a.sinks[head_of] * LOG2_E, now = sink > maximum ? sink : maximum;
        norm = exp2_of(maximum - now);
        sum = sum * norm + exp2_of(sink - now);
        maximum = now;
      }
      if (a.lse) a.lse[at] = LN_2 * maximum + __builtin_logf(sum);
      const V16 factor = set1(norm * a.value_scale / sum);
      for (int64_t d = 0; d < dim; d += LANES) {
        const V16 value = load(s.acc + r * width + d) * factor;
        const int count = (int)least(dim - d, LANES);
        switch (a.q.type) {
          case kvern::F32: store_some((float*)a.out + at * dim + d, value, count); break;
          case kvern::BF16: store_some((bf16*)a.out + at * dim + d, value, count); break;
          case kvern::F16: store_some((f16*)a.out + at * dim + d, value, count); break;
          default: break;
        }
      }
    }
  }

  void run();
};

template <class M, class T>
void Walk<M, T>::run() {
  const kvern::Cache& c = a.cache;
  group = a.query_heads / c.heads;
  depth = round_up(round_up(c.dim, M::WIDTH) / M::WIDTH, M::DEPTH_MULTIPLE);
  width = round_up(c.value_dim, M::KEY_MULTIPLE);
  int64_t longest = 0, keys = 0;
  for (int64_t s = 0; s < a.sequences; ++s) {
    const int64_t count = a.query_start[s + 1] - a.query_start[s];
    longest = most(longest, count);
    if (count > 0) keys = most(keys, a.seq_lens[s]);
  }
  if (longest == 0) return;
  const int64_t tile_tokens = least(longest, most(QUERY_ROWS / group, 1));
  rows_max = tile_tokens * group;

  int64_t items = 0;
  for (int64_t s = 0; s < a.sequences; ++s) {
    items += (a.query_start[s + 1] - a.query_start[s] + tile_tokens - 1) / tile_tokens;
  }
  Queries* work = (Queries*)kvern::scratch(0, items * (int64_t)sizeof(Queries));
  int64_t n = 0;
  for (int64_t s = 0; s < a.sequences; ++s) {
    const int64_t count = a.query_start[s + 1] - a.query_start[s];
    for (int64_t t = 0; t < count; t += tile_tokens) {
      Queries& w = work[n++] = {s, a.query_start[s] + t, least(count - t, tile_tokens), a.seq_lens[s] - count + t, 0};
      for (int64_t r = 0; r < w.tokens * group; r += group) w.end = most(w.end, end_of(w, r));
    }
  }
  const int64_t parts = (keys + PART - 1) / PART, pairs = items * c.heads;
  const bool divide = parts > 1 && a.threads > 1 && pairs < 3 * a.threads;
  const int64_t tasks = divide ? pairs * parts : pairs, bytes = carve((char*)4096).end - (char*)4096;
  char* buffers = (char*)kvern::scratch(1, a.threads * bytes);
  float* states = divide ? (float*)kvern::scratch(2, tasks * state_floats(rows_max) * 4) : nullptr;
  kvern::parallel(a.threads, tasks, [&](int64_t task, int thread) {
    const Buffers b = carve(buffers + thread * bytes);
    const int64_t pair = divide ? task / parts : tasks - 1 - task, head = pair % c.heads;  // longest first
    const Queries& w = work[pair / c.heads];
    if (divide) {
      const int64_t begin = task % parts * PART;
      if (begin >= w.end) return;
      load_queries(w, head, b.q);
      part(w, head, begin, b, state_at(states + task * state_floats(rows_max), rows_max), false);
    } else {
      load_queries(w, head, b.q);
      clear(b.total, w.tokens * group, width);
      const int64_t seen = a.window > 0 ? most(w.first_key - a.window + 1, 0) : 0;
      for (int64_t begin = seen / PART * PART; begin < w.end; begin += PART) {
        part(w, head, begin, b, b.total, true);
      }
      write(w, head, b.total);
    }
    M::done();
  });
  if (!divide) return;
  kvern::parallel(a.threads, pairs, [&](int64_t pair, int thread) {
    const Queries& w = work[pair / c.heads];
    const State total = carve(buffers + thread * bytes).total;
    clear(total, w.tokens * group, width);
    for (int64_t i = 0; i * PART < w.end; ++i) {
      const State s = state_at(states + (pair * parts + i) * state_floats(rows_max), rows_max);
      for (int64_t r = 0; r < w.tokens * group; ++r) {
        if (s.maximum[r] == NEVER) continue;
        fold_row(total.maximum + r, total.sum + r, total.acc + r * width, s.maximum[r], s.sum[r], s.acc + r * width,
                 width);
      }
    }
    write(w, pair % c.heads, total);
  });
}

static void attention(const kvern::Attention& a) {
  typed_cache(a.cache.type, a.cache.keys, [&]<class T>(T*) {
#if defined(__AVX512BF16__)
    if constexpr (__is_same(T, bf16) || NARROW<T>) {
#if defined(__AMX_BF16__)
      if (a.q.type == kvern::BF16) return Walk<AmxMath, T>{a}.run();
#else
      if (a.q.type == kvern::BF16) return Walk<BF16Math, T>{a}.run();
#endif
    }
#endif
    Walk<F32Math, T>{a}.run();
  });
}

}  // namespace KVERN_ISA
