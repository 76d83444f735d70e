// Calls the library's C interface with odd shapes and compares with double precision. Exit status 1 on a difference.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <vector>

#include "abi.h"

extern "C" {
const char* kvern_variant();
void kvern_pack(int threads, const void* weight, int type, void* panels, int64_t n, int64_t k);
void kvern_pack_codes(int threads, const uint8_t* codes, int bits, uint8_t* panels, int64_t n, int64_t k,
                      int64_t padded);
void kvern_linear(int threads, const void* x, int64_t x_row, int x_type, const void* weight, int weight_type,
                  const void* bias, void* y, int y_type, int64_t m, int64_t n, int64_t k);
void kvern_norm(int threads, const void* x, int64_t x_row, const void* residual, int64_t residual_row, int type,
                const void* weight, int weight_type, void* out, void* total, int64_t rows, int64_t dim, float eps);
void kvern_gate(int threads, const void* x, int64_t x_row, int type, void* out, int64_t rows, int64_t inner,
                int activation);
int kvern_attention(int threads, const void* q, int64_t q_row, int64_t q_head, int q_type, void* out, float* lse,
                    int64_t tokens, int64_t query_heads, void* keys, void* values, const int64_t* shape,
                    const int32_t* tables, int64_t table_row, int64_t max_blocks, const int32_t* query_start,
                    const int32_t* seq_lens, int64_t sequences, float scale, float value_scale, float softcap,
                    int64_t window, const float* slopes, const float* sinks, int causal, const int32_t* key_ends);
}

using kvern::BF16, kvern::F32, kvern::QUANTIZED;
constexpr int THREADS = 2;

static int failures = 0;

static double uniform() {  // xorshift64, in [-1, 1)
  static uint64_t state = 88172645463325252ull;
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return (double)(state >> 11) / (double)(1ull << 52) - 1.0;
}

static uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static double from_bf16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Numbers of one type, and the same in double precision.
struct Values {
  int type;
  std::vector<float> wide;
  std::vector<uint16_t> narrow;
  Values(int type, size_t count) : type(type) {
    for (size_t i = 0; i < count; ++i) wide.push_back((float)uniform()), narrow.push_back(to_bf16(wide.back()));
  }
  void* data() { return type == F32 ? (void*)wide.data() : (void*)narrow.data(); }
  double operator[](size_t i) const { return type == F32 ? wide[i] : from_bf16(narrow[i]); }
};

static void expect(const char* what, const Values& seen, const std::vector<double>& wanted) {
  const double tolerance = seen.type == F32 ? 1e-5 : 8e-3;
  double worst = 0, size = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const double difference = fabs(seen[i] - wanted[i]);
    worst = difference > worst || difference != difference ? difference : worst;
    size = fmax(size, fabs(wanted[i]));
  }
  const bool fine = worst <= tolerance * size;
  printf("%-28s %s  error %.1e of %.1e\n", what, fine ? "ok" : "WRONG", worst, size);
  failures += !fine;
}

static void check_linear(int type, int64_t m, int64_t n, int64_t k) {
  Values x(type, m * k), weight(type, n * k), y(type, m * n);
  std::vector<uint8_t> panels((n + 15) / 16 * 16 * (k + 31) / 32 * 32 * 4);
  kvern_pack(THREADS, weight.data(), type, panels.data(), n, k);
  kvern_linear(THREADS, x.data(), k, type, panels.data(), type, nullptr, y.data(), type, m, n, k);
  std::vector<double> wanted(m * n);
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j)
      for (int64_t p = 0; p < k; ++p) wanted[i * n + j] += x[i * k + p] * weight[j * k + p];
  char name[64];
  snprintf(name, sizeof name, "linear %s %dx%dx%d", type == F32 ? "f32" : "bf16", (int)m, (int)n, (int)k);
  expect(name, y, wanted);
}

// Codes of `bits` with one zero point, a scale for each group of 32 inputs.
static void check_quantized(int bits, int64_t m, int64_t n, int64_t k) {
  const int64_t group = 32, groups = (k + group - 1) / group, panels = (n + 15) / 16;
  Values x(F32, m * k), y(F32, m * n);
  std::vector<uint8_t> codes(n * k), packed(panels * 16 * groups * group);
  std::vector<float> scales(panels * groups * 16);
  for (uint8_t& code : codes) code = (uint8_t)((uniform() + 1) / 2 * (1 << bits));
  for (float& scale : scales) scale = (float)(0.01 * (uniform() + 2));
  kvern_pack_codes(THREADS, codes.data(), bits, packed.data(), n, k, groups * group);
  kvern::Quantized weight = {packed.data(), (uint8_t*)scales.data(), nullptr, groups * group, group, groups, 1,
                             groups * 64, bits, kvern::FLOAT_ZERO, 1 << (bits - 1), 16};
  kvern_linear(THREADS, x.data(), k, F32, &weight, QUANTIZED, nullptr, y.data(), F32, m, n, k);
  std::vector<double> wanted(m * n);
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j)
      for (int64_t p = 0; p < k; ++p)
        wanted[i * n + j] += x[i * k + p] * scales[(j / 16 * groups + p / group) * 16 + j % 16] *
                             (codes[j * k + p] - weight.zero);
  char name[64];
  snprintf(name, sizeof name, "linear %d bits %dx%dx%d", bits, (int)m, (int)n, (int)k);
  expect(name, y, wanted);
}

