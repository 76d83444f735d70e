// Softmax over one part of the context, and the folding of parts. Scores are kept in units of log 2.
#pragma once

#include "attention_math.h"

namespace KVERN_ISA {

constexpr float NEVER = -__builtin_inff();
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// The softmax state of some query rows: running maximum, sum of weights, weighted values [rows][width].
struct State {
  float *maximum, *sum, *acc;
};

INLINE void clear(const State& s, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; ++r) s.maximum[r] = NEVER, s.sum[r] = 0.0f;
  memset(s.acc, 0, rows * width * sizeof(float));
}

// How a product of query and key becomes a score, beside the scale.
struct ScoreRule {
  float scale;          // by which products are multiplied
  float softcap;        // c > 0: c tanh(score / c)
  float slope;          // ALiBi: slope x (key - query) is added
  const float* scales;  // of each key of the part, or null
};

INLINE V16 lane_numbers() {
  alignas(64) static constexpr float numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(numbers);
}

// The full rule, in place on keys [from, to), whole groups; `distance` is key 0's position less the query's.
static void apply(const ScoreRule& rule, float* scores, int64_t from, int64_t to, int64_t distance) {
  for (int64_t k = from; k < to; k += LANES) {
    V16 s = load(scores + k) * set1(rule.scale);
    if (rule.scales) s = s * load(rule.scales + k);
    if (rule.softcap > 0.0f) s = tanh(s * set1(1.0f / rule.softcap)) * set1(rule.softcap);
    if (rule.slope != 0.0f) s = fma(set1(rule.slope), set1((float)(distance + k)) + lane_numbers(), s);
    store(scores + k, s);
  }
}

// Scores of keys [first, last) become weights 2^(score - maximum), and those of the rest of [begin, end) zero. All
// count from the part's first key; begin and end are whole groups. Value scales, where given, multiply the weights
// that meet values, but not their sum.
template <class M>
static void softmax_row(const ScoreRule& rule, float* scores, int64_t begin, int64_t end, int64_t first, int64_t last,
                        int64_t distance, const float* value_scales, typename M::Word* weights, float* maximum,
                        float* sum) {
  const int64_t from = first / LANES * LANES, to = (last + LANES - 1) / LANES * LANES;
  float scale = rule.scale * LOG2_E;
  if (rule.softcap > 0.0f || rule.slope != 0.0f || rule.scales || !(scale > 0.0f)) {
    apply(rule, scores, from, to, distance);
    scale = LOG2_E;
  }
  for (int64_t k = from; k < first; ++k) scores[k] = NEVER;
  for (int64_t k = last; k < to; ++k) scores[k] = NEVER;
  V16 peak = load(scores + from), other = peak;
  int64_t k = from + LANES;
  for (; k + 2 * LANES <= to; k += 2 * LANES) {
    peak = max(peak, load(scores + k));
    other = max(other, load(scores + k + LANES));
  }
  if (k < to) peak = max(peak, load(scores + k));
  const float now = hmax(max(peak, other)) * scale;
  const V16 factor = set1(scale), origin = set1(-now);
  V16 total = zero();
  for (k = begin; k < from; k += LANES) M::put_weights(weights, k, zero());
  for (; k < to; k += LANES) {
    V16 w = exp2<M::EXP_DEGREE>(fma(load(scores + k), factor, origin));
    total = total + w;
    if (value_scales) w = w * load(value_scales + k);
    M::put_weights(weights, k, w);
  }
  for (; k < end; k += LANES) M::put_weights(weights, k, zero());
  *maximum = now;
  *sum = hsum(total);
}

// 2^x of one number, the same bits as in a vector.
INLINE float exp2_of(float x) {
  float t[LANES];
  store(t, exp2<6>(set1(x)));
  return t[0];
}

// Adds a part that a row saw to its total.
INLINE void fold_row(float* maximum, float* sum, float* acc, float part_maximum, float part_sum, const float* part,
                     int64_t width) {
  float now = part_maximum > *maximum ? part_maximum : *maximum;
  float keep = exp2_of(*maximum - now), add = exp2_of(part_maximum - now);
  *sum = *sum * keep + part_sum * add;
  *maximum = now;
  for (int64_t d = 0; d < width; d += LANES) {
    store(acc + d, fma(load(acc + d), set1(keep), load(part + d) * set1(add)));
  }
}

}  // namespace KVERN_ISA
