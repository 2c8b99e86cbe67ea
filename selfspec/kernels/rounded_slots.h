// Keys and values of one head in 8 or 4 bits: levels, and factors of each group of numbers. See
// selfspec/cache/rounded_copy.py, which lays them out.

#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <vector>

#include "functions.h"
#include "lanes.h"

constexpr int64_t kSlotGroup = 64;

inline int64_t slot_group(int64_t size) { return size % kSlotGroup ? size : kSlotGroup; }

// `[slots, size]`; factors are `[2 * groups, capacity]`: of each group what a level is worth, and what level 0 is.
template <int Bits>
struct RoundedHead {
  const uint8_t* levels;
  const float* factors;
  int64_t size, capacity;
  int64_t group = slot_group(size), groups = size / group;

  // Where the levels of a group of a slot begin.
  const uint8_t* of(int64_t slot, int64_t number) const { return levels + (slot * size + number * group) * Bits / 8; }
  const float* worth(int64_t number) const { return factors + 2 * number * capacity; }
  const float* lowest(int64_t number) const { return factors + (2 * number + 1) * capacity; }

  float level(const uint8_t* from, int64_t i) const {
    if constexpr (Bits == 8) return from[i];
    const int64_t half = group / 2;
    return i < half ? from[i] & 15 : from[i - half] >> 4;
  }

  // A register of levels from place `i` of a group on, where the halves of groups are whole registers.
  FloatLanes lanes_at(const uint8_t* from, int64_t i) const {
    constexpr int lanes = kLanes<float>;
    using Wide = typename Lanes<int32_t, lanes>::Vector;
    const auto wide = [](const uint8_t* at) { return __builtin_convertvector(read<uint8_t, lanes>(at), Wide); };
    if constexpr (Bits == 8) return __builtin_convertvector(wide(from + i), FloatLanes);
    constexpr int64_t half = kSlotGroup / 2;
    return __builtin_convertvector(i < half ? wide(from + i) & 15 : wide(from + i - half) >> 4, FloatLanes);
  }

  // Writes a slot as floats.
  void read_slot(int64_t slot, float* to) const {
    constexpr int lanes = kLanes<float>;
    for (int64_t number = 0; number < groups; ++number, to += group) {
      const uint8_t* from = of(slot, number);
      const float scale = worth(number)[slot], low = lowest(number)[slot];
      if (group != kSlotGroup) {
        for (int64_t i = 0; i < group; ++i) to[i] = scale * level(from, i) + low;
        continue;
      }
      for (int64_t i = 0; i < kSlotGroup; i += lanes) {
        const FloatLanes found = scale * lanes_at(from, i) + low;
        std::memcpy(to + i, &found, sizeof found);
      }
    }
  }
};

// Rounds a key or value, `[size]`, to the levels and factors of one slot.
template <int Bits, typename Slots>
void round_slot(const typename Slots::Stored* from, int64_t size, uint8_t* levels, float* factors, int64_t capacity) {
  const int64_t group = slot_group(size), half = group / 2;
  for (int64_t number = 0; number < size / group; ++number, from += group, levels += group * Bits / 8) {
    float lowest = std::numeric_limits<float>::infinity(), highest = -lowest;
    for (int64_t i = 0; i < group; ++i) {
      lowest = std::min(lowest, Slots::number(from[i]));
      highest = std::max(highest, Slots::number(from[i]));
    }
    const float scale = std::max((highest - lowest) / ((1 << Bits) - 1), FLT_MIN);
    factors[2 * number * capacity] = scale;
    factors[(2 * number + 1) * capacity] = lowest;
    const auto level = [&](int64_t i) {
      const float found = std::nearbyint((Slots::number(from[i]) - lowest) / scale);
      return static_cast<uint8_t>(std::clamp(found, 0.f, float((1 << Bits) - 1)));
    };
    if constexpr (Bits == 8) {
      for (int64_t i = 0; i < group; ++i) levels[i] = level(i);
    } else {
      for (int64_t i = 0; i < half; ++i) levels[i] = level(i) | level(half + i) << 4;
    }
  }
}
