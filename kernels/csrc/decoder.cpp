// A whole stack of decoder layers in one call: the same ops on the same data as one by one, hence the same
// bits, without a return to Python between them.
#include "abi.h"

#include <string.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace kvern {
namespace {

struct Layer {
  const void *input_norm, *post_norm, *q_norm, *k_norm;  // q_norm and k_norm may be null
  Projection qkv, o, gate_up, down;
  void *keys, *values;
  const int64_t* shape;  // see cache_of
  int64_t window;
};

// One step's batch, and what all layers share.
struct Step {
  const void* hidden;               // [tokens, width] contiguous of `type`
  void *hidden_out, *residual_out;  // likewise; their sum is the stack's result
  int64_t type, norm_type, tokens, width, query_heads;
  const void* positions;
  int64_t positions_64;
  const float* cos_sin;
  int64_t max_positions, rotary, interleaved;
  const int64_t* slots;
  const int32_t* tables;
  int64_t table_row, max_blocks;
  const int32_t *query_start, *seq_lens;
  int64_t sequences, gelu;
  float scale, softcap, eps;
};

struct Runner {
  const Ops& ops;
  const Step& s;
  int threads;
  Type type;
  int64_t bytes;

  void project(const void* x, const Projection& p, void* y) const {
    ops.linear({x, p.k, type, p.weight, (Type)p.type, (const float*)p.bias, y, type, s.tokens, p.n, p.k, threads});
  }
  void normalize(const void* x, void* residual, const void* weight, void* out) const {
    ops.norm({{x, s.width, 0, type}, {residual, s.width, 0, type}, weight, (Type)s.norm_type, out, residual, s.tokens,
              s.width, s.eps, threads});
  }
  Rope rope(const Layer& l, const char* fused, void* q) const {
    const Cache cache = cache_of(l.keys, l.values, l.shape);
    const int64_t dim = cache.dim, row = l.qkv.n;
    const char *k = fused + s.query_heads * dim * bytes, *v = k + cache.heads * dim * bytes;
    return {{fused, row, dim, type}, {k, row, dim, type}, {v, row, dim, type}, q, s.tokens, s.query_heads, s.positions,
            s.positions_64 != 0, s.cos_sin, s.max_positions, s.rotary, s.slots, cache, s.interleaved != 0, l.q_norm,
            l.k_norm, (Type)s.norm_type, s.eps, threads};
  }
  Attention attention(const Layer& l, const void* q, void* out) const {
    const Cache cache = cache_of(l.keys, l.values, l.shape);
    return {{q, s.query_heads * cache.dim, cache.dim, type}, out, nullptr, s.query_heads, cache, s.tables, s.table_row,
            s.query_start, s.seq_lens, s.sequences, s.scale, 1.0f, s.softcap, l.window, nullptr, nullptr, true,
            nullptr, threads};
  }

  void run(const Layer* layers, int64_t count) const {
    const Layer& first = layers[0];
    const int64_t heads_width = s.query_heads * first.shape[3], inner = first.down.k;
    const int64_t row = s.width + first.qkv.n + 2 * heads_width + 3 * inner;
    char* normed = (char*)scratch(3, s.tokens * row * bytes);
    char* fused = normed + s.tokens * s.width * bytes;
    char* q = fused + s.tokens * first.qkv.n * bytes;
    char* mixed = q + s.tokens * heads_width * bytes;
    char* gates = mixed + s.tokens * heads_width * bytes;
    char* gated = gates + s.tokens * 2 * inner * bytes;
    memcpy(s.residual_out, s.hidden, s.tokens * s.width * bytes);
    for (int64_t i = 0; i < count; ++i) {
      const Layer& l = layers[i];
      if (i == 0) {
        normalize(s.hidden, nullptr, l.input_norm, normed);
      } else {
        normalize(s.hidden_out, s.residual_out, l.input_norm, normed);
      }
      project(normed, l.qkv, fused);
      ops.rope_and_store(rope(l, fused, q));
      ops.attention(attention(l, q, mixed));
      project(mixed, l.o, s.hidden_out);
      normalize(s.hidden_out, s.residual_out, l.post_norm, normed);
      project(normed, l.gate_up, gates);
      ops.gate({{gates, 2 * inner, 0, type}, gated, s.tokens, inner, s.gelu ? GELU : SILU, threads});
      project(gated, l.down, s.hidden_out);
    }
  }
};

}  // namespace
}  // namespace kvern

EXPORT int kvern_decoder(int threads, const kvern::Layer* layers, int64_t count, const kvern::Step* step) {
  const kvern::Type type = (kvern::Type)step->type;
  kvern::Runner runner = {kvern::active(), *step, threads, type, kvern::TYPE_BYTES[type]};
  if (!kvern::tables_fit(runner.attention(layers[0], nullptr, nullptr), step->tokens, step->max_blocks) ||
      !kvern::slots_fit(runner.rope(layers[0], nullptr, nullptr))) {
    return kvern::OUT_OF_RANGE;
  }
  runner.run(layers, count);
  return kvern::OK;
}
