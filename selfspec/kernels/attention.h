// Attention of a few queries over slots of keys and values, one query and head at a time.
//
// A query's sums run over the slots in their order, whatever other queries there are and whoever computes them.

#pragma once

#include <limits>
#include <vector>

#include "functions.h"
#include "lanes.h"

// What a query sees: the slots of a few sinks, and all from `first` on and before `end`; of the block's, where there is
// one, those in `sees`.
struct Sight {
  int64_t first_sink;
  int64_t end_of_sinks;
  int64_t first;
  int64_t end;
  int64_t block;          // first slot of the block
  const bool* sees;       // of the block's slots; null: all before `end`
  const int64_t* depths;  // of the block's slots
  int64_t reach;          // smallest position that the window holds, counted from the block's

  // How many slots come before `first`.
  int64_t sinks() const { return end_of_sinks - first_sink; }

  bool hides(int64_t slot) const {
    if (!sees || slot < block) return false;
    return !sees[slot - block] || depths[slot - block] < reach;
  }
};

struct BFloat16Slots {
  using Stored = uint16_t;
  static inline FloatLanes lanes(const uint16_t* from) {
    const auto bits = __builtin_convertvector(read<uint16_t, kLanes<float>>(from), Lanes<uint32_t, kLanes<float>>::Vector) << 16;
    return read<float, kLanes<float>>(&bits);
  }
  static float number(uint16_t stored) {
    const uint32_t bits = static_cast<uint32_t>(stored) << 16;
    return read_number(bits);
  }
  static float read_number(uint32_t bits) {
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
  }
  static uint16_t stored(float number) {
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    if (number != number) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

struct FloatSlots {
  using Stored = float;
  static inline FloatLanes lanes(const float* from) { return read<float, kLanes<float>>(from); }
  static float number(float stored) { return stored; }
  static float stored(float number) { return number; }
};

// Keys or values of one head, `[slots, size]`.
template <typename Slots>
struct Head {
  const typename Slots::Stored* at;
  int64_t size;

  template <int Vectors>
  inline void dots(const float* query, int64_t first, int64_t end, float* scores) const {
    constexpr int lanes = kLanes<float>;
    FloatLanes q[Vectors];
    for (int i = 0; i < Vectors; ++i) q[i] = read<float, lanes>(query + i * lanes);
    for (int64_t slot = first; slot < end; ++slot) {
      const auto* key = at + slot * size;
      FloatLanes sum = q[0] * Slots::lanes(key);
      for (int i = 1; i < Vectors; ++i) sum += q[i] * Slots::lanes(key + i * lanes);
      scores[slot] = total<float, lanes>(sum);
    }
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
  inline void sums(const float* shares, const Sight& sight, int64_t place, float factor, float* y) const {
    constexpr int lanes = kLanes<float>;
    FloatLanes sum[Vectors] = {};
    const auto add = [&](int64_t first, int64_t end, const float* share) {
      for (int64_t slot = first; slot < end; ++slot) {
        const auto* value = at + slot * size + place;
        for (int i = 0; i < Vectors; ++i) sum[i] += share[slot - first] * Slots::lanes(value + i * lanes);
      }
    };
    add(sight.first_sink, sight.end_of_sinks, shares);
    add(sight.first, sight.end, shares + sight.sinks());
    for (int i = 0; i < Vectors; ++i) {
      sum[i] *= factor;
      std::memcpy(y + place + i * lanes, &sum[i], sizeof sum[i]);
    }
  }

  void average(const float* shares, const Sight& sight, float factor, float* y) const {
    constexpr int lanes = kLanes<float>;
    int64_t place = 0;
    for (; place + 4 * lanes <= size; place += 4 * lanes) sums<4>(shares, sight, place, factor, y);
    for (; place + lanes <= size; place += lanes) sums<1>(shares, sight, place, factor, y);
    for (; place < size; ++place) {
      float sum = 0;
      const auto add = [&](int64_t first, int64_t end, const float* share) {
        for (int64_t slot = first; slot < end; ++slot) sum += share[slot - first] * Slots::number(at[slot * size + place]);
      };
      add(sight.first_sink, sight.end_of_sinks, shares);
      add(sight.first, sight.end, shares + sight.sinks());
      y[place] = sum * factor;
    }
  }
};

// One query over one head. `scores` has room for all slots and a vector more; a cap of zero is none.
template <typename Slots>
void attend(const float* query, const Head<Slots>& keys, const Head<Slots>& values, const Sight& sight, float scale,
            float cap, float* scores, float* y) {
  constexpr int lanes = kLanes<float>;
  // Scores lie in a row: those of sinks, then all from `first` on.
  const int64_t sinks = sight.sinks(), end = sinks + sight.end - sight.first;
  keys.score(query, sight.first_sink, sight.end_of_sinks, scores - sight.first_sink);
  float* recent = scores + sinks - sight.first;
  keys.score(query, sight.first, sight.end, recent);
  constexpr float none = -std::numeric_limits<float>::infinity();
  if (sight.sees) {
    for (int64_t slot = std::max(sight.first, sight.block); slot < sight.end; ++slot) {
      if (sight.hides(slot)) recent[slot] = none;
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
  values.average(scores, sight, 1 / total<float, lanes>(sum), y);
}
