// Vectors of numbers that a register holds, and how many rows products take.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
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

// How many bytes ahead weights are asked for: tiles take less time than memory does to answer.
constexpr int64_t kAhead = 16384;

// Bytes of inputs that stay in the first cache beside weights that pass through it.
constexpr int64_t kInputsInCache = 24000;

constexpr int kMostRows = 1024;
constexpr int kRowsOfTile = 10;
constexpr int kRowsOfWideTile = 6;  // where inputs come from the second cache
constexpr int64_t kOutputsOfHalves = 64;
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

template <typename Number, int lanes>
inline typename Lanes<Number, lanes>::Vector read(const void* from) {
  typename Lanes<Number, lanes>::Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// Adds a product and rounds once, where the processor can. Left to compilers, that depends on how many sums they see.
template <typename Vector>
inline void add_product(Vector& sum, const Vector& one, const Vector& other) {
#if defined(__FMA__)
  constexpr bool is_double = sizeof(sum[0]) == 8;
  if constexpr (sizeof(Vector) == 32 && is_double) {
    sum = (Vector)_mm256_fmadd_pd((__m256d)one, (__m256d)other, (__m256d)sum);
    return;
  } else if constexpr (sizeof(Vector) == 32) {
    sum = (Vector)_mm256_fmadd_ps((__m256)one, (__m256)other, (__m256)sum);
    return;
  }
#if defined(__AVX512F__)
  if constexpr (sizeof(Vector) == 64 && is_double) {
    sum = (Vector)_mm512_fmadd_pd((__m512d)one, (__m512d)other, (__m512d)sum);
    return;
  } else if constexpr (sizeof(Vector) == 64) {
    sum = (Vector)_mm512_fmadd_ps((__m512)one, (__m512)other, (__m512)sum);
    return;
  }
#endif
#endif
#if defined(__aarch64__)
  using Part = std::conditional_t<sizeof(sum[0]) == 8, float64x2_t, float32x4_t>;
  Part sums[sizeof(Vector) / sizeof(Part)], ones[sizeof(Vector) / sizeof(Part)], others[sizeof(Vector) / sizeof(Part)];
  std::memcpy(sums, &sum, sizeof sum);
  std::memcpy(ones, &one, sizeof one);
  std::memcpy(others, &other, sizeof other);
  for (size_t part = 0; part < sizeof(Vector) / sizeof(Part); ++part) {
    if constexpr (sizeof(sum[0]) == 8) {
      sums[part] = vfmaq_f64(sums[part], ones[part], others[part]);
    } else {
      sums[part] = vfmaq_f32(sums[part], ones[part], others[part]);
    }
  }
  std::memcpy(&sum, sums, sizeof sum);
#else
  sum += one * other;
#endif
}

// The sum of a vector: of its halves added up, of theirs, and on.
template <typename Number, int lanes>
inline Number total(const typename Lanes<Number, lanes>::Vector& vector) {
  if constexpr (lanes == 2) {
    return vector[0] + vector[1];
  } else {
    using Half = typename Lanes<Number, lanes / 2>::Vector;
    Half first, last;
    std::memcpy(&first, &vector, sizeof first);
    std::memcpy(&last, reinterpret_cast<const char*>(&vector) + sizeof first, sizeof last);
    return total<Number, lanes / 2>(first + last);
  }
}

// Writes an output of a row of a product: its sum, with bias and what is added to it where they are not null.
template <typename Product, typename Sum>
inline void put(const Product& product, int64_t row, int64_t output, Sum sum) {
  if (product.bias) sum += product.bias[output];
  const int64_t place = row * product.out + output;
  product.y[place] = product.residual ? product.residual[place] + sum : sum;
}

#if defined(__AVX512F__)
// The sums of four vectors, each added up as `total` does.
inline __m128 totals(const __m512& a, const __m512& b, const __m512& c, const __m512& d) {
  const auto halves = [](const __m512& one, const __m512& other) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(one, other, 0x44), _mm512_shuffle_f32x4(one, other, 0xee));
  };
  const __m512 first = halves(a, b), last = halves(c, d);
  const __m512 quarters =
      _mm512_add_ps(_mm512_shuffle_f32x4(first, last, 0x88), _mm512_shuffle_f32x4(first, last, 0xdd));
  const __m512 pairs = _mm512_add_ps(quarters, _mm512_permute_ps(quarters, 0x4e));
  const __m512 all = _mm512_add_ps(pairs, _mm512_permute_ps(pairs, 0xb1));
  return _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, all));
}
#endif

