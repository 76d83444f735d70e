// Mixture of experts: the structures that cross the border, and what a stack of layers calls (moe.cpp).
#pragma once

#include "abi.h"

namespace kvern {

struct Experts {
  const Projection *gate_up, *down;  // [count]
  int64_t count, total;              // held here; ids of the model
  const int32_t* map;                // [total]: place among those held or -1; null: ids are places
  int64_t width, inner, activation;
};

// How a token's experts are chosen: see reference_moe.moe_route.
struct Routing {
  int64_t experts, top_k, sigmoid, renormalize;
  const float* bias;  // [experts] or null
  int64_t groups, top_groups;
  float scale;
};

// logits [tokens, experts] → weights, ids [tokens, top_k].
void choose_experts(int threads, const Routing& r, const float* logits, int64_t tokens, float* weights, int32_t* ids);

// x [tokens, width] of `type` → out [tokens, width] of the same; counts [total] grow by who was chosen, or null.
void run_experts(int threads, const Experts& e, const void* x, int64_t x_row, Type type, int64_t tokens,
                 const float* weights, const int32_t* ids, int64_t top_k, int32_t* counts, void* out);

}  // namespace kvern
