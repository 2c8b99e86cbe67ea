// Products of a few rows with plain weights, tile by tile.
//
// Each output of each row is summed in one order, whatever the number of rows and threads: vectors of inputs one
// after the other, then their lanes. So a token's logits are the same bits alone, in a draft and in a batch.

#pragma once

#include <algorithm>
#include <cmath>

#include "lanes.h"
#include "numbers.h"

#if !defined(__AVX512VNNI__)
struct Int8 {
  using Stored = int8_t;
  using Sum = float;
  static inline auto lanes(const int8_t* from) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    constexpr int lanes = kLanes<float>;
    return __builtin_convertvector(read<int8_t, lanes>(from), typename Lanes<float, lanes>::Vector);
#endif
  }
};
#endif

// What a product reads and writes; scales, bias and what is added to it, `[rows, out]`, are null where there are none.
template <typename Weight>
struct Product {
  using Sum = typename Weight::Sum;
  static constexpr int lanes = kLanes<Sum>;
  using Vector = typename Lanes<Sum, lanes>::Vector;

  const Sum* x;
  const typename Weight::Stored* weight;
  Sum* y;
  const Sum* scales;
  const Sum* bias;
  const Sum* residual;
  int64_t in;
  int64_t out;

  int64_t inputs_of_row() const { return in; }
  // Memory gives most where it is read in one line, output by output. One row is too little work for that, and inputs
  // from the second cache have to serve several outputs.
  bool in_line(int64_t rows) const { return rows > 1 && rows * in * int64_t(sizeof(Sum)) <= kInputsInCache; }

  // `Outputs` outputs of `Rows` rows, from output `first`.
  template <int Rows, int Outputs>
  inline void tile(int64_t first) const {
    Vector sums[Outputs][Rows] = {};
    const auto* w = weight + first * in;
    // Memory gives most where it is read in one line from start to end. So the next of several outputs are asked for in
    // that order, and into the second cache, which holds them all.
    const auto* ahead = w + (Outputs > 1 ? Outputs * in : kAhead / int64_t(sizeof *w));
    int64_t i = 0;
    for (; i + lanes <= in; i += lanes) {
      Vector states[Rows];
      for (int row = 0; row < Rows; ++row) states[row] = read<Sum, lanes>(x + row * in + i);
      for (int output = 0; output < Outputs; ++output) {
        __builtin_prefetch(ahead, 0, Outputs > 1 ? 2 : 3);
        ahead += lanes;
        Vector weights = Weight::lanes(w + output * in + i);
        KEEP_IN_REGISTER(weights);
        for (int row = 0; row < Rows; ++row) add_product(sums[output][row], weights, states[row]);
      }
    }
    if (i < in) {
      // Zeros behind the last inputs: added up one by one, they would be rounded in one way or another.
      const auto rest = in - i;
      Sum states[Rows][lanes] = {};
      typename Weight::Stored ends[Outputs][lanes] = {};
      for (int row = 0; row < Rows; ++row) std::copy_n(x + row * in + i, rest, states[row]);
      for (int output = 0; output < Outputs; ++output) std::copy_n(w + output * in + i, rest, ends[output]);
#pragma GCC unroll 4
      for (int output = 0; output < Outputs; ++output) {
        Vector weights = Weight::lanes(ends[output]);
        KEEP_IN_REGISTER(weights);
#pragma GCC unroll 16
        for (int row = 0; row < Rows; ++row) {
          Vector inputs = read<Sum, lanes>(states[row]);
          KEEP_IN_REGISTER(inputs);
          add_product(sums[output][row], weights, inputs);
        }
      }
    }
    put_tile(*this, first, sums, scales ? scales + first : nullptr);
  }
};

// The same with a weight that lies as `[in, out]`: an output is summed over its inputs one after the other.
struct ColumnsProduct {
  static constexpr int lanes = kLanes<float>;
  using Vector = Lanes<float, lanes>::Vector;

  const float* x;
  const float* weight;
  float* y;
  const float* bias;
  const float* residual;
  int64_t in;
  int64_t out;

  template <int Rows>
  void rows_of(int64_t row, int64_t begin, int64_t end) const {
    constexpr int vectors = std::max(1, std::min(8, kSums / Rows));
    int64_t first = begin;
    for (; first + vectors * lanes <= end; first += vectors * lanes) tile<Rows, vectors>(row, first);
    for (; first + lanes <= end; first += lanes) tile<Rows, 1>(row, first);
    for (; first < end; ++first) {
      for (int64_t r = row; r < row + Rows; ++r) {
        float sum = 0;
        for (int64_t i = 0; i < in; ++i) sum = std::fma(x[r * in + i], weight[i * out + first], sum);
        put(*this, r, first, sum);
      }
    }
  }

  template <int Rows, int Vectors>
  void tile(int64_t row, int64_t first) const {
    Vector sums[Rows][Vectors] = {};
    for (int64_t i = 0; i < in; ++i) {
      const float* w = weight + i * out + first;
      for (int v = 0; v < Vectors; ++v) {
        const Vector weights = read<float, lanes>(w + v * lanes);
        for (int r = 0; r < Rows; ++r) add_product(sums[r][v], weights, Vector{} + x[(row + r) * in + i]);
      }
    }
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < Vectors; ++v) {
        for (int lane = 0; lane < lanes; ++lane) put(*this, row + r, first + v * lanes + lane, sums[r][v][lane]);
      }
    }
  }

  // Outputs `begin` to `end` of all rows.
  void run(int64_t rows, int64_t begin, int64_t end) const {
    int64_t row = 0;
    for (; row + 8 <= rows; row += 8) rows_of<8>(row, begin, end);
    for (; row + 4 <= rows; row += 4) rows_of<4>(row, begin, end);
    for (; row < rows; ++row) rows_of<1>(row, begin, end);
  }
};
