// Layers that keep a state per sequence: the causal convolution before them, Mamba-2's scan, the gated delta rule.
//
// A sequence's tokens come one after the other, each with the same operations, so that a position's bits depend neither
// on how its prompt was cut into steps nor on whether it was decoded. Sequences and heads run side by side.
#include "abi.h"

#include <math.h>
#include <string.h>

#define EXPORT extern "C" __attribute__((visibility("default")))
// Each clone does the same single operations (-ffp-contract=off), so all give the same bits.
#if defined(__x86_64__) && defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

namespace kvern {
namespace {

constexpr int LANES = 16;

// The S sequences of a step. rows[s] is where the state of sequence s lies, -1: it has none and keeps none; one that is
// `fresh` starts from zeros.
struct Sequences {
  int64_t count;
  const int32_t* query_start;  // [S + 1]
  const int64_t* rows;         // [S]
  const uint8_t* fresh;        // [S]
};

float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

// The state of `size` floats to go on with.
float* state_of(const Sequences& all, int64_t s, float* states, int64_t row_floats, int64_t offset, int64_t size,
                int slot) {
  float* state = all.rows[s] < 0 ? (float*)scratch(slot, size * 4) : states + all.rows[s] * row_floats + offset;
  if (all.rows[s] < 0 || all.fresh[s]) memset(state, 0, size * 4);
  return state;
}

CLONES void convolve(const float* const* inputs, const float* weight, int64_t weight_row, const float* bias,
                     int64_t width, int64_t channels, float* out) {
  for (int64_t c = 0; c < channels; ++c) out[c] = bias ? bias[c] : 0.0f;
  for (int64_t j = 0; j < width; ++j) {
    const float *x = inputs[j], *w = weight + j * weight_row;
    for (int64_t c = 0; c < channels; ++c) out[c] += w[c] * x[c];
  }
}

// h [P, N] = decay · h + dt · x ⊗ b;  y [P] = h · c + d · x
CLONES void scan_token(float* h, const float* x, const float* b, const float* c, float decay, float dt, float d,
                       int64_t P, int64_t N, float* y) {
  for (int64_t p = 0; p < P; ++p, h += N) {
    const float scaled = x[p] * dt;
    float sums[LANES] = {};
    int64_t n = 0;
    for (; n + LANES <= N; n += LANES) {
      for (int l = 0; l < LANES; ++l) {
        h[n + l] = h[n + l] * decay + scaled * b[n + l];
        sums[l] += h[n + l] * c[n + l];
      }
    }
    for (int l = 0; n < N; ++n, ++l) {
      h[n] = h[n] * decay + scaled * b[n];
      sums[l] += h[n] * c[n];
    }
    for (int half = LANES / 2; half > 0; half /= 2) {
      for (int l = 0; l < half; ++l) sums[l] += sums[l + half];
    }
    y[p] = sums[0] + d * x[p];
  }
}

// s [K, V] = decay · s;  s += k ⊗ beta (v − sᵀk);  out [V] = sᵀq.  memory: [V]
CLONES void delta_token(float* s, const float* q, const float* k, const float* v, float decay, float beta, int64_t K,
                        int64_t V, float* memory, float* out) {
  for (int64_t j = 0; j < V; ++j) memory[j] = out[j] = 0;
  for (int64_t i = 0; i < K; ++i) {
    float* row = s + i * V;
    for (int64_t j = 0; j < V; ++j) {
      row[j] *= decay;
      memory[j] += row[j] * k[i];
    }
  }
  for (int64_t j = 0; j < V; ++j) memory[j] = (v[j] - memory[j]) * beta;
  for (int64_t i = 0; i < K; ++i) {
    float* row = s + i * V;
    for (int64_t j = 0; j < V; ++j) {
      row[j] += k[i] * memory[j];
      out[j] += row[j] * q[i];
    }
  }
}

// out = x · scale / √(Σx² + eps)
void normalize(const float* x, int64_t size, float eps, float scale, float* out) {
  float sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += x[i] * x[i];
  const float factor = scale / sqrtf(sum + eps);
  for (int64_t i = 0; i < size; ++i) out[i] = x[i] * factor;
}

}  // namespace
}  // namespace kvern

using namespace kvern;

