// Inputs of a product in 8 bits, by groups that have a scale each: integers are multiplied several times as fast as
// floats, and a draft may round as it likes.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

// The step of a group's levels. Where an input is not finite it is not either, and all levels are zero.
struct Step {
  float scale;
  float factor;  // of inputs to levels

  int32_t level(float input) const {
    const float scaled = input * factor;
    return static_cast<int32_t>(scaled + (scaled < 0 ? -0.5f : 0.5f));
  }
};

// That which takes the largest of a group's inputs to level 127.
template <int Size>
inline Step step_of(const float* inputs) {
  uint32_t bits[Size], most_bits = 0;
  std::memcpy(bits, inputs, sizeof bits);
  // In the order of their bits, numbers that are not finite come last.
  for (int i = 0; i < Size; ++i) most_bits = std::max(most_bits, bits[i] & 0x7fffffffu);
  float most;
  std::memcpy(&most, &most_bits, sizeof most);
  const float scale = most / 127, inverse = 1 / scale;
  return {scale, std::isfinite(most) && std::isfinite(inverse) ? inverse : 0};
}
