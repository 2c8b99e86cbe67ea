// A product with weights in 8 bits whose inputs are rounded to 8 bits as well, in groups of 64: converting weights to
// floats takes longer than memory needs to give them.

#pragma once

#if defined(__AVX512VNNI__)

#include <vector>

#include "lanes.h"
#include "rounding.h"

constexpr int kInputsOfGroup = 64;

struct RoundedGroup {
  int8_t levels[kInputsOfGroup];
  int32_t offsets[kInputsOfGroup / 4];  // what weights from 0 to 255 add to each sum of four products, taken back
  float scale;
};

struct IntegerProduct {
  using Sum = float;
  using Floats = Lanes<float, 16>::Vector;
  using Ints = Lanes<int32_t, 16>::Vector;

  const RoundedGroup* x;
  const int8_t* weight;
  float* y;
  const float* scales;
  const float* bias;
  const float* residual;
  int64_t in;
  int64_t out;

  static int64_t groups_of(int64_t in) { return (in + kInputsOfGroup - 1) / kInputsOfGroup; }

  static RoundedGroup rounded(const float* x, int64_t size) {
    float inputs[kInputsOfGroup] = {};
    std::copy_n(x, size, inputs);
    const Step step = step_of<kInputsOfGroup>(inputs);
    RoundedGroup group = {};
    group.scale = step.scale;
    for (int i = 0; i < kInputsOfGroup && step.factor > 0; ++i) group.levels[i] = step.level(inputs[i]);
    for (int i = 0; i < kInputsOfGroup; ++i) group.offsets[i / 4] -= 128 * group.levels[i];
    return group;
  }

  int64_t inputs_of_row() const { return groups_of(in); }
  // Of several rows the inputs take longer to read than the weights, and have to serve several outputs.
  bool in_line(int64_t rows) const { return rows == 1; }

  template <int Rows>
  static inline void add(Floats* sums, const int8_t* weights, const RoundedGroup* x, int64_t groups) {
    // The instruction takes one factor from 0 to 255.
    const __m512i shifted = _mm512_xor_si512(_mm512_loadu_si512(weights), _mm512_set1_epi8(-128));
    for (int row = 0; row < Rows; ++row) {
      const RoundedGroup& inputs = x[row * groups];
      const __m512i products =
          _mm512_dpbusd_epi32(_mm512_loadu_si512(inputs.offsets), shifted, _mm512_loadu_si512(inputs.levels));
      sums[row] += (Floats)_mm512_cvtepi32_ps(products) * inputs.scale;
    }
  }

  // `Outputs` outputs of `Rows` rows, from output `first`.
  template <int Rows, int Outputs>
  inline void tile(int64_t first) const {
    Floats sums[Outputs][Rows] = {};
    const int8_t* w = weight + first * in;
    const int8_t* ahead = w + kAhead;
    const int64_t groups = groups_of(in), whole = in / kInputsOfGroup;
    for (int64_t group = 0; group < whole; ++group) {
      for (int output = 0; output < Outputs; ++output) {
        __builtin_prefetch(ahead, 0, 3);
        ahead += kInputsOfGroup;
        add<Rows>(sums[output], w + output * in + group * kInputsOfGroup, x + group, groups);
      }
    }
    if (whole < groups) {
      for (int output = 0; output < Outputs; ++output) {
        int8_t end[kInputsOfGroup] = {};
        std::copy_n(w + output * in + whole * kInputsOfGroup, in - whole * kInputsOfGroup, end);
        add<Rows>(sums[output], end, x + whole, groups);
      }
    }
    put_tile(*this, first, sums, scales + first);
  }
};

#endif