// Writes the outputs of a tile, from output `first`: sums, by scales of these outputs where they are not null.
template <int Rows, int Outputs, typename Product, typename Vector>
inline void put_tile(const Product& product, int64_t first, const Vector (&sums)[Outputs][Rows],
                     const typename Product::Sum* scales) {
  using Sum = typename Product::Sum;
#if defined(__AVX512F__)
  if constexpr (Outputs == 4 && std::is_same_v<Sum, float>) {
#pragma GCC unroll 16
    for (int row = 0; row < Rows; ++row) {
      __m128 four = totals((__m512)sums[0][row], (__m512)sums[1][row], (__m512)sums[2][row], (__m512)sums[3][row]);
      if (scales) four = _mm_mul_ps(four, _mm_loadu_ps(scales));
      ROUNDED(four);
      if (product.bias) four = _mm_add_ps(four, _mm_loadu_ps(product.bias + first));
      const int64_t place = row * product.out + first;
      if (product.residual) four = _mm_add_ps(four, _mm_loadu_ps(product.residual + place));
      _mm_storeu_ps(product.y + place, four);
    }
    return;
  }
#endif
#pragma GCC unroll 4
  for (int output = 0; output < Outputs; ++output) {
#pragma GCC unroll 16
    for (int row = 0; row < Rows; ++row) {
      Sum sum = total<Sum, sizeof(Vector) / sizeof(Sum)>(sums[output][row]);
      if (scales) sum *= scales[output];
      ROUNDED(sum);
      put(product, row, first + output, sum);
    }
  }
}

// The same product without its first rows.
template <typename Product>
Product from_row(const Product& product, int64_t row) {
  Product rest = product;
  rest.x += row * product.inputs_of_row();
  rest.y += row * product.out;
  if (rest.residual) rest.residual += row * product.out;
  return rest;
}

// As many outputs at a time as there are registers for their sums; at most `Most`.
template <int Rows, int Most, typename Work>
void outputs(const Work& work, int64_t begin, int64_t end) {
  constexpr int most = std::min(Most, kSums / Rows);
  constexpr int at_once = most >= 4 ? 4 : most >= 2 ? 2 : 1;
  int64_t output = begin;
  for (; output + at_once <= end; output += at_once) work.template tile<Rows, at_once>(output);
  for (; output < end; ++output) work.template tile<Rows, 1>(output);
}

// Outputs `begin` to `end` of some rows, by tiles of a product: `tile<Rows, Outputs>(first output)`.
template <typename Work, int Rows = kRowsOfTile>
void in_tiles(const Work& work, int64_t rows, int64_t begin, int64_t end) {
  const bool in_line = work.in_line(rows);
  if (rows > (in_line ? kRowsOfTile : kRowsOfWideTile)) {
    // Few sums of so many rows fit into registers: halves of them read each weight again, while the cache holds it.
    const int64_t half = (rows + 1) / 2;
    for (int64_t output = begin; output < end; output += kOutputsOfHalves) {
      const int64_t next = std::min(output + kOutputsOfHalves, end);
      in_tiles(work, half, output, next);
      in_tiles(from_row(work, half), rows - half, output, next);
    }
  } else if (rows == Rows) {
    in_line ? outputs<Rows, 1>(work, begin, end) : outputs<Rows, 4>(work, begin, end);
  } else if constexpr (Rows > 1) {
    in_tiles<Work, Rows - 1>(work, rows, begin, end);
  }
}
