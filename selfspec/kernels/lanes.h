// Vectors of numbers that a register holds, and how many rows products take.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// The compiler would read weights from the cache again for every row, and multiply some ends number by number.
#if defined(__x86_64__)
#define KEEP_IN_REGISTER(lanes) asm("" : "+v"(lanes))
#else
#define KEEP_IN_REGISTER(lanes)
#endif

// Keeps a product from being joined with a sum, which would round once where two operations round twice.
#if defined(__x86_64__)
#define ROUNDED(lanes) asm("" : "+v"(lanes))
#elif defined(__aarch64__)
#define ROUNDED(lanes) asm("" : "+w"(lanes))
#else
#define ROUNDED(lanes) asm("" : "+m"(lanes))
#endif

constexpr int kMostRows = 16;
#ifdef __AVX512F__
constexpr int kVectorBytes = 64;
constexpr int kSums = 24;  // vectors of sums that fit into registers beside the operands
#else
constexpr int kVectorBytes = 32;
constexpr int kSums = 12;
#endif

// As many numbers as a register holds in which `Sum`s are added up.
template <typename Sum>
constexpr int kLanes = kVectorBytes / sizeof(Sum);

template <typename Number, int lanes>
struct Lanes {
  typedef Number Vector __attribute__((vector_size(lanes * sizeof(Number))));
};

// Rows of states, [..., in].
inline int64_t rows_of(const at::Tensor& x) { return x.size(-1) ? x.numel() / x.size(-1) : 0; }

// The sizes of `x` with `last` numbers in each row.
inline std::vector<int64_t> with_last(const at::Tensor& x, int64_t last) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = last;
  return sizes;
}

template <typename Number, int lanes>
inline typename Lanes<Number, lanes>::Vector read(const void* from) {
  typename Lanes<Number, lanes>::Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// As many outputs at a time as there are registers for their sums.
template <int Rows, typename Work>
void outputs(const Work& work, int64_t begin, int64_t end) {
  constexpr int most = kSums / Rows;
  constexpr int at_once = most >= 4 ? 4 : most >= 2 ? 2 : 1;
  int64_t output = begin;
  for (; output + at_once <= end; output += at_once) work.template tile<Rows, at_once>(output);
  for (; output < end; ++output) work.template tile<Rows, 1>(output);
}

// Outputs `begin` to `end` of some rows, by tiles of the work: `tile<Rows, Outputs>(first output)`.
template <typename Work, int Rows = kMostRows>
void in_tiles(const Work& work, int64_t rows, int64_t begin, int64_t end) {
  if (rows == Rows) {
    outputs<Rows>(work, begin, end);
  } else if constexpr (Rows > 1) {
    in_tiles<Work, Rows - 1>(work, rows, begin, end);
  }
}
