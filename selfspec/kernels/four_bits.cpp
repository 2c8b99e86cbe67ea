// Products of a few rows with weights in 4 bits as an operator of torch.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "four_bits.h"

namespace {

using namespace four_bits;

// `x` is [..., in]; `weight` [out, in / 32 * 20] bytes, as `in_blocks` lays them out; `factors` [in], of inputs.
at::Tensor few_rows_in_four_bits(const at::Tensor& x, const at::Tensor& weight,
                                 const std::optional<at::Tensor>& factors) {
  TORCH_CHECK(x.dim() > 0 && weight.dim() == 2 && x.size(-1) * kGroupBytes == weight.size(1) * kGroup,
              "few_rows_in_four_bits: sizes do not match");
  TORCH_CHECK(rows_of(x) <= kMostRows, "few_rows_in_four_bits: at most ", kMostRows, " rows");
  TORCH_CHECK(weight.is_contiguous() && weight.scalar_type() == at::kByte,
              "few_rows_in_four_bits: contiguous bytes alone");
  const at::Tensor states = scaled(x.to(at::kFloat), factors).contiguous();
  const int64_t rows = rows_of(x), in = x.size(-1), out = weight.size(0), groups = in / kGroup;
  const int64_t blocks = (groups + kGroups - 1) / kGroups;
  std::vector<RoundedBlock> inputs(rows * blocks);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      const float* from = states.const_data_ptr<float>() + row * in + block * kGroups * kGroup;
      inputs[row * blocks + block] = rounded_block(from, std::min<int64_t>(kGroups, groups - block * kGroups));
    }
  }
  at::Tensor y = at::empty(with_last(x, out), states.options());
  const FourBitsProduct work{
      inputs.data(), weight.const_data_ptr<uint8_t>(), y.mutable_data_ptr<float>(), nullptr, nullptr, groups, out};
  // Waking a thread for less than this takes longer than the work.
  const int64_t fewest = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, in * rows));
  at::parallel_for(0, out, fewest, [&](int64_t begin, int64_t end) { in_tiles(work, rows, begin, end); });
  return y.to(x.scalar_type());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(selfspec, m) { m.def("few_rows_in_four_bits(Tensor x, Tensor weight, Tensor? factors) -> Tensor"); }

TORCH_LIBRARY_IMPL(selfspec, CPU, m) { m.impl("few_rows_in_four_bits", few_rows_in_four_bits); }
