// Attention of a few queries over slots of keys and values.
//
// A query's sums run over the slots in their order, whatever other queries there are and whoever computes them.

#pragma once

#include <array>
#include <limits>
#include <vector>

#include "functions.h"
#include "lanes.h"
#include "numbers.h"

// What a query sees: the slots of a few sinks, and all from `first` on and before `end`; of the block's, where there is
// one, those in `sees`.
struct Sight {
  int64_t first_sink;
  int64_t end_of_sinks;
  int64_t first;
  int64_t end;
  int64_t block;          // first slot of the block
  const bool* sees;       // of the block's slots; null: all before `end`
  const int64_t* depths;  // of the block's slots; null: there is no window
  int64_t reach;          // smallest position that the window holds, counted from the block's

  // How many slots are seen before `first`.
  int64_t sinks() const { return end_of_sinks - first_sink; }

  bool hides(int64_t slot) const {
    if (!sees || slot < block) return false;
    return !sees[slot - block] || (depths && depths[slot - block] < reach);
  }
};

// Queries that go over slots together, and how many slots at a time: so keys and values are read from memory once for
// all of them.
constexpr int kQueriesTogether = 24;
constexpr int64_t kSlotsTogether = 64;
// With fewer, asking takes longer than it saves.
constexpr size_t kQueriesThatAsk = 6;

// Keys or values of one head, `[slots, size]`.
template <typename Slots>
struct Head {
  const typename Slots::Stored* at;
  int64_t size;

  // Asks for some slots, so that they have come from memory when they are read.
  void ask(int64_t first, int64_t end) const {
    constexpr int64_t line = 64 / sizeof(typename Slots::Stored);
    for (const auto* from = at + first * size; from < at + end * size; from += line) __builtin_prefetch(from, 0, 2);
  }

  template <int Vectors>
  inline void dots(const float* query, int64_t first, int64_t end, float* scores) const {
    constexpr int lanes = kLanes<float>;
    FloatLanes q[Vectors];
    for (int i = 0; i < Vectors; ++i) q[i] = read<float, lanes>(query + i * lanes);
    const auto product = [&](int64_t slot) {
      const auto* key = at + slot * size;
      FloatLanes sum = q[0] * Slots::lanes(key);
      for (int i = 1; i < Vectors; ++i) sum += q[i] * Slots::lanes(key + i * lanes);
      return sum;
    };
    int64_t slot = first;
    for (; slot + lanes <= end; slot += lanes) {
      FloatLanes sums[lanes];
      for (int i = 0; i < lanes; ++i) sums[i] = product(slot + i);
      const FloatLanes found = totals(sums);
      std::memcpy(scores + slot, &found, sizeof found);
    }
    for (; slot < end; ++slot) scores[slot] = total<float, lanes>(product(slot));
  }

  void score(const float* query, int64_t first, int64_t end, float* scores) const {
    constexpr int lanes = kLanes<float>;
    if (size == 4 * lanes) return dots<4>(query, first, end, scores);
    if (size == 8 * lanes) return dots<8>(query, first, end, scores);
    for (int64_t slot = first; slot < end; ++slot) {
      const auto* key = at + slot * size;
      FloatLanes sum = {};
      int64_t i = 0;
      for (; i + lanes <= size; i += lanes) sum += read<float, lanes>(query + i) * Slots::lanes(key + i);
      float found = total<float, lanes>(sum);
      for (; i < size; ++i) found += query[i] * Slots::number(key[i]);
      scores[slot] = found;
    }
  }

  template <int Vectors>
  inline void sums(const float* shares, int64_t first, int64_t end, int64_t place, float* y) const {
    constexpr int lanes = kLanes<float>;
    FloatLanes sum[Vectors];
    for (int i = 0; i < Vectors; ++i) sum[i] = read<float, lanes>(y + place + i * lanes);
    for (int64_t slot = first; slot < end; ++slot) {
      const auto* value = at + slot * size + place;
      for (int i = 0; i < Vectors; ++i) sum[i] += shares[slot] * Slots::lanes(value + i * lanes);
    }
    for (int i = 0; i < Vectors; ++i) std::memcpy(y + place + i * lanes, &sum[i], sizeof sum[i]);
  }

  // Adds the shares of some slots to `y`.
  void add(const float* shares, int64_t first, int64_t end, float* y) const {
    constexpr int lanes = kLanes<float>;
    int64_t place = 0;
    // As many sums at a time as hide how long one takes.
    for (; place + 8 * lanes <= size; place += 8 * lanes) sums<8>(shares, first, end, place, y);
    for (; place + 4 * lanes <= size; place += 4 * lanes) sums<4>(shares, first, end, place, y);
    for (; place + lanes <= size; place += lanes) sums<1>(shares, first, end, place, y);
    for (; place < size; ++place) {
      for (int64_t slot = first; slot < end; ++slot) y[place] += shares[slot] * Slots::number(at[slot * size + place]);
    }
  }
};

// One query of a head. Its scores lie in a row, those of sinks first; there is room for a vector more.
struct Query {
  const float* at;
  Sight sight;
  float* scores;
  float* y;

  // Scores by slot, of sinks and of all from `first` on.
  float* of_sinks() const { return scores - sight.first_sink; }
  float* of_recent() const { return scores + sight.sinks() - sight.first; }

  // Calls `work` with the slots that it sees of those from `begin` on and before `end`, and their scores.
  template <typename Work>
  void within(int64_t begin, int64_t end, const Work& work) const {
    const auto part = [&](int64_t first, int64_t last, float* found) {
      const int64_t from = std::max(first, begin), to = std::min(last, end);
      if (from < to) work(from, to, found);
    };
    part(sight.first_sink, sight.end_of_sinks, of_sinks());
    part(sight.first, sight.end, of_recent());
  }

