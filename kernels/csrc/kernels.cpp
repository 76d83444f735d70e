// The library's C interface: picks a variant for this processor, checks indices, packs weights.
#include "abi.h"

#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvern {

#define DECLARE(isa)      \
  namespace isa {         \
  extern const Ops ops;   \
  }
DECLARE(portable)
#ifdef HAVE_avx2
DECLARE(avx2)
#endif
#ifdef HAVE_avx512
DECLARE(avx512)
#endif
#ifdef HAVE_avx512_vnni
DECLARE(avx512_vnni)
#endif
#ifdef HAVE_avx512_bf16
DECLARE(avx512_bf16)
#endif
#ifdef HAVE_avx512_amx
DECLARE(avx512_amx)
#endif

struct Buffer {
  void* data = nullptr;
  int64_t size = 0;
  ~Buffer() { free(data); }
};

void* scratch(int slot, int64_t bytes) {
  static thread_local Buffer buffers[8];
  Buffer& b = buffers[slot];
  if (b.size < bytes) {
    free(b.data);
    b.size = (bytes + bytes / 2 + 4095) / 4096 * 4096;
    b.data = aligned_alloc(4096, b.size);
    if (!b.data) abort();
  }
  return b.data;
}

static Ops variants[6];
static int variant_count = 0;
static const Ops* current = nullptr;

// Ops that a variant leaves out are those of the variant before it.
static void add_variant(const Ops& ops) {
  Ops& v = variants[variant_count];
  v = ops;
  if (!v.norm) {
    v = variants[variant_count - 1];
    v.name = ops.name;
    v.linear = ops.linear;
    v.dequantize = ops.dequantize;
    if (ops.attention) v.attention = ops.attention;
  }
  current = &variants[variant_count++];
}

// Matrix tiles must be asked for once per process: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA).
[[maybe_unused]] static bool tiles_granted() {
#if defined(__linux__) && defined(__x86_64__)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}

__attribute__((constructor)) static void find_variants() {
  add_variant(portable::ops);
#if defined(__x86_64__)
  __builtin_cpu_init();
#define HAS(feature) (__builtin_cpu_supports(feature) != 0)
  const bool half = HAS("avx2") && HAS("fma") && HAS("f16c");
  const bool wide = half && HAS("avx512f") && HAS("avx512bw") && HAS("avx512dq") && HAS("avx512vl");
  const bool vnni = wide && HAS("avx512vnni"), bf16 = vnni && HAS("avx512bf16");
  const bool tiles = bf16 && HAS("amx-bf16") && HAS("amx-int8") && tiles_granted();
#ifdef HAVE_avx2
  if (half) add_variant(avx2::ops);
#endif
#ifdef HAVE_avx512
  if (wide) add_variant(avx512::ops);
#endif
#ifdef HAVE_avx512_vnni
  if (vnni) add_variant(avx512_vnni::ops);
#endif
#ifdef HAVE_avx512_bf16
  if (bf16) add_variant(avx512_bf16::ops);
#endif
#ifdef HAVE_avx512_amx
  if (tiles) add_variant(avx512_amx::ops);
#endif
#endif
}

const Ops& active() { return *current; }

bool slots_fit(const Rope& a) {
  const int64_t slot_count = a.cache.blocks * a.cache.block_size;
  for (int64_t i = 0; i < a.tokens; ++i) {
    int64_t position = a.positions_64 ? ((const int64_t*)a.positions)[i] : ((const int32_t*)a.positions)[i];
    if (position < 0 || position >= a.max_positions || a.slots[i] >= slot_count) return false;
  }
  return true;
}

bool tables_fit(const Attention& a, int64_t tokens, int64_t max_blocks) {
  for (int64_t s = 0; s < a.sequences; ++s) {
    int64_t length = a.seq_lens[s], from = a.query_start[s], to = a.query_start[s + 1];
    int64_t blocks = (length + a.cache.block_size - 1) / a.cache.block_size;
    if (from < 0 || to < from || to > tokens || to - from > length || blocks > max_blocks) return false;
    if (from == to) continue;
    for (int64_t b = 0; b < blocks; ++b) {
      int32_t block = a.block_tables[s * a.table_row + b];
      if (block < 0 || block >= a.cache.blocks) return false;
    }
  }
  return true;
}

Cache cache_of(void* keys, void* values, const int64_t* shape) {
  Cache c = {keys, values, {}, {}, shape[0], shape[1], shape[2], shape[3], shape[4], (Type)shape[5]};
  memcpy(c.key_strides, shape + 6, sizeof c.key_strides);
  memcpy(c.value_strides, shape + 10, sizeof c.value_strides);
  return c;
}

}  // namespace kvern

