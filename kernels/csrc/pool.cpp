// Threads that help and are never waited for until they have begun.
//
// The caller publishes a job and works through its tasks itself; helpers take tasks while there are any.
// When none is left the caller closes the gate and waits only for helpers inside. So a helper that the
// system hasn't scheduled costs nothing, where the barrier of an OpenMP region would stop the caller for a
// whole time slice: on cores shared with other processes a step of 120 such regions takes ten times as long.
// A helper that is put aside in the middle of a task does stop the caller. That shows that the cores are
// wanted elsewhere, so the caller then works alone for a multiple of the time lost.
//
//   caller   publish ── tasks ── close ── wait for gate = 0
//   helper   sleep / spin on `generation` ── enter if open (gate + 1) ── tasks ── leave (gate - 1)
#include <atomic>

#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include "abi.h"

namespace kvern {
namespace {

constexpr int MAX_THREADS = 256;
constexpr uint32_t OPEN = 1u << 31;
constexpr int64_t STALL_NS = 200'000, REST_FACTOR = 20, MAX_REST_NS = 100'000'000;
constexpr int64_t SPIN_NS = 50'000;  // longer than the gap between two ops of a step

struct alignas(64) {
  std::atomic<uint32_t> generation{0};
} published;
struct alignas(64) {
  std::atomic<uint32_t> gate{0};  // OPEN | helpers inside
} door;
struct alignas(64) {
  std::atomic<int64_t> next{0};
} counter;
struct {
  void (*run)(void*, int64_t, int);
  void* context;
  int64_t tasks;
  int helpers;
} job;
std::atomic<int> sleepers{0};
std::atomic<bool> busy{false};
int64_t rest_until = 0;  // the caller works alone until then; changed only while busy is held
int started = 0;  // helper threads, changed only while busy is held
pid_t owner = 0;  // the process that they live in

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

void sleep_while(uint32_t seen) {
#if defined(__linux__)
  sleepers.fetch_add(1);
  syscall(SYS_futex, &published.generation, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
  sleepers.fetch_sub(1);
#else
  (void)seen;
  usleep(50);
#endif
}

void wake_helpers(int count) {
#if defined(__linux__)
  if (sleepers.load() > 0) syscall(SYS_futex, &published.generation, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
#else
  (void)count;
#endif
}

int64_t work(int thread) {
  for (int64_t done = 0;; ++done) {
    int64_t task = counter.next.fetch_add(1, std::memory_order_relaxed);
    if (task >= job.tasks) return done;
    job.run(job.context, task, thread);
  }
}

void* help(void* argument) {
  const int thread = (int)(intptr_t)argument;
  uint32_t seen = 0;
  for (;;) {
    int64_t until = 0;
    for (int i = 1; published.generation.load(std::memory_order_acquire) == seen; ++i) {
      pause();
      if (i % 64 != 0) continue;
      int64_t now = now_ns();
      if (until == 0) until = now + SPIN_NS;
      if (now > until) sleep_while(seen);
    }
    seen = published.generation.load(std::memory_order_acquire);
    uint32_t gate = door.gate.load(std::memory_order_relaxed);
    bool inside = false;
    while ((gate & OPEN) && !inside) {
      inside = door.gate.compare_exchange_weak(gate, gate + 1, std::memory_order_acquire, std::memory_order_relaxed);
    }
    if (!inside) continue;
    if (thread <= job.helpers) work(thread);
    door.gate.fetch_sub(1, std::memory_order_release);
  }
  return nullptr;
}

void start_helpers(int wanted) {
  if (owner != getpid()) {  // helpers do not survive a fork
    owner = getpid();
    started = 0;
    sleepers.store(0);
    door.gate.store(0);
  }
  while (started < wanted) {
    pthread_t thread;
    if (pthread_create(&thread, nullptr, help, (void*)(intptr_t)(started + 1)) != 0) return;
    pthread_detach(thread);
    ++started;
  }
}

// Until all have left. More than a task's length over STALL_NS means that one was put aside.
void wait_for_helpers(int64_t begin, int64_t done) {
  int64_t end = 0;
  for (int i = 1; door.gate.load(std::memory_order_acquire) != 0; ++i) {
    pause();
    if (end == 0) end = now_ns();
    if (i % 1024 == 0) sched_yield();
  }
  if (end == 0) return;
  const int64_t now = now_ns(), lost = now - end - 2 * (end - begin) / (done + 1);
  if (lost < STALL_NS) return;
  const int64_t rest = lost * REST_FACTOR;
  rest_until = now + (rest < MAX_REST_NS ? rest : MAX_REST_NS);
}

}  // namespace

void run_parallel(int threads, int64_t tasks, void (*run)(void*, int64_t, int), void* context) {
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  if (threads > tasks) threads = (int)tasks;
  // One job at a time: a second caller does its own alone.
  const bool alone = threads <= 1 || busy.exchange(true, std::memory_order_acquire);
  const int64_t begin = alone ? 0 : now_ns();
  if (alone || begin < rest_until) {
    if (!alone) busy.store(false, std::memory_order_release);
    for (int64_t task = 0; task < tasks; ++task) run(context, task, 0);
    return;
  }
  start_helpers(threads - 1);
  job = {run, context, tasks, threads - 1};
  counter.next.store(0, std::memory_order_relaxed);
  door.gate.store(OPEN, std::memory_order_release);
  published.generation.fetch_add(1);
  wake_helpers(threads - 1);
  const int64_t done = work(0);
  if (door.gate.fetch_and(~OPEN, std::memory_order_acq_rel) != OPEN) wait_for_helpers(begin, done);
  busy.store(false, std::memory_order_release);
}

}  // namespace kvern
