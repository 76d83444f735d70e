// What a variant offers to the dispatcher in kernels.cpp, and the structures that cross the border.
#pragma once

#include <stdint.h>

namespace kvern {

enum Type : int32_t { F32 = 0, BF16 = 1, F16 = 2, QUANTIZED = 3, E4M3 = 16, E5M2 = 17, I8 = 18 };
constexpr int64_t TYPE_BYTES[] = {4, 2, 2};

// Rows of heads, or of plain vectors: element (t, h, d) lies at data + t * row + h * head + d.
struct Rows {
  const void* data;
  int64_t row, head;
  Type type;
};

// y[m, n] = x[m, k] · panels + bias, y contiguous. Weights come in panels of 16 outputs:
// F32 [n / 16][k][16]; BF16 [n / 16][k / 2][16][2], pairs along k, zero-padded to a multiple of 32 along k and
// to whole panels; QUANTIZED is the address of a Quantized, E4M3 of an Fp8.
struct Linear {
  const void* x;
  int64_t x_row;
  Type x_type;
  const void* weight;
  Type weight_type;
  const float* bias;  // [n] rounded up to 16, or null
  void* y;
  Type y_type;
  int64_t m, n, k;
  int threads;
};

// How the factors of 16 outputs lie, per group: scales, then (MINIMUM) minima or (ZEROS) zero points. Of the
// others all codes have one zero point. K-quants (SUPER) begin a super-block with 16 halves d, then
// (MINIMUM) 16 halves dmin; a group's scale and minimum are bytes that multiply these.
enum FactorKind : int32_t {
  FLOAT_ZERO,     // 16 floats
  FLOAT_MINIMUM,  // 16 floats, 16 floats
  HALF_ZERO,      // 16 halves
  HALF_ZEROS,     // 16 halves, 16 bytes
  HALF_MINIMUM,   // 16 halves, 16 halves
  SUPER_MINIMUM,  // 16 bytes, 16 bytes
  SUPER_ZERO,     // 16 signed bytes
};

// Integer weights in panels of 16 outputs: codes [n / 16][k / unit][unit] (units: integers.h), and
// [n / 16][factor_bytes]. k is padded to whole groups; groups = k / group, in super-blocks of groups_per_super.
struct Quantized {
  const uint8_t *codes, *factors;
  const int32_t* order;  // input of each k below the unpadded one, or null
  int64_t k, group, groups, groups_per_super, factor_bytes;
  int32_t bits;  // of a stored code: 4, 6 or 8
  FactorKind kind;
  int32_t zero, activation_bits;  // of x in the product: 8 or 16
};

// e4m3fn weights in panels like those of BF16, one byte each, and the scale of each group of inputs,
// [n / 16][groups][16]. k is padded as in the panels; the last group may be shorter.
struct Fp8 {
  const uint8_t* codes;
  const float* scales;
  int64_t k, group, groups;
};

// A packed linear layer as the structures of whole layers hold it.
struct Projection {
  const void *weight, *bias;
  int64_t type, n, k;
};

// Keys [blocks, heads, block_size, dim], the strides as given; values likewise with value_dim, all of one type.
// I8: behind the codes of a block and head, block_size float32 scales, one for each token.
struct Cache {
  void *keys, *values;
  int64_t key_strides[4], value_strides[4];
  int64_t blocks, heads, block_size, dim, value_dim;
  Type type;
};

struct Attention {
  Rows q;
  void* out;   // [tokens, query_heads, value_dim] contiguous, q's type
  float* lse;  // [tokens, query_heads], or null
  int64_t query_heads;
  Cache cache;
  const int32_t* block_tables;
  int64_t table_row;
  const int32_t* query_start;
  const int32_t* seq_lens;
  int64_t sequences;
  float scale, value_scale, softcap;  // value_scale multiplies the result
  int64_t window;
  const float *slopes, *sinks;  // of ALiBi, and logits of a key without a value; [query_heads] or null
  bool causal;
  const int32_t* key_ends;  // [tokens]: a query also sees the keys from its own up to this; or null
  int threads;
};

struct Rope {
  Rows q, k, v;
  void* q_out;  // [tokens, query_heads, dim] contiguous, q's type
  int64_t tokens, query_heads;
  const void* positions;
  bool positions_64;
  const float* cos_sin;  // [max_positions, rotary]
  int64_t max_positions, rotary;
  const int64_t* slots;
  Cache cache;
  bool interleaved;
  const void *q_norm, *k_norm;  // [dim] of norm_type, or null
  Type norm_type;
  float eps;
  int threads;
};

// out = norm(x [+ residual]) * weight, all [rows, dim]; with a residual, total = x + residual.
struct Norm {
  Rows x, residual;
  const void* weight;
  Type weight_type;
  void *out, *total;
  int64_t rows, dim;
  float eps;
  int threads;
};

enum Activation : int32_t { SILU = 0, GELU = 1, SWIGLU_OAI = 2 };

struct Gate {
  Rows x;     // [rows, 2 * inner]
  void* out;  // [rows, inner] contiguous
  int64_t rows, inner;
  Activation activation;
  int threads;
};

// out[t] = the sum over j of weights[t, j] * parts[places[t, j]], in the order of j; a place of -1 adds nothing.
struct Combine {
  const float* parts;     // [..., width]
  const int64_t* places;  // [rows, top_k]
  const float* weights;   // likewise
  int64_t rows, top_k, width;
  void* out;  // [rows, width] contiguous of `type`
  Type type;
  int threads;
};

// LoRA: row t takes adapter adapters[t], none where that is not one of `count`.
struct LoraShrink {
  const void* x;  // [tokens, k]
  int64_t x_row;
  Type x_type;
  const void* a;  // [count, outputs, k] contiguous
  Type a_type;
  const int32_t* adapters;
  int64_t count;
  float* out;  // [tokens, outputs]: a slice's ranks, then the next slice's
  int64_t tokens, outputs, k;
  int threads;
};

struct LoraExpand {
  const float* hidden;  // [tokens, slices, rank]
  const void* b;        // [count, rank, n] contiguous
  Type b_type;
  const float* scales;  // [count]; 0: the adapter adds nothing
  const int32_t* adapters;
  int64_t count;
  void* out;  // [tokens, n], added to
  int64_t out_row;
  Type out_type;
  const int64_t* widths;  // [slices], outputs of each
  int64_t tokens, slices, rank, n;
  int threads;
};

struct Ops {
  const char* name;
  void (*linear)(const Linear&);
  void (*dequantize)(const Quantized&, int64_t panel, float* out);  // → [k][16]
  void (*attention)(const Attention&);
  void (*rope_and_store)(const Rope&);
  void (*norm)(const Norm&);
  void (*gate)(const Gate&);
  void (*combine)(const Combine&);
  void (*lora_shrink)(const LoraShrink&);
  void (*lora_expand)(const LoraExpand&);
};

constexpr int OK = 0, OUT_OF_RANGE = 1;

// The ops of the variant in use.
const Ops& active();
// A cache from its shape: blocks, heads, block_size, dim, value_dim, type, four strides of keys, four of values.
Cache cache_of(void* keys, void* values, const int64_t* shape);
// Whether every index that a call would follow stays inside its tensor.
bool tables_fit(const Attention& a, int64_t tokens, int64_t max_blocks);
bool slots_fit(const Rope& a);

// Grows, never shrinks; one per calling thread. Slots 0 to 7 are separate buffers.
void* scratch(int slot, int64_t bytes);

// run(context, task, thread) for each task, on the caller (thread 0) and at most threads - 1 helpers.
void run_parallel(int threads, int64_t tasks, void (*run)(void*, int64_t, int), void* context);

template <class F>
static inline void parallel(int threads, int64_t tasks, const F& f) {
  run_parallel(
      threads, tasks, [](void* context, int64_t task, int thread) { (*(const F*)context)(task, thread); }, (void*)&f);
}

}  // namespace kvern