using namespace kvern;

#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int kvern_variant_count() { return variant_count; }
EXPORT const char* kvern_variant_name(int i) { return variants[i].name; }
EXPORT const char* kvern_variant() { return current->name; }
EXPORT void kvern_use_variant(int i) { current = &variants[i]; }

// One panel: 16 rows from `row` on, DEPTH inputs of a row side by side.
template <class T, int DEPTH>
static void pack_panel(const T* weight, T* panel, int64_t row, int64_t n, int64_t k, int64_t padded) {
  memset(panel, 0, 16 * padded * sizeof(T));
  for (int64_t j = 0; j < 16 && row + j < n; ++j) {
    const T* from = weight + (row + j) * k;
    for (int64_t i = 0; i < k; ++i) panel[(i / DEPTH * 16 + j) * DEPTH + i % DEPTH] = from[i];
  }
}

// weight [n, k] contiguous of `type` F32, BF16 or E4M3 → panels (see Linear).
EXPORT void kvern_pack(int threads, const void* weight, int type, void* panels, int64_t n, int64_t k) {
  const int64_t depth = type == F32 ? 1 : 32, padded = (k + depth - 1) / depth * depth;
  parallel(threads, (n + 15) / 16, [&](int64_t p, int) {
    const int64_t at = p * 16 * padded;
    if (type == F32) {
      pack_panel<float, 1>((const float*)weight, (float*)panels + at, p * 16, n, k, padded);
    } else if (type == BF16) {
      pack_panel<uint16_t, 2>((const uint16_t*)weight, (uint16_t*)panels + at, p * 16, n, k, padded);
    } else {
      pack_panel<uint8_t, 2>((const uint8_t*)weight, (uint8_t*)panels + at, p * 16, n, k, padded);
    }
  });
}

// codes [n, k] → panels of `bits` 4, 6 or 8 (units: integers.h), k padded with zeros to `padded`.
EXPORT void kvern_pack_codes(int threads, const uint8_t* codes, int bits, uint8_t* panels, int64_t n, int64_t k,
                             int64_t padded) {
  const int64_t depth = bits == 4 ? 8 : bits == 6 ? 16 : 4, unit = bits == 6 ? 192 : 64;
  parallel(threads, (n + 15) / 16, [&](int64_t p, int) {
    uint8_t* out = panels + p * (padded / depth) * unit;
    memset(out, 0, padded / depth * unit);
    for (int64_t j = 0; j < 16 && p * 16 + j < n; ++j) {
      const uint8_t* row = codes + (p * 16 + j) * k;
      for (int64_t i = 0; i < k; ++i) {
        uint8_t* to = out + i / depth * unit + 4 * j + i % 4;
        const int quad = (int)(i % depth / 4);
        if (bits == 8) {
          *to = row[i];
          continue;
        }
        to[quad / 2 * 64] |= (uint8_t)((row[i] & 15) << (quad % 2 * 4));
        if (bits == 6) to[128] |= (uint8_t)(row[i] >> 4 << (2 * quad));
      }
    }
  });
}

// Quantized → out [n, k] float32, k unpadded and in the order of the codes.
EXPORT void kvern_dequantize(int threads, const Quantized* q, float* out, int64_t n, int64_t k) {
  parallel(threads, (n + 15) / 16, [&](int64_t p, int) {
    float* panel = (float*)scratch(6, q->k * 16 * 4);
    current->dequantize(*q, p, panel);
    for (int64_t j = 0; j < 16 && p * 16 + j < n; ++j) {
      for (int64_t i = 0; i < k; ++i) out[(p * 16 + j) * k + i] = panel[i * 16 + j];
    }
  });
}

