// A whole stack of decoder layers in one call: the same ops on the same data as one by one, hence the same
// bits, without a return to Python between them.
#include "moe.h"

#include <string.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace kvern {
namespace {

// A mixture of experts for an MLP.
struct Mixture {
  Projection router;
  Routing routing;
  Experts experts;
};

struct Layer {
  const void *input_norm, *post_norm;
  const void *q_norm, *k_norm;              // of each head, or null
  const void *q_whole_norm, *k_whole_norm;  // of all heads together, or null
  Projection qkv, o, gate_up, down;
  const Mixture* mixture;  // in place of gate_up and down, or null
  void *keys, *values;
  const int64_t* shape;  // see cache_of
  int64_t window;
  const float* sinks;
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

// What lies between two ops, of all tokens.
struct Between {
  char *normed, *fused, *q, *k, *mixed, *gates, *gated;
  float *logits, *weights;
  int32_t* ids;
};

struct Runner {
  const Ops& ops;
  const Step& s;
  int threads;
  Type type;
  int64_t bytes;
  Between b = {};

  void project(const void* x, const Projection& p, void* y, Type to) const {
    ops.linear({x, p.k, type, p.weight, (Type)p.type, (const float*)p.bias, y, to, s.tokens, p.n, p.k, threads});
  }
  void normalize(const void* x, void* residual, const void* weight) const {
    ops.norm({{x, s.width, 0, type}, {residual, s.width, 0, type}, weight, (Type)s.norm_type, b.normed, residual,
              s.tokens, s.width, s.eps, threads});
  }
  Rope rope(const Layer& l) const {
    const Cache cache = cache_of(l.keys, l.values, l.shape);
    const int64_t dim = cache.dim, q_width = s.query_heads * dim, k_width = cache.heads * dim, row = l.qkv.n;
    const char *k = b.fused + q_width * bytes, *v = k + k_width * bytes;
    Rows q_rows = {b.fused, row, dim, type}, k_rows = {k, row, dim, type};
    if (l.q_whole_norm) q_rows = {b.q, q_width, dim, type}, k_rows = {b.k, k_width, dim, type};
    return {q_rows, k_rows, {v, row, dim, type}, b.q, s.tokens, s.query_heads, s.positions, s.positions_64 != 0,
            s.cos_sin, s.max_positions, s.rotary, s.slots, cache, s.interleaved != 0, l.q_norm, l.k_norm,
            (Type)s.norm_type, s.eps, threads};
  }
  Attention attention(const Layer& l) const {
    const Cache cache = cache_of(l.keys, l.values, l.shape);
    return {{b.q, s.query_heads * cache.dim, cache.dim, type}, b.mixed, nullptr, s.query_heads, cache, s.tables,
            s.table_row, s.query_start, s.seq_lens, s.sequences, s.scale, 1.0f, s.softcap, l.window, nullptr, l.sinks,
            true, nullptr, threads};
  }
  // Queries and keys of `fused`, all heads of a token together, normed into `q` and `k`.
  void normalize_heads(const Layer& l) const {
    const int64_t row = l.qkv.n, q_width = s.query_heads * l.shape[3], k_width = l.shape[1] * l.shape[3];
    ops.norm({{b.fused, row, 0, type}, {nullptr, 0, 0, type}, l.q_whole_norm, (Type)s.norm_type, b.q, nullptr, s.tokens,
              q_width, s.eps, threads});
    ops.norm({{b.fused + q_width * bytes, row, 0, type}, {nullptr, 0, 0, type}, l.k_whole_norm, (Type)s.norm_type, b.k,
              nullptr, s.tokens, k_width, s.eps, threads});
  }
  void dense(const Layer& l) const {
    const int64_t inner = l.down.k;
    project(b.normed, l.gate_up, b.gates, type);
    ops.gate({{b.gates, 2 * inner, 0, type}, b.gated, s.tokens, inner, s.gelu ? GELU : SILU, threads});
    project(b.gated, l.down, s.hidden_out, type);
  }
  void sparse(const Mixture& m) const {
    project(b.normed, m.router, b.logits, F32);
    choose_experts(threads, m.routing, b.logits, s.tokens, b.weights, b.ids);
    run_experts(threads, m.experts, b.normed, s.width, type, s.tokens, b.weights, b.ids, m.routing.top_k, nullptr,
                s.hidden_out);
  }

  void allot(const Layer* layers, int64_t count) {
    const Layer& first = layers[0];
    int64_t inner = 0, experts = 0, top_k = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Mixture* m = layers[i].mixture;
      inner = most(inner, m ? 0 : layers[i].down.k);
      experts = most(experts, m ? m->routing.experts : 0), top_k = most(top_k, m ? m->routing.top_k : 0);
    }
    const int64_t heads = s.query_heads * first.shape[3] * bytes, keys = first.shape[1] * first.shape[3] * bytes;
    const int64_t sizes[] = {s.width * bytes, first.qkv.n * bytes, heads, keys, heads, 2 * inner * bytes, inner * bytes,
                             experts * 4, top_k * 4, top_k * 4};
    int64_t total = 0;
    for (int64_t size : sizes) total += padded(size);
    char* at = (char*)scratch(3, total);
    const int64_t* size = sizes;
    auto take = [&] {
      char* here = at;
      at += padded(*size++);
      return here;
    };
    b.normed = take(), b.fused = take(), b.q = take(), b.k = take(), b.mixed = take(), b.gates = take();
    b.gated = take(), b.logits = (float*)take(), b.weights = (float*)take(), b.ids = (int32_t*)take();
  }
  static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
  int64_t padded(int64_t bytes_of_token) const { return (s.tokens * bytes_of_token + 63) / 64 * 64; }

  void run(const Layer* layers, int64_t count) {
    allot(layers, count);
    memcpy(s.residual_out, s.hidden, s.tokens * s.width * bytes);
    for (int64_t i = 0; i < count; ++i) {
      const Layer& l = layers[i];
      if (i == 0) {
        normalize(s.hidden, nullptr, l.input_norm);
      } else {
        normalize(s.hidden_out, s.residual_out, l.input_norm);
      }
      project(b.normed, l.qkv, b.fused, type);
      if (l.q_whole_norm) normalize_heads(l);
      ops.rope_and_store(rope(l));
      ops.attention(attention(l));
      project(b.mixed, l.o, s.hidden_out, type);
      normalize(s.hidden_out, s.residual_out, l.post_norm);
      if (l.mixture) {
        sparse(*l.mixture);
      } else {
        dense(l);
      }
    }
  }
};

}  // namespace
}  // namespace kvern

EXPORT int kvern_decoder(int threads, const kvern::Layer* layers, int64_t count, const kvern::Step* step) {
  const kvern::Type type = (kvern::Type)step->type;
  kvern::Runner runner = {kvern::active(), *step, threads, type, kvern::TYPE_BYTES[type]};
  if (!kvern::tables_fit(runner.attention(layers[0]), step->tokens, step->max_blocks) ||
      !kvern::slots_fit(runner.rope(layers[0]))) {
    return kvern::OUT_OF_RANGE;
  }
  runner.run(layers, count);
  return kvern::OK;
}
