// Mixture of experts: routing, and all experts of a layer in one call. Expert products are those of `linear`, so
// they come in every format, and each token adds its experts' outputs in the order of its choice: a row's bits do
// not depend on who else chose an expert.
#include "moe.h"

#include <math.h>
#include <string.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace kvern {
namespace {

int64_t place_of(const Experts& e, int32_t id) {
  if (id < 0 || id >= e.total) return -1;
  const int64_t place = e.map ? e.map[id] : id;
  return place < e.count ? place : -1;
}

// Scores of one token, and the choice among them.
void choose(const Routing& r, const float* logits, float* scores, float* weights, int32_t* ids) {
  const int64_t experts = r.experts, groups = r.groups;
  float* choice = scores + experts;
  const float* bias = r.bias;
  if (r.sigmoid) {
    for (int64_t e = 0; e < experts; ++e) scores[e] = 1 / (1 + expf(-logits[e]));
  } else {
    float top = logits[0], sum = 0;
    for (int64_t e = 1; e < experts; ++e) top = logits[e] > top ? logits[e] : top;
    for (int64_t e = 0; e < experts; ++e) sum += scores[e] = expf(logits[e] - top);
    for (int64_t e = 0; e < experts; ++e) scores[e] /= sum;
  }
  for (int64_t e = 0; e < experts; ++e) choice[e] = bias ? scores[e] + bias[e] : scores[e];
  const int64_t each = experts / groups;
  if (groups > 1) {
    float* ranks = choice + experts;
    for (int64_t g = 0; g < groups; ++g) {
      float first = -INFINITY, second = -INFINITY;
      for (int64_t e = g * each; e < (g + 1) * each; ++e) {
        if (choice[e] > first) {
          second = first, first = choice[e];
        } else if (choice[e] > second) {
          second = choice[e];
        }
      }
      ranks[g] = bias && each > 1 ? first + second : first;
    }
    for (int64_t g = 0; g < groups; ++g) {  // dropped unless fewer than top_groups come before it
      int64_t before = 0;
      for (int64_t h = 0; h < groups; ++h) before += ranks[h] > ranks[g] || (ranks[h] == ranks[g] && h < g);
      if (before < r.top_groups) continue;
      for (int64_t e = g * each; e < (g + 1) * each; ++e) choice[e] = -INFINITY;
    }
  }
  float sum = 0;
  for (int64_t i = 0; i < r.top_k; ++i) {
    int64_t best = -1;
    for (int64_t e = 0; e < experts; ++e) {
      bool taken = false;
      for (int64_t j = 0; j < i; ++j) taken |= ids[j] == e;
      if (!taken && (best < 0 || choice[e] > choice[best])) best = e;
    }
    ids[i] = (int32_t)best;
    sum += weights[i] = scores[best];
  }
  if (r.renormalize) {
    for (int64_t i = 0; i < r.top_k; ++i) weights[i] /= sum > 1e-20f ? sum : 1e-20f;
  }
  for (int64_t i = 0; i < r.top_k; ++i) weights[i] *= r.scale;
}

}  // namespace

void choose_experts(int threads, const Routing& r, const float* logits, int64_t tokens, float* weights, int32_t* ids) {
  constexpr int64_t block = 32;
  parallel(tokens > block ? threads : 1, (tokens + block - 1) / block, [&](int64_t task, int) {
    float* scores = (float*)scratch(0, (2 * r.experts + r.groups) * 4);
    for (int64_t t = task * block; t < tokens && t < (task + 1) * block; ++t) {
      choose(r, logits + t * r.experts, scores, weights + t * r.top_k, ids + t * r.top_k);
    }
  });
}

void run_experts(int threads, const Experts& e, const void* x, int64_t x_row, Type t, int64_t tokens,
                 const float* weights, const int32_t* ids, int64_t top_k, int32_t* counts, void* out) {
  const Ops& ops = active();
  const int64_t size = TYPE_BYTES[t], pairs = tokens * top_k, row = e.width * size;
  // Per pair: its x, gate and up, their product, and the expert's output in float32; then where each pair lies, and
  // where it comes from.
  const int64_t floats = e.width * 4, per_pair = row + 3 * e.inner * size + floats;
  char* memory = (char*)scratch(7, pairs * per_pair + (2 * pairs + e.count + 2) * 8);
  float* outputs = (float*)memory;
  char *gathered = memory + pairs * floats, *gates = gathered + pairs * row, *products = gates + pairs * 2 * e.inner * size;
  int64_t *slots = (int64_t*)(memory + (pairs * per_pair + 7) / 8 * 8), *origins = slots + pairs, *starts = origins + pairs;
  memset(starts, 0, (e.count + 1) * 8);
  for (int64_t i = 0; i < pairs; ++i) {
    if (counts && ids[i] >= 0 && ids[i] < e.total) ++counts[ids[i]];
    slots[i] = place_of(e, ids[i]);
    if (slots[i] >= 0) ++starts[slots[i] + 1];
  }
  int64_t chosen = 0;
  for (int64_t i = 0; i < e.count; ++i) {
    chosen += starts[i + 1] > 0;
    starts[i + 1] += starts[i];
  }
  for (int64_t i = 0; i < pairs; ++i) {
    if (slots[i] < 0) continue;
    slots[i] = starts[slots[i]]++;  // starts[i] becomes the end of expert i
    origins[slots[i]] = i / top_k;
  }
  // Many experts are divided among the threads, few are computed one by one by all of them.
  const int inside = chosen >= 2 * threads ? 1 : threads;
  parallel(inside == 1 ? threads : 1, e.count, [&](int64_t i, int) {
    const int64_t begin = i ? starts[i - 1] : 0, end = starts[i], rows = end - begin;
    if (rows == 0) return;
    for (int64_t r = begin; r < end; ++r) {
      memcpy(gathered + r * row, (const char*)x + origins[r] * x_row * size, row);
    }
    const Projection &up = e.gate_up[i], &down = e.down[i];
    char *gate = gates + begin * 2 * e.inner * size, *product = products + begin * e.inner * size;
    ops.linear({gathered + begin * row, e.width, t, up.weight, (Type)up.type, (const float*)up.bias, gate, t, rows, up.n,
                up.k, inside});
    ops.gate({{gate, 2 * e.inner, 0, t}, product, rows, e.inner, (Activation)e.activation, inside});
    ops.linear({product, e.inner, t, down.weight, (Type)down.type, (const float*)down.bias, outputs + begin * e.width,
                F32, rows, down.n, down.k, inside});
  });
  ops.combine({outputs, slots, weights, tokens, top_k, e.width, out, t, threads});
}

}  // namespace kvern

using namespace kvern;

EXPORT void kvern_moe_route(int threads, const Routing* routing, const float* logits, int64_t tokens, float* weights,
                            int32_t* ids) {
  choose_experts(threads, *routing, logits, tokens, weights, ids);
}

EXPORT void kvern_moe(int threads, const Experts* experts, const void* x, int64_t x_row, int type, int64_t tokens,
                      const float* weights, const int32_t* ids, int64_t top_k, int32_t* counts, void* out) {
  run_experts(threads, *experts, x, x_row, (Type)type, tokens, weights, ids, top_k, counts, out);
}
