// What this machine's memory gives: the limit that benchmarks compare with.
#include "abi.h"

#include <string.h>

namespace {

typedef uint64_t Line __attribute__((vector_size(64)));
constexpr int STREAMS = 8;  // a core needs several to reach its share of the bandwidth

}  // namespace

// Reads all of `data`, a multiple of 32 KiB, once. Returns a sum, so that nothing is left out.
extern "C" __attribute__((visibility("default"))) uint64_t kvern_read(int threads, const char* data, int64_t bytes) {
  const int64_t tasks = bytes / 32768;
  uint64_t total = 0;
  kvern::parallel(threads, threads, [&](int64_t part, int) {
    const int64_t first = tasks * part / threads, lines = (tasks * (part + 1) / threads - first) * 512 / STREAMS;
    const char* begin = data + first * 32768;
    Line sums[STREAMS] = {};
    for (int64_t i = 0; i < lines; ++i) {
      for (int s = 0; s < STREAMS; ++s) {
        Line line;
        memcpy(&line, begin + (s * lines + i) * 64, 64);
        sums[s] ^= line;
        __builtin_prefetch(begin + (s * lines + i) * 64 + 1024);
      }
    }
    for (int s = 1; s < STREAMS; ++s) sums[0] ^= sums[s];
    __atomic_fetch_add(&total, sums[0][0] ^ sums[0][7], __ATOMIC_RELAXED);
  });
  return total;
}