EXPORT void kvern_linear(int threads, const void* x, int64_t x_row, int x_type, const void* weight, int weight_type,
                         const void* bias, void* y, int y_type, int64_t m, int64_t n, int64_t k) {
  if (m == 0 || n == 0) return;
  current->linear({x, x_row, (Type)x_type, weight, (Type)weight_type, (const float*)bias, y, (Type)y_type, m, n, k,
                   threads});
}

EXPORT int kvern_attention(int threads, const void* q, int64_t q_row, int64_t q_head, int q_type, void* out, float* lse,
                           int64_t tokens, int64_t query_heads, void* keys, void* values, const int64_t* shape,
                           const int32_t* tables, int64_t table_row, int64_t max_blocks, const int32_t* query_start,
                           const int32_t* seq_lens, int64_t sequences, float scale, float value_scale,
                           float softcap, int64_t window, const float* slopes, const float* sinks, int causal,
                           const int32_t* key_ends) {
  Attention a = {{q, q_row, q_head, (Type)q_type}, out, lse, query_heads, cache_of(keys, values, shape), tables,
                 table_row, query_start, seq_lens, sequences, scale, value_scale, softcap, window, slopes, sinks,
                 causal != 0, key_ends, threads};
  if (!tables_fit(a, tokens, max_blocks)) return OUT_OF_RANGE;
  current->attention(a);
  return OK;
}

EXPORT int kvern_rope_and_store(int threads, const void* q, int64_t q_row, int64_t q_head, const void* k,
                                int64_t k_row, int64_t k_head, const void* v, int64_t v_row, int64_t v_head, int type,
                                void* q_out, int64_t tokens, int64_t query_heads, const void* positions,
                                int positions_64, const float* cos_sin, int64_t max_positions, int64_t rotary,
                                const int64_t* slots, void* keys, void* values, const int64_t* shape, int interleaved,
                                const void* q_norm, const void* k_norm, int norm_type, float eps) {
  const Type t = (Type)type;
  Rope a = {{q, q_row, q_head, t}, {k, k_row, k_head, t}, {v, v_row, v_head, t}, q_out, tokens, query_heads, positions,
            positions_64 != 0, cos_sin, max_positions, rotary, slots, cache_of(keys, values, shape), interleaved != 0,
            q_norm, k_norm, (Type)norm_type, eps, threads};
  if (!slots_fit(a)) return OUT_OF_RANGE;
  current->rope_and_store(a);
  return OK;
}

EXPORT void kvern_norm(int threads, const void* x, int64_t x_row, const void* residual, int64_t residual_row, int type,
                       const void* weight, int weight_type, void* out, void* total, int64_t rows, int64_t dim,
                       float eps) {
  const Type t = (Type)type;
  current->norm({{x, x_row, 0, t}, {residual, residual_row, 0, t}, weight, (Type)weight_type, out, total, rows, dim, eps,
                 threads});
}

EXPORT void kvern_gate(int threads, const void* x, int64_t x_row, int type, void* out, int64_t rows, int64_t inner,
                       int activation) {
  current->gate({{x, x_row, 0, (Type)type}, out, rows, inner, (Activation)activation, threads});
}

// Block sources[i] → targets[i] of both caches, whose blocks are contiguous.
EXPORT int kvern_copy_blocks(void* keys, void* values, int64_t key_bytes, int64_t value_bytes, int64_t blocks,
                             const int64_t* sources, const int64_t* targets, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (sources[i] < 0 || sources[i] >= blocks || targets[i] < 0 || targets[i] >= blocks) return OUT_OF_RANGE;
  }
  const int64_t both = key_bytes + value_bytes;
  char* held = (char*)scratch(0, count * both);  // read all before writing any
  for (int64_t i = 0; i < count; ++i) {
    memcpy(held + i * both, (char*)keys + sources[i] * key_bytes, key_bytes);
    memcpy(held + i * both + key_bytes, (char*)values + sources[i] * value_bytes, value_bytes);
  }
  for (int64_t i = 0; i < count; ++i) {
    memcpy((char*)keys + targets[i] * key_bytes, held + i * both, key_bytes);
    memcpy((char*)values + targets[i] * value_bytes, held + i * both + key_bytes, value_bytes);
  }
  return OK;
}
