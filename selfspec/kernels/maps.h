// Functions of one or two numbers, over many of them.

#pragma once

#include <cmath>

#include "functions.h"

enum class Function : int64_t {
  kCopy, kNegative, kCosine, kSine, kTanh, kSigmoid, kSilu, kGelu, kGeluByTanh, kRelu, kExponential, kRootOfInverse,
  kPower, kSum, kDifference, kMultiply, kQuotient, kSiluTimes, kGeluTimes, kGeluByTanhTimes
};

template <typename Of>
inline void each(const float* x, const float* z, float* y, int64_t count, const Of& function) {
  for (int64_t i = 0; i < count; ++i) y[i] = function(x[i], z ? z[i] : 0.f);
}

template <typename Of>
inline void lanes_of(const float* x, float* y, int64_t count, const Of& function) {
  constexpr int lanes = kLanes<float>;
  // There is room behind the last.
  for (int64_t i = 0; i < count; i += lanes) {
    const FloatLanes found = function(read<float, lanes>(x + i));
    std::memcpy(y + i, &found, sizeof found);
  }
}

inline FloatLanes gelu_by_tanh(FloatLanes x) {
  return 0.5f * x * (1.f + tanh_of(0.7978845608f * (x + 0.044715f * x * x * x)));
}

inline float gelu(float x) { return 0.5f * x * (1.f + std::erf(x * 0.70710678f)); }

// `count` numbers, at most a chunk, of chunks that hold as many; y may be one of the others.
void apply(Function function, const float* x, const float* z, float* y, int64_t count) {
  const auto times = [&] { each(y, z, y, count, [](float a, float b) { return a * b; }); };
  switch (function) {
    case Function::kCopy: return each(x, z, y, count, [](float a, float) { return a; });
    case Function::kNegative: return each(x, z, y, count, [](float a, float) { return -a; });
    case Function::kCosine: return each(x, z, y, count, [](float a, float) { return std::cos(a); });
    case Function::kSine: return each(x, z, y, count, [](float a, float) { return std::sin(a); });
    case Function::kTanh: return lanes_of(x, y, count, tanh_of);
    case Function::kSigmoid: return lanes_of(x, y, count, sigmoid_of);
    case Function::kSilu: return lanes_of(x, y, count, [](FloatLanes a) { return a * sigmoid_of(a); });
    case Function::kGelu: return each(x, z, y, count, [](float a, float) { return gelu(a); });
    case Function::kGeluByTanh: return lanes_of(x, y, count, gelu_by_tanh);
    case Function::kRelu: return each(x, z, y, count, [](float a, float) { return a < 0 ? 0 : a; });
    case Function::kExponential: return lanes_of(x, y, count, exp_of);
    case Function::kRootOfInverse: return each(x, z, y, count, [](float a, float) { return 1 / std::sqrt(a); });
    case Function::kPower:
      return each(x, z, y, count, [](float a, float b) { return b == 2 ? a * a : b == 3 ? a * a * a : std::pow(a, b); });
    case Function::kSum: return each(x, z, y, count, [](float a, float b) { return a + b; });
    case Function::kDifference: return each(x, z, y, count, [](float a, float b) { return a - b; });
    case Function::kMultiply: return each(x, z, y, count, [](float a, float b) { return a * b; });
    case Function::kQuotient: return each(x, z, y, count, [](float a, float b) { return a / b; });
    case Function::kSiluTimes:
      return lanes_of(x, y, count, [](FloatLanes a) { return a * sigmoid_of(a); }), times();
    case Function::kGeluTimes: return each(x, z, y, count, [](float a, float b) { return gelu(a) * b; });
    case Function::kGeluByTanhTimes: return lanes_of(x, y, count, gelu_by_tanh), times();
  }
}
