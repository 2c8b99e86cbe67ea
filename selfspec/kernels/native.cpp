// Products of a few rows with a weight matrix, y = x W^T, at the speed of memory; and norms in one step.
//
// Each output of each row is summed in one order, whatever the number of rows and threads: vectors of inputs one
// after the other, then their lanes. So a token's logits are the same bits alone, in a draft and in a batch.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "lanes.h"

namespace {

// How weights are stored, in what they are summed, and how a vector of them is read.
template <typename Number>
struct Plain {
  using Stored = Number;
  using Sum = Number;
  static inline auto lanes(const Number* from) { return read<Number, kLanes<Number>>(from); }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Sum = float;
  static inline auto lanes(const uint16_t* from) {
    constexpr int lanes = kLanes<float>;
    const auto bits = __builtin_convertvector(read<uint16_t, lanes>(from), typename Lanes<uint32_t, lanes>::Vector) << 16;
    return read<float, lanes>(&bits);
  }
};

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

// What a product reads and writes; scales and bias are null where there are none.
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
  int64_t in;
  int64_t out;

  // `Outputs` outputs of `Rows` rows, from output `first`.
  template <int Rows, int Outputs>
  inline void tile(int64_t first) const {
    Vector sums[Outputs][Rows] = {};
    const auto* w = weight + first * in;
    int64_t i = 0;
    for (; i + lanes <= in; i += lanes) {
      Vector states[Rows];
      for (int row = 0; row < Rows; ++row) states[row] = read<Sum, lanes>(x + row * in + i);
      for (int output = 0; output < Outputs; ++output) {
        // Few loads are under way while there is much to compute, so memory is asked for the next outputs now.
        __builtin_prefetch(w + (Outputs + output) * in + i, 0, 3);
        Vector weights = Weight::lanes(w + output * in + i);
        KEEP_IN_REGISTER(weights);
        for (int row = 0; row < Rows; ++row) sums[output][row] += weights * states[row];
      }
    }
    if (i < in) {
      // Zeros behind the last inputs: added up one by one, they would be rounded in one way or another.
      const auto rest = in - i;
      for (int output = 0; output < Outputs; ++output) {
        typename Weight::Stored end[lanes] = {};
        std::copy_n(w + output * in + i, rest, end);
        for (int row = 0; row < Rows; ++row) {
          Sum states[lanes] = {};
          std::copy_n(x + row * in + i, rest, states);
          Vector weights = Weight::lanes(end), inputs = read<Sum, lanes>(states);
          KEEP_IN_REGISTER(weights);
          KEEP_IN_REGISTER(inputs);
          sums[output][row] += weights * inputs;
        }
      }
    }
    for (int output = 0; output < Outputs; ++output) {
      for (int row = 0; row < Rows; ++row) {
        Sum total = 0;
        for (int lane = 0; lane < lanes; ++lane) total += sums[output][row][lane];
        if (scales) total *= scales[first + output];
        if (bias) total += bias[first + output];
        y[row * out + first + output] = total;
      }
    }
  }
};

template <typename Weight>
at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                   const std::optional<at::Tensor>& scales) {
  using Sum = typename Weight::Sum;
  const auto in_sums = [](const at::Tensor& tensor) {
    constexpr auto dtype = c10::CppTypeToScalarType<Sum>::value;
    return (tensor.scalar_type() == dtype ? tensor : tensor.to(dtype)).contiguous();
  };
  const at::Tensor states = in_sums(x);
  const at::Tensor factors = scales ? in_sums(*scales) : at::Tensor();
  const at::Tensor shifts = bias ? in_sums(*bias) : at::Tensor();
  const int64_t in = weight.size(1), out = weight.size(0), rows = rows_of(x);
  at::Tensor y = at::empty(with_last(x, out), states.options());
  const Product<Weight> work{states.const_data_ptr<Sum>(),
                             static_cast<const typename Weight::Stored*>(weight.const_data_ptr()),
                             y.mutable_data_ptr<Sum>(),
                             scales ? factors.const_data_ptr<Sum>() : nullptr,
                             bias ? shifts.const_data_ptr<Sum>() : nullptr,
                             in,
                             out};
  // Waking a thread for less than this takes longer than the work.
  const int64_t fewest = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, in * rows));
  at::parallel_for(0, out, fewest, [&](int64_t begin, int64_t end) { in_tiles(work, rows, begin, end); });
  return x.scalar_type() == y.scalar_type() ? y : y.to(x.scalar_type());
}

// `x` is [..., in]; `weight` [out, in] in float32, float64, bfloat16 or int8; `scales` [out], of int8.
at::Tensor few_rows(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                    const std::optional<at::Tensor>& scales) {
  TORCH_CHECK(x.dim() > 0 && weight.dim() == 2 && x.size(-1) == weight.size(1), "few_rows: sizes do not match");
  TORCH_CHECK(rows_of(x) <= kMostRows, "few_rows: at most ", kMostRows, " rows");
  TORCH_CHECK(weight.is_contiguous(), "few_rows: the weight is not contiguous");
  switch (weight.scalar_type()) {
    case at::kFloat: return product<Plain<float>>(x, weight, bias, scales);
    case at::kDouble: return product<Plain<double>>(x, weight, bias, scales);
    case at::kBFloat16: return product<BFloat16>(x, weight, bias, scales);
    case at::kChar: return product<Int8>(x, weight, bias, scales);
    default: TORCH_CHECK(false, "few_rows: weights in ", weight.scalar_type());
  }
}

// One token, float32 in and out: its inputs over the root of their mean square, times the weight.
void normalize(const float* x, const float* weight, float* y, int64_t size, float epsilon) {
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
  for (i = 0; i < size; ++i) y[i] = weight[i] * (x[i] * scale);
}

// RMSNorm (Zhang and Sennrich, 2019). `x` is [..., size], `weight` [size], both in float32.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon) {
  TORCH_CHECK(x.dim() > 0 && weight.dim() == 1 && x.size(-1) == weight.size(0), "rms_norm: sizes do not match");
  TORCH_CHECK(x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat, "rms_norm: float32 alone");
  const at::Tensor states = x.contiguous(), factors = weight.contiguous();
  at::Tensor y = at::empty_like(states);
  const int64_t size = weight.size(0), rows = size ? states.numel() / size : 0;
  const float *from = states.const_data_ptr<float>(), *by = factors.const_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  at::parallel_for(0, rows, std::max<int64_t>(1, 32768 / std::max<int64_t>(1, size)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) normalize(from + row * size, by, to + row * size, size, epsilon);
  });
  return y;
}

}  // namespace

TORCH_LIBRARY(selfspec, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor");
  m.def("few_rows(Tensor x, Tensor weight, Tensor? bias, Tensor? scales) -> Tensor");
}

TORCH_LIBRARY_IMPL(selfspec, CPU, m) { 
  m.impl("few_rows", few_rows);
  m.impl("rms_norm", rms_norm);
}
