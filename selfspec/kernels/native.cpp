// Products of a few rows with a weight matrix, y = x W^T, at the speed of memory; norms in one step.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "eight_bits.h"
#include "lanes.h"
#include "products.h"
#include "states.h"

namespace {

template <typename Work>
at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                   const std::optional<at::Tensor>& scales, const std::optional<at::Tensor>& by) {
  using Sum = typename Work::Sum;
  const auto in_sums = [](const at::Tensor& tensor) {
    constexpr auto dtype = c10::CppTypeToScalarType<Sum>::value;
    return (tensor.scalar_type() == dtype ? tensor : tensor.to(dtype)).contiguous();
  };
  const at::Tensor states = in_sums(scaled(in_sums(x), by));
  const at::Tensor added = bias ? in_sums(*bias) : at::Tensor(), factors = scales ? in_sums(*scales) : at::Tensor();
  const auto pointer = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr<Sum>() : nullptr; };
  const int64_t rows = rows_of(x), in = x.size(-1), out = weight.size(0);
  const typename Work::Inputs inputs(states.const_data_ptr<Sum>(), rows, in);
  at::Tensor y = at::empty(with_last(x, out), states.options());
  const Work work{inputs.data(), static_cast<decltype(Work::weight)>(weight.const_data_ptr()),
                  y.mutable_data_ptr<Sum>(), pointer(factors), pointer(added), nullptr, in, out};
  // Waking a thread for less than this takes longer than the work.
  const int64_t fewest = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, in * rows));
  at::parallel_for(0, out, fewest, [&](int64_t begin, int64_t end) { in_tiles(work, rows, begin, end); });
  return x.scalar_type() == y.scalar_type() ? y : y.to(x.scalar_type());
}

// `x` is [..., in]; `weight` [out, in] in float32, float64, bfloat16 or int8; `scales` [out], of int8; `factors` [in],
// of inputs.
at::Tensor few_rows(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                    const std::optional<at::Tensor>& scales, const std::optional<at::Tensor>& factors) {
  TORCH_CHECK(x.dim() > 0 && rows_of(x) <= kMostRows, "few_rows: at most ", kMostRows, " rows");
  TORCH_CHECK(weight.dim() == 2 && x.size(-1) == weight.size(1), "few_rows: sizes do not match");
  TORCH_CHECK(weight.is_contiguous(), "few_rows: the weight is not contiguous");
  const auto dtype = weight.scalar_type();
  TORCH_CHECK(dtype != at::kChar || scales, "few_rows: weights in int8 need scales");
  switch (dtype) {
    case at::kFloat: return product<Product<Plain<float>>>(x, weight, bias, scales, factors);
    case at::kDouble: return product<Product<Plain<double>>>(x, weight, bias, scales, factors);
    case at::kBFloat16: return product<Product<BFloat16>>(x, weight, bias, scales, factors);
#if defined(__AVX512VNNI__)
    case at::kChar: return product<IntegerProduct>(x, weight, bias, scales, factors);
#else
    case at::kChar: return product<Product<Int8>>(x, weight, bias, scales, factors);
#endif
    default: TORCH_CHECK(false, "few_rows: weights in ", dtype);
  }
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
  m.def("few_rows(Tensor x, Tensor weight, Tensor? bias, Tensor? scales, Tensor? factors) -> Tensor");
}

TORCH_LIBRARY_IMPL(selfspec, CPU, m) {
  m.impl("few_rows", few_rows);
  m.impl("rms_norm", rms_norm);
}
