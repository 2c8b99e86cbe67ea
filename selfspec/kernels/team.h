// The threads that run one program together: what each of them takes of a piece of work, and where they wait.

#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#if !defined(_WIN32)
#include <dlfcn.h>
#include <pthread.h>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

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
      tries < kTries ? relax() : std::this_thread::yield();
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

// Threads that wait for work beside the one that asks for it, where the process has no OpenMP.
class Team {
 public:
  // The team of this process; a child of `fork` has one of its own, since threads do not come along.
  static Team& here() {
    static std::atomic<Team*> team{made(&team)};
    return *team.load(std::memory_order_acquire);
  }

  // Calls `work` with each of `wanted` members at once; with one where others use the team now.
  template <typename Work>
  void run(int wanted, const Work& work) {
    const std::unique_lock<std::mutex> alone(used_, std::try_to_lock);
    if (!alone.owns_lock()) {
      Barrier barrier(1);
      return work(Member{0, 1}, barrier);
    }
    const int64_t done = number_.load(std::memory_order_relaxed);
    for (; threads_ < wanted - 1; ++threads_) std::thread(&Team::serve, this, threads_ + 1, done).detach();
    Barrier barrier(wanted);
    task_ = [](const void* given, Member member, Barrier& meet) { (*static_cast<const Work*>(given))(member, meet); };
    given_ = &work;
    barrier_ = &barrier;
    members_ = wanted;
    left_.store(threads_, std::memory_order_relaxed);
    {
      const std::lock_guard<std::mutex> guard(sleep_);
      number_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    work(Member{0, wanted}, barrier);
    for (int tries = 0; left_.load(std::memory_order_acquire) > 0; ++tries) {
      tries < kTries ? relax() : std::this_thread::yield();
    }
  }

 private:
  static constexpr int kTries = 4096;

  static Team* made([[maybe_unused]] std::atomic<Team*>* team) {
#if !defined(_WIN32)
    static std::atomic<Team*>* const kept = team;
    pthread_atfork(nullptr, nullptr, [] { kept->store(new Team, std::memory_order_release); });
#endif
    return new Team;
  }

  // `done` tasks are over.
  void serve(int number, int64_t done) {
    while (true) {
      for (int tries = 0; number_.load(std::memory_order_acquire) == done && tries < kTries; ++tries) relax();
      if (number_.load(std::memory_order_acquire) == done) {
        std::unique_lock<std::mutex> guard(sleep_);
        wake_.wait(guard, [&] { return number_.load(std::memory_order_acquire) != done; });
      }
      ++done;
      if (number < members_) task_(given_, Member{number, members_}, *barrier_);
      left_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  std::mutex used_, sleep_;
  std::condition_variable wake_;
  std::atomic<int64_t> number_{0};
  std::atomic<int> left_{0};
  int threads_ = 0;
  void (*task_)(const void*, Member, Barrier&) = nullptr;
  const void* given_ = nullptr;
  Barrier* barrier_ = nullptr;
  int members_ = 0;
};

// OpenMP of the process, which is torch's: its threads look for work for milliseconds after each of torch's operations,
// so that others beside them would have half a core each.
class OpenMP {
 public:
  static const OpenMP& here() {
    static const OpenMP found;
    return found;
  }

  explicit operator bool() const { return parallel_ && number_ && count_; }

  template <typename Work>
  void run(int wanted, const Work& work) const {
    struct Given {
      const Work& work;
      const OpenMP& openmp;
      std::atomic<Barrier*> barrier{nullptr};
    } given{work, *this};
    parallel_(
        [](void* held) {
          auto& given = *static_cast<Given*>(held);
          const Member member{given.openmp.number_(), given.openmp.count_()};
          // There may be fewer threads than asked for. Nobody goes on before they are counted.
          if (member.number == 0) given.barrier.store(new Barrier(member.members), std::memory_order_release);
          while (!given.barrier.load(std::memory_order_acquire)) std::this_thread::yield();
          given.work(member, *given.barrier.load(std::memory_order_acquire));
        },
        &given, wanted, 0);
    delete given.barrier.load(std::memory_order_acquire);
  }

 private:
  OpenMP() {
#if !defined(_WIN32)
    parallel_ = reinterpret_cast<decltype(parallel_)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    number_ = reinterpret_cast<decltype(number_)>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
    count_ = reinterpret_cast<decltype(count_)>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"));
#endif
  }

  void (*parallel_)(void (*work)(void*), void* given, unsigned threads, unsigned flags) = nullptr;
  int (*number_)() = nullptr;
  int (*count_)() = nullptr;
};

// Calls `work` with each of at most `wanted` members at once, and with a barrier for them.
template <typename Work>
void run_together(int wanted, const Work& work) {
  if (wanted < 2) {
    Barrier barrier(1);
    work(Member{0, 1}, barrier);
  } else if (OpenMP::here()) {
    OpenMP::here().run(wanted, work);
  } else {
    Team::here().run(wanted, work);
  }
}
