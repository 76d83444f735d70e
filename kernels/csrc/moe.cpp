// Mixture of experts: routing, and all experts of a layer in one call. Expert products are those of `linear`, so
// they come in every format, and each token adds its experts' outputs in the order of its choice: a row's bits do
// not depend on who else chose an expert.
#include "abi.h"

#include <math.h>
#include <string.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace kvern {
namespace {

struct Experts {
  const Projection *gate_up, *down;  // [count]
  int64_t count, total;              // held here; ids of the model
  const int32_t* map;                // [total]: place among those held or -1; null: ids are places
  int64_t width, inner, activation;
};

int64_t place_of(const Experts& e, int32_t id) {
  if (id < 0 || id >= e.total) return -1;
  const int64_t place = e.map ? e.map[id] : id;
  return place < e.count ? place : -1;
}

// Scores of one token, and the choice among them.
void route(const float* logits, int64_t experts, int64_t top_k, bool sigmoid, bool renormalize, const float* bias,
           int64_t groups, int64_t top_groups, float scale, float* scores, float* choice, float* weights,
           int32_t* ids) {
  if (sigmoid) {
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
      if (before < top_groups) continue;
      for (int64_t e = g * each; e < (g + 1) * each; ++e) choice[e] = -INFINITY;
    }
  }
  float sum = 0;
  for (int64_t i = 0; i < top_k; ++i) {
    int64_t best = -1;
    for (int64_t e = 0; e < experts; ++e) {
      bool taken = false;
      for (int64_t j = 0; j < i; ++j) taken |= ids[j] == e;
      if (!taken && (best < 0 || choice[e] > choice[best])) best = e;
    }
    ids[i] = (int32_t)best;
    sum += weights[i] = scores[best];
  }
  if (renormalize) {
    for (int64_t i = 0; i < top_k; ++i) weights[i] /= sum > 1e-20f ? sum : 1e-20f;
  }
  for (int64_t i = 0; i < top_k; ++i) weights[i] *= scale;
}

}  // namespace
}  // namespace kvern

using namespace kvern;

EXPORT void kvern_moe_route(int threads, const float* logits, int64_t tokens, int64_t experts, int64_t top_k,
                            int sigmoid, int renormalize, const float* bias, int64_t groups, int64_t top_groups,
                            float scale, float* weights, int32_t* ids) {
  constexpr int64_t block = 32;
  parallel(tokens > block ? threads : 1, (tokens + block - 1) / block, [&](int64_t task, int) {
    float* scores = (float*)scratch(0, (2 * experts + groups) * 4);
    for (int64_t t = task * block; t < tokens && t < (task + 1) * block; ++t) {
      route(logits + t * experts, experts, top_k, sigmoid != 0, renormalize != 0, bias, groups, top_groups, scale,
            scores, scores + experts, weights + t * top_k, ids + t * top_k);
    }
  });
}

// x [tokens, width] of `type` → out [tokens, width] float32.
EXPORT void kvern_moe(int threads, const Experts* experts, const void* x, int64_t x_row, int type, int64_t tokens,
                      const float* weights, const int32_t* ids, int64_t top_k, int32_t* counts, float* out) {
  const Experts& e = *experts;
  const Ops& ops = active();
  const Type t = (Type)type;
  const int64_t size = TYPE_BYTES[t], pairs = tokens * top_k, row = e.width * size;
  // Per pair: its x, gate and up, their product, and the expert's output in float32; then where each pair lies.
  const int64_t floats = e.width * 4, per_pair = row + 3 * e.inner * size + floats;
  char* memory = (char*)scratch(7, pairs * per_pair + (pairs + e.count + 2) * 8);
  float* outputs = (float*)memory;
  char *gathered = memory + pairs * floats, *gates = gathered + pairs * row, *products = gates + pairs * 2 * e.inner * size;
  int64_t *slots = (int64_t*)(memory + (pairs * per_pair + 7) / 8 * 8), *starts = slots + pairs;
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
    memcpy(gathered + slots[i] * row, (const char*)x + i / top_k * x_row * size, row);
  }
  // Many experts are divided among the threads, few are computed one by one by all of them.
  const int inside = chosen >= 2 * threads ? 1 : threads;
  parallel(inside == 1 ? threads : 1, e.count, [&](int64_t i, int) {
    const int64_t begin = i ? starts[i - 1] : 0, rows = starts[i] - begin;
    if (rows == 0) return;
    const Projection &up = e.gate_up[i], &down = e.down[i];
    char *gate = gates + begin * 2 * e.inner * size, *product = products + begin * e.inner * size;
    ops.linear({gathered + begin * row, e.width, t, up.weight, (Type)up.type, (const float*)up.bias, gate, t, rows, up.n,
                up.k, inside});
    ops.gate({{gate, 2 * e.inner, 0, t}, product, rows, e.inner, (Activation)e.activation, inside});
    ops.linear({product, e.inner, t, down.weight, (Type)down.type, (const float*)down.bias, outputs + begin * e.width,
                F32, rows, down.n, down.k, inside});
  });
  parallel(tokens > 16 ? threads : 1, tokens, [&](int64_t token, int) {
    float* to = out + token * e.width;
    memset(to, 0, floats);
    for (int64_t j = token * top_k; j < (token + 1) * top_k; ++j) {
      if (slots[j] < 0) continue;
      const float *from = outputs + slots[j] * e.width, weight = weights[j];
      for (int64_t c = 0; c < e.width; ++c) to[c] += weight * from[c];
    }
  });
}
