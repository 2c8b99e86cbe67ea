// What is done to the states of one token between products: rotations and norms.

#pragma once

#include <cmath>

#include "lanes.h"

// Keys or queries of one token and head, by the angles of its position. Products are rounded before they are added, as
// by separate operations; the compiler would join them.
template <typename Number>
void rotate_head(const Number* x, const Number* cos, const Number* sin, Number* y, int64_t half) {
  constexpr int lanes = 16 / sizeof(Number);
  using Vector = typename Lanes<Number, lanes>::Vector;
  const auto turned = [](auto straight, auto across) {
    ROUNDED(straight);
    ROUNDED(across);
    return straight + across;
  };
  int64_t i = 0;
  for (; i + lanes <= half; i += lanes) {
    const auto at = [i](const Number* from) { return read<Number, lanes>(from + i); };
    const Vector left = at(x), right = at(x + half);
    const Vector first = turned(left * at(cos), -right * at(sin));
    const Vector last = turned(right * at(cos + half), left * at(sin + half));
    std::memcpy(y + i, &first, sizeof first);
    std::memcpy(y + half + i, &last, sizeof last);
  }
  for (; i < half; ++i) {
    y[i] = turned(x[i] * cos[i], -x[half + i] * sin[i]);
    y[half + i] = turned(x[half + i] * cos[half + i], x[i] * sin[half + i]);
  }
}

// One token, float32 in and out: its inputs over the root of their mean square, times the weight, if there is one,
// and what is added to it.
inline void normalize(const float* x, const float* weight, float shift, float* y, int64_t size, float epsilon) {
  constexpr int lanes = kLanes<float>;
  using Vector = typename Lanes<float, lanes>::Vector;
  Vector squares = {};
  int64_t i = 0;
  for (; i + lanes <= size; i += lanes) {
    const Vector inputs = read<float, lanes>(x + i);
    squares += inputs * inputs;
  }
  float total = 0;
  for (int lane = 0; lane < lanes; ++lane) total += squares[lane];
  for (; i < size; ++i) total += x[i] * x[i];
  const float scale = 1 / std::sqrt(total / size + epsilon);
  if (!weight) {
    for (i = 0; i < size; ++i) y[i] = x[i] * scale;
    return;
  }
  for (i = 0; i < size; ++i) y[i] = (weight[i] + shift) * (x[i] * scale);
}

// Layer normalization (Ba et al., 2016) of one token.
inline void normalize_around_mean(const float* x, const float* weight, const float* bias, float* y, int64_t size,
                                  float epsilon) {
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < size; ++i) sum += x[i];
  const float mean = sum / size;
  for (int64_t i = 0; i < size; ++i) squares += double(x[i] - mean) * (x[i] - mean);
  const float scale = 1 / std::sqrt(float(squares / size) + epsilon);
  for (int64_t i = 0; i < size; ++i) y[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}