// x [T, C] with rows x_row apart, weight [width, C], states [rows, width − 1, C] → out [T, C], SiLU included.
EXPORT void kvern_causal_conv(int threads, const float* x, int64_t x_row, const float* weight, const float* bias,
                              int64_t channels, int64_t width, float* states, int64_t sequences,
                              const int32_t* query_start, const int64_t* rows, const uint8_t* fresh, float* out) {
  constexpr int64_t PART = 256;
  constexpr int64_t MAX_WIDTH = 16;
  const Sequences all{sequences, query_start, rows, fresh};
  const int64_t parts = (channels + PART - 1) / PART, kept = width - 1;
  parallel(threads, sequences * parts, [&](int64_t task, int) {
    const int64_t s = task / parts, first = task % parts * PART;
    const int64_t count = channels - first < PART ? channels - first : PART;
    const int64_t begin = query_start[s], length = query_start[s + 1] - begin;
    float past[MAX_WIDTH - 1][PART] = {};  // the inputs before this step's
    float* state = rows[s] < 0 ? nullptr : states + rows[s] * kept * channels + first;
    if (state && !fresh[s]) {
      for (int64_t i = 0; i < kept; ++i) memcpy(past[i], state + i * channels, count * 4);
    }
    auto input = [&](int64_t t) { return t < 0 ? (const float*)past[kept + t] : x + (begin + t) * x_row + first; };
    for (int64_t t = 0; t < length; ++t) {
      const float* inputs[MAX_WIDTH];
      for (int64_t j = 0; j < width; ++j) inputs[j] = input(t - kept + j);
      float* to = out + (begin + t) * channels + first;
      convolve(inputs, weight + first, channels, bias ? bias + first : nullptr, width, count, to);
      for (int64_t c = 0; c < count; ++c) to[c] /= 1 + expf(-to[c]);
    }
    for (int64_t i = 0; state && i < kept; ++i) memcpy(state + i * channels, input(length - kept + i), count * 4);
  });
}

// x [T, H, P], dt [T, H], b and c [T, G, N] (rows x_row, dt_row, b_row, c_row apart), a, d, dt_bias [H],
// states [rows, H, P, N] → out [T, H, P].
EXPORT void kvern_mamba_scan(int threads, const float* x, int64_t x_row, const float* dt, int64_t dt_row,
                             const float* b, int64_t b_row, const float* c, int64_t c_row, const float* a,
                             const float* d, const float* dt_bias, float dt_least, float dt_most, int64_t heads,
                             int64_t groups, int64_t P, int64_t N, float* states, int64_t sequences,
                             const int32_t* query_start, const int64_t* rows, const uint8_t* fresh, float* out) {
  const Sequences all{sequences, query_start, rows, fresh};
  parallel(threads, sequences * heads, [&](int64_t task, int) {
    const int64_t s = task / heads, head = task % heads, group = head / (heads / groups);
    float* h = state_of(all, s, states, heads * P * N, head * P * N, P * N, 0);
    for (int64_t t = query_start[s]; t < query_start[s + 1]; ++t) {
      float step = softplus(dt[t * dt_row + head] + dt_bias[head]);
      step = step < dt_least ? dt_least : step > dt_most ? dt_most : step;
      scan_token(h, x + t * x_row + head * P, b + t * b_row + group * N, c + t * c_row + group * N,
                 expf(step * a[head]), step, d[head], P, N, out + (t * heads + head) * P);
    }
  });
}

// q, k [T, HK, K], v [T, HV, V], a, b [T, HV] (rows q_row … apart), rate, dt_bias [HV], states [rows, HV, K, V]
// → out [T, HV, V].
EXPORT void kvern_gated_delta_scan(int threads, const float* q, int64_t q_row, const float* k, int64_t k_row,
                                   const float* v, int64_t v_row, const float* a, int64_t a_row, const float* b,
                                   int64_t b_row, const float* rate, const float* dt_bias, int64_t key_heads,
                                   int64_t heads, int64_t K, int64_t V, float* states, int64_t sequences,
                                   const int32_t* query_start, const int64_t* rows, const uint8_t* fresh, float* out) {
  const Sequences all{sequences, query_start, rows, fresh};
  parallel(threads, sequences * heads, [&](int64_t task, int) {
    const int64_t s = task / heads, head = task % heads, shared = head / (heads / key_heads);
    float* state = state_of(all, s, states, heads * K * V, head * K * V, K * V, 0);
    float* query = (float*)scratch(1, (2 * K + V) * 4);
    float *key = query + K, *memory = key + K;
    for (int64_t t = query_start[s]; t < query_start[s + 1]; ++t) {
      normalize(q + t * q_row + shared * K, K, 1e-6f, 1 / sqrtf((float)K), query);
      normalize(k + t * k_row + shared * K, K, 1e-6f, 1, key);
      const float decay = expf(rate[head] * softplus(a[t * a_row + head] + dt_bias[head]));
      const float beta = 1 / (1 + expf(-b[t * b_row + head]));
      delta_token(state, query, key, v + t * v_row + head * V, decay, beta, K, V, memory,
                  out + (t * heads + head) * V);
    }
  });
}