static void check_norm_and_gate(int type, int64_t rows, int64_t dim) {
  Values x(type, rows * dim), weight(type, dim), out(type, rows * dim), gated(type, rows * dim / 2);
  kvern_norm(THREADS, x.data(), dim, nullptr, 0, type, weight.data(), type, out.data(), nullptr, rows, dim, 1e-6f);
  kvern_gate(THREADS, x.data(), dim, type, gated.data(), rows, dim / 2, 0);
  std::vector<double> normed(rows * dim), silu(rows * dim / 2);
  for (int64_t r = 0; r < rows; ++r) {
    double squares = 0;
    for (int64_t d = 0; d < dim; ++d) squares += x[r * dim + d] * x[r * dim + d];
    for (int64_t d = 0; d < dim; ++d)
      normed[r * dim + d] = x[r * dim + d] / sqrt(squares / dim + 1e-6) * weight[d];
    for (int64_t d = 0; d < dim / 2; ++d) {
      const double gate = x[r * dim + d];
      silu[r * dim / 2 + d] = gate / (1 + exp(-gate)) * x[r * dim + dim / 2 + d];
    }
  }
  expect(type == F32 ? "norm f32" : "norm bf16", out, normed);
  expect(type == F32 ? "silu gate f32" : "silu gate bf16", gated, silu);
}

// One sequence that decodes one token after `length` - 1 others; blocks in reverse order.
static void check_attention(int type, int64_t length, int64_t heads, int64_t group, int64_t dim) {
  const int64_t block = 16, blocks = (length + block - 1) / block;
  const int64_t head = block * dim, all = blocks * heads * head;
  Values q(type, heads * group * dim), keys(type, all), values(type, all), out(type, heads * group * dim);
  std::vector<int32_t> table;
  for (int64_t b = 0; b < blocks; ++b) table.push_back((int32_t)(blocks - 1 - b));
  const int64_t shape[14] = {blocks, heads, block, dim, dim, type, heads * head, head, dim, 1, heads * head, head, dim, 1};
  const int32_t query_start[2] = {0, 1}, seq_lens[1] = {(int32_t)length};
  const float scale = 1 / sqrtf((float)dim);
  const int status =
      kvern_attention(THREADS, q.data(), heads * group * dim, dim, type, out.data(), nullptr, 1, heads * group,
                      keys.data(), values.data(), shape, table.data(), blocks, blocks, query_start, seq_lens, 1, scale,
                      1.0f, 0.0f, 0, nullptr, nullptr, 1, nullptr);
  std::vector<double> wanted(heads * group * dim);
  for (int64_t h = 0; h < heads * group; ++h) {
    auto at = [&](int64_t t) { return table[t / block] * heads * head + h / group * head + t % block * dim; };
    std::vector<double> weights(length);
    double total = 0;
    for (int64_t t = 0; t < length; ++t) {
      double product = 0;
      for (int64_t d = 0; d < dim; ++d) product += q[h * dim + d] * keys[at(t) + d];
      total += weights[t] = exp(product * scale);
    }
    for (int64_t t = 0; t < length; ++t)
      for (int64_t d = 0; d < dim; ++d) wanted[h * dim + d] += weights[t] / total * values[at(t) + d];
  }
  failures += status != 0;
  expect(type == F32 ? "attention f32" : "attention bf16", out, wanted);
}

int main() {
  printf("variant %s\n", kvern_variant());
  for (int type : {F32, BF16}) {
    for (int64_t m : {1, 5, 33}) check_linear(type, m, 37, 70);
    check_norm_and_gate(type, 3, 74);
    check_attention(type, 53, 2, 3, 64);
    check_attention(type, 700, 1, 4, 128);
  }
  for (int64_t m : {1, 5, 33}) check_quantized(4, m, 37, 70), check_quantized(8, m, 37, 70);
  return failures != 0;
}
