// Products of a few rows with a weight matrix, y = x W^T, at the speed of memory; norms and rotations in one step.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "eight_bits.h"
#include "lanes.h"
#include "products.h"
#include "states.h"

namespace {

// A weight of several that are multiplied with the same states.
struct Factor {
  at::Tensor weight;
  std::optional<at::Tensor> bias;
  std::optional<at::Tensor> scales;
};

template <typename Work>
std::vector<at::Tensor> products(const at::Tensor& x, const std::vector<Factor>& factors) {
  using Sum = typename Work::Sum;
  const auto in_sums = [](const at::Tensor& tensor) {
    constexpr auto dtype = c10::CppTypeToScalarType<Sum>::value;
    return (tensor.scalar_type() == dtype ? tensor : tensor.to(dtype)).contiguous();
  };
  const at::Tensor states = in_sums(x);
  const int64_t rows = rows_of(x), in = x.size(-1);
  const typename Work::Inputs inputs(states.const_data_ptr<Sum>(), rows, in);
  std::vector<Work> works;
  std::vector<at::Tensor> found, kept;
  int64_t total = 0;
  for (const Factor& factor : factors) {
    const auto pointer = [&](const std::optional<at::Tensor>& tensor) -> const Sum* {
      if (!tensor) return nullptr;
      kept.push_back(in_sums(*tensor));
      return kept.back().const_data_ptr<Sum>();
    };
    const int64_t out = factor.weight.size(0);
    found.push_back(at::empty(with_last(x, out), states.options()));
    works.push_back({inputs.data(), static_cast<decltype(Work::weight)>(factor.weight.const_data_ptr()),
                     found.back().mutable_data_ptr<Sum>(), pointer(factor.scales), pointer(factor.bias), nullptr, in, out});
    total += out;
  }
  // Waking a thread for less than this takes longer than the work.
  const int64_t fewest = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, in * rows));
  at::parallel_for(0, total, fewest, [&](int64_t begin, int64_t end) {
    int64_t first = 0;
    for (const auto& work : works) {
      const int64_t from = std::max(begin - first, int64_t(0)), to = std::min(end - first, work.out);
      if (from < to) in_tiles(work, rows, from, to);
      first += work.out;
    }
  });
  for (at::Tensor& y : found) {
    if (x.scalar_type() != y.scalar_type()) y = y.to(x.scalar_type());
  }
  return found;
}

std::vector<at::Tensor> multiply(const at::Tensor& x, const std::vector<Factor>& factors) {
  TORCH_CHECK(x.dim() > 0 && rows_of(x) <= kMostRows, "few_rows: at most ", kMostRows, " rows");
  const auto dtype = factors.front().weight.scalar_type();
  for (const Factor& factor : factors) {
    const at::Tensor& weight = factor.weight;
    TORCH_CHECK(weight.dim() == 2 && x.size(-1) == weight.size(1), "few_rows: sizes do not match");
    TORCH_CHECK(weight.is_contiguous(), "few_rows: the weight is not contiguous");
    TORCH_CHECK(weight.scalar_type() == dtype, "few_rows: weights of two dtypes");
    TORCH_CHECK(dtype != at::kChar || factor.scales, "few_rows: weights in int8 need scales");
  }
  switch (dtype) {
    case at::kFloat: return products<Product<Plain<float>>>(x, factors);
    case at::kDouble: return products<Product<Plain<double>>>(x, factors);
    case at::kBFloat16: return products<Product<BFloat16>>(x, factors);
#if defined(__AVX512VNNI__)
    case at::kChar: return products<IntegerProduct>(x, factors);
#else
    case at::kChar: return products<Product<Int8>>(x, factors);
#endif
    default: TORCH_CHECK(false, "few_rows: weights in ", dtype);
  }
}

// `x` is [..., in]; `weight` [out, in] in float32, float64, bfloat16 or int8; `scales` [out], of int8.
at::Tensor few_rows(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                    const std::optional<at::Tensor>& scales) {
  return multiply(x, {{weight, bias, scales}}).front();
}

// The same for several weights, one or more.
std::vector<at::Tensor> few_rows_together(const at::Tensor& x, at::TensorList weights,
                                          const c10::List<std::optional<at::Tensor>>& biases,
                                          const c10::List<std::optional<at::Tensor>>& scales) {
  std::vector<Factor> factors;
  for (size_t number = 0; number < weights.size(); ++number) {
    factors.push_back({weights[number], biases.get(number), scales.get(number)});
  }
  return multiply(x, factors);
}

template <typename Number>
at::Tensor rotated(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, int64_t half) {
  at::Tensor y = at::empty_like(x);
  const int64_t heads = x.size(1), tokens = x.size(2), all = x.size(0) * heads * tokens;
  at::parallel_for(0, all, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, half)), [&](int64_t begin, int64_t end) {
    for (int64_t number = begin; number < end; ++number) {
      const int64_t token = number % tokens, head = number / tokens % heads, row = number / tokens / heads;
      const auto offset = [&](const at::Tensor& t) {
        return row * t.stride(0) + head * t.stride(1) + token * t.stride(2);
      };
      rotate_head(x.const_data_ptr<Number>() + offset(x), cos.const_data_ptr<Number>() + offset(cos),
                  sin.const_data_ptr<Number>() + offset(sin), y.mutable_data_ptr<Number>() + offset(y), half);
    }
  });
  return y;
}

// Rotary positions (Su et al., 2021): x cos + (-second half, first half) sin, by the same bits as operation by operation.
// `x` is [batch, heads, tokens, size]; `cos` and `sin` are expanded to it.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, int64_t half) {
  const auto fits = [&](const at::Tensor& t) {
    return t.is_cpu() && t.scalar_type() == x.scalar_type() && t.size(-1) == 2 * half && t.stride(-1) == 1;
  };
  const bool floats = x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble;
  if (x.dim() == 4 && cos.dim() == 4 && sin.dim() == 4 && floats && fits(x) && fits(cos) && fits(sin)) {
    const at::Tensor by = cos.expand(x.sizes()), across = sin.expand(x.sizes());
    return x.scalar_type() == at::kFloat ? rotated<float>(x, by, across, half) : rotated<double>(x, by, across, half);
  }
  const at::Tensor turned = at::cat({x.slice(-1, half).neg(), x.slice(-1, 0, half)}, -1);
  return x * cos + turned * sin;
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
    for (int64_t row = begin; row < end; ++row) normalize(from + row * size, by, 0, to + row * size, size, epsilon);
  });
  return y;
}

}  // namespace

TORCH_LIBRARY(selfspec, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor");
  m.def("few_rows(Tensor x, Tensor weight, Tensor? bias, Tensor? scales) -> Tensor");
  m.def("few_rows_together(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor?[] scales) -> Tensor[]");
  m.def("rotate(Tensor x, Tensor cos, Tensor sin, int half) -> Tensor");
}

TORCH_LIBRARY_IMPL(selfspec, CPU, m) { 
  m.impl("few_rows", few_rows);
  m.impl("few_rows_together", few_rows_together);
  m.impl("rms_norm", rms_norm);
}

TORCH_LIBRARY_IMPL(selfspec, CompositeExplicitAutograd, m) { m.impl("rotate", rotate); }
