// Products of a few rows with a weight matrix, y = x W^T, at the speed of memory; norms in one step; attention of each
// token by itself.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "attention.h"
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

// Attention of each token by itself. `seen` are the slots that its queries see, of one head of keys and values, whose
// scores and sums run over them in their order as if there were no others: so wherever they lie, the bits are the same.
template <typename Slots>
class Alone {
 public:
  using Stored = typename Slots::Stored;

  Alone(int64_t slots, int64_t group) : scores_(group * (slots + kLanes<float>)), queries_(group) {}

  // Queries and results of the heads of a group follow each other at a distance of `next` tokens.
  void run(const float* queries, int64_t next, Head<Slots> keys, Head<Slots> values, const std::vector<int64_t>& seen,
           float scale, float* y) {
    const int64_t end = seen.size(), group = queries_.size();
    keys = together(keys, seen, keys_);
    values = together(values, seen, values_);
    for (int64_t head = 0; head < group; ++head) {
      queries_[head] = {queries + head * next * keys.size, {0, 0, 0, end, end, nullptr, nullptr, 0},
                        scores_.data() + head * (scores_.size() / group), y + head * values.size};
    }
    for (int64_t head = 0; head < group; head += kQueriesTogether) {
      const auto last = std::min<int64_t>(head + kQueriesTogether, group);
      attend(std::vector<Query>(queries_.begin() + head, queries_.begin() + last), keys, values, scale, 0, nullptr);
    }
  }

 private:
  // The slots that are seen, next to each other.
  static Head<Slots> together(Head<Slots> head, const std::vector<int64_t>& seen, std::vector<Stored>& room) {
    if (seen.back() - seen.front() + 1 == int64_t(seen.size())) return {head.at + seen.front() * head.size, head.size};
    room.clear();
    for (int64_t slot : seen) room.insert(room.end(), head.at + slot * head.size, head.at + (slot + 1) * head.size);
    return {room.data(), head.size};
  }

  std::vector<float> scores_;
  std::vector<Query> queries_;
  std::vector<Stored> keys_, values_;
};

template <typename Slots>
at::Tensor attended(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                    const std::optional<at::Tensor>& mask, bool is_causal, double scale) {
  const auto of_slots = [](const at::Tensor& kept) {
    return kept.stride(3) == 1 && kept.stride(2) == kept.size(3) ? kept : kept.contiguous();
  };
  const at::Tensor x = queries.to(at::kFloat).contiguous(), k = of_slots(keys), v = of_slots(values);
  const int64_t heads = x.size(1), tokens = x.size(2), size = x.size(3), slots = k.size(2), of_values = v.size(3);
  const int64_t group = heads / k.size(1);
  const at::Tensor sees = mask ? mask->expand({x.size(0), 1, tokens, slots}).contiguous() : at::Tensor();
  at::Tensor y = at::zeros({x.size(0), tokens, heads, of_values}, x.options());
  const auto head_of = [](const at::Tensor& kept, int64_t row, int64_t head) {
    const auto* at = static_cast<const typename Slots::Stored*>(kept.const_data_ptr());
    return Head<Slots>{at + row * kept.stride(0) + head * kept.stride(1), kept.size(3)};
  };
  at::parallel_for(0, x.size(0) * k.size(1) * tokens, 1, [&](int64_t begin, int64_t end) {
    Alone<Slots> alone(slots, group);
    std::vector<int64_t> seen;
    for (int64_t place = begin; place < end; ++place) {
      const int64_t token = place % tokens, head = place / tokens % k.size(1), row = place / tokens / k.size(1);
      const bool* shown = mask ? sees.const_data_ptr<bool>() + (row * tokens + token) * slots : nullptr;
      seen.clear();
      for (int64_t slot = 0; slot < (is_causal ? token + 1 : slots); ++slot) {
        if (!shown || shown[slot]) seen.push_back(slot);
      }
      if (seen.empty()) continue;
      alone.run(x.const_data_ptr<float>() + ((row * heads + head * group) * tokens + token) * size, tokens,
                head_of(k, row, head), head_of(v, row, head), seen, scale,
                y.mutable_data_ptr<float>() + ((row * tokens + token) * heads + head * group) * of_values);
    }
  });
  return y.to(queries.scalar_type());
}

// Queries `[batch, heads, tokens, size]`, keys and values `[batch, heads of keys, slots, ...]`, and which slots a token
// sees, `[batch or 1, 1, tokens, slots]`, or none but those up to its own, or all: `[batch, tokens, heads, ...]`.
at::Tensor attend_alone(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                        const std::optional<at::Tensor>& mask, bool is_causal, double scale) {
  TORCH_CHECK(queries.dim() == 4 && keys.dim() == 4 && values.dim() == 4, "attend_alone: four dimensions each");
  TORCH_CHECK(!mask || (mask->scalar_type() == at::kBool && !is_causal), "attend_alone: masks say yes or no");
  TORCH_CHECK(!is_causal || queries.size(2) == keys.size(2), "attend_alone: a causal pass sees its own tokens alone");
  TORCH_CHECK(queries.size(1) % keys.size(1) == 0, "attend_alone: heads do not share those of keys");
  const auto dtype = keys.scalar_type();
  TORCH_CHECK(queries.scalar_type() == dtype && values.scalar_type() == dtype, "attend_alone: dtypes differ");
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16, "attend_alone: slots in ", dtype);
  if (dtype == at::kFloat) return attended<FloatSlots>(queries, keys, values, mask, is_causal, scale);
  return attended<BFloat16Slots>(queries, keys, values, mask, is_causal, scale);
}

}  // namespace

TORCH_LIBRARY(selfspec, m) {
  m.def(
      "attend_alone(Tensor queries, Tensor keys, Tensor values, Tensor? mask, bool is_causal, float scale) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor");
  m.def("few_rows(Tensor x, Tensor weight, Tensor? bias, Tensor? scales, Tensor? factors) -> Tensor");
}

TORCH_LIBRARY_IMPL(selfspec, CPU, m) {
  m.impl("attend_alone", attend_alone);
  m.impl("few_rows", few_rows);
  m.impl("rms_norm", rms_norm);
}
