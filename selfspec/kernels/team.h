// The threads that run one program together: what each of them takes of a piece of work, and where they wait.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Waiting costs tens of nanoseconds where every thread has a core, since nobody sleeps.
class Barrier {
 public:
  explicit Barrier(int members) : members_(members) {}

  void wait() {
    if (members_ == 1) return;
    const int round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int tries = 0; round_.load(std::memory_order_acquire) == round; ++tries) {
      // Whoever is waited for may need this core.
      if (tries >= kTries) std::this_thread::yield();
#if defined(__x86_64__)
      else _mm_pause();
#endif
    }
  }

 private:
  static constexpr int kTries = 4096;
  const int members_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> round_{0};
};

struct Range {
  int64_t begin;
  int64_t end;
};

struct Member {
  int number;
  int members;

  // This thread's share of `count` equal pieces, cut at multiples of `step`.
  Range share(int64_t count, int64_t step = 1) const {
    const int64_t steps = (count + step - 1) / step;
    const auto cut = [&](int64_t part) { return std::min(count, steps * part / members * step); };
    return {cut(number), cut(number + 1)};
  }
};