  // Turns scores into shares that add up to the number returned. A cap of zero is none.
  float weigh(float scale, float cap) const {
    constexpr int lanes = kLanes<float>;
    constexpr float none = -std::numeric_limits<float>::infinity();
    const int64_t end = sight.sinks() + sight.end - sight.first;
    if (sight.sees) {
      for (int64_t slot = std::max(sight.first, sight.block); slot < sight.end; ++slot) {
        if (sight.hides(slot)) of_recent()[slot] = none;
      }
    }
    // Behind the last score nothing is seen.
    for (int lane = 0; lane < lanes; ++lane) scores[end + lane] = none;
    FloatLanes highest = FloatLanes{} + none;
    for (int64_t place = 0; place < end; place += lanes) {
      FloatLanes some = read<float, lanes>(scores + place) * scale;
      // What is hidden stays so.
      if (cap > 0) some = some == none ? some : cap * tanh_of(some / cap);
      std::memcpy(scores + place, &some, sizeof some);
      highest = some > highest ? some : highest;
    }
    float most = none;
    for (int lane = 0; lane < lanes; ++lane) most = std::max(most, highest[lane]);
    FloatLanes sum = {};
    for (int64_t place = 0; place < end; place += lanes) {
      const FloatLanes share = exp_of(read<float, lanes>(scores + place) - most);
      std::memcpy(scores + place, &share, sizeof share);
      sum += share;
    }
    return total<float, lanes>(sum);
  }
};

// Calls `work` with a query, a range of slots that it sees, their scores, and keys or values of these; for some slots at
// a time, so that they are read from memory once for all queries. Only the first of these has the processor read ahead,
// and while many others compute the memory would be idle: each of them asks for its share of the next slots.
template <typename Slots, typename Work>
void over_slots(const std::vector<Query>& queries, Head<Slots> kept, const Work& work) {
  int64_t end = 0;
  for (const Query& query : queries) end = std::max(end, query.sight.end);
  const auto is_seen = [&](int64_t slot) {
    bool seen = false;
    for (const Query& query : queries) {
      query.within(slot, slot + kSlotsTogether, [&](int64_t, int64_t, float*) { seen = true; });
    }
    return seen;
  };
  const int64_t share = (kSlotsTogether + queries.size() - 1) / queries.size();
  bool seen = is_seen(0);
  for (int64_t slot = 0, next; slot < end; slot = next) {
    next = slot + kSlotsTogether;
    const bool goes_on = next < end && is_seen(next);
    const bool asks = goes_on && queries.size() >= kQueriesThatAsk;
    if (seen) {
      int64_t ahead = next;
      for (const Query& query : queries) {
        const int64_t last = std::min({ahead + share, next + kSlotsTogether, end});
        if (asks && ahead < last) kept.ask(ahead, last);
        ahead = last;
        query.within(slot, next, [&](int64_t from, int64_t to, float* scores) { work(query, from, to, scores); });
      }
    }
    seen = goes_on;
  }
}

// Some queries over the same keys and values.
template <typename Slots>
void attend(const std::vector<Query>& queries, Head<Slots> keys, Head<Slots> values, float scale, float cap) {
  over_slots(queries, keys, [&](const Query& query, int64_t from, int64_t to, float* scores) {
    keys.score(query.at, from, to, scores);
  });
  std::array<float, kQueriesTogether> sums;
  for (size_t i = 0; i < queries.size(); ++i) {
    sums[i] = queries[i].weigh(scale, cap);
    std::fill(queries[i].y, queries[i].y + values.size, 0.f);
  }
  over_slots(queries, values, [&](const Query& query, int64_t from, int64_t to, float* shares) {
    values.add(shares, from, to, query.y);
  });
  for (size_t i = 0; i < queries.size(); ++i) {
    for (int64_t place = 0; place < values.size; ++place) queries[i].y[place] *= 1 / sums[i];
  }
}

// Attention of each token by itself. `seen` are the slots that its queries see, of one head of keys and values, whose
// scores and sums run over them in their order as if there were no others: so wherever they lie, the bits are the same.
template <typename Slots>
class Alone {
 public:
  using Stored = typename Slots::Stored;

  Alone(int64_t slots, int64_t group) : scores_(group * (slots + kLanes<float>)), queries_(group) {}

  // Queries and results of the heads of a group follow each other at a distance of `next` tokens.
  void run(const float* queries, int64_t next, Head<Slots> keys, Head<Slots> values, const std::vector<int64_t>& seen,
           float scale, float* y) {
    const int64_t end = seen.size(), group = queries_.size();
    keys = together(keys, seen, keys_);
    values = together(values, seen, values_);
    for (int64_t head = 0; head < group; ++head) {
      queries_[head] = {queries + head * next * keys.size, {0, 0, 0, end, end, nullptr, nullptr, 0},
                        scores_.data() + head * (scores_.size() / group), y + head * values.size};
    }
    for (int64_t head = 0; head < group; head += kQueriesTogether) {
      const auto last = std::min<int64_t>(head + kQueriesTogether, group);
      attend(std::vector<Query>(queries_.begin() + head, queries_.begin() + last), keys, values, scale, 0);
    }
  }

 private:
  // The slots that are seen, next to each other.
  static Head<Slots> together(Head<Slots> head, const std::vector<int64_t>& seen, std::vector<Stored>& room) {
    if (seen.back() - seen.front() + 1 == int64_t(seen.size())) return {head.at + seen.front() * head.size, head.size};
    room.clear();
    for (int64_t slot : seen) room.insert(room.end(), head.at + slot * head.size, head.at + (slot + 1) * head.size);
    return {room.data(), head.size};
  }

  std::vector<float> scores_;
  std::vector<Query> queries_;
  std::vector<Stored> keys_, values_;
};
