// Products with weights in the blocks of GGUF: small numbers, levels, that share scales. A row is whole blocks, as they lie
// in the file. Sums are those of `Product` over the weights in float32, in its order, to the last bit.
//
// A weight is `scale * level`, or `scale * level + offset`. Scales have at most 18 bits and levels 8, so the product is
// exact, and one rounding gives what two operations give.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lanes.h"
#include "numbers.h"

namespace blocks {

using Floats = Lanes<float, kLanes<float>>::Vector;

// Levels of 32 weights, a byte each. Processors with AVX2 alone hold them in the order in which one shuffle makes floats of
// eight: groups of four with even numbers, then those with odd ones.
constexpr int kLevels = 32;
constexpr int kVectors = kLevels / kLanes<float>;
using Levels = Lanes<uint8_t, kLevels>::Vector;
using Halves = Lanes<uint8_t, kLevels / 2>::Vector;
using Pairs = Lanes<uint16_t, kLevels / 2>::Vector;
#if defined(__AVX2__) && !defined(__AVX512BW__)
#define SELFSPEC_IN_GROUPS
#endif

// No bytes are shifted by themselves: pairs are, and what comes from the neighbour is masked.
inline Levels shifted_down(const Levels& levels, int by) { return (Levels)((Pairs)levels >> by); }
inline Levels shifted_up(const Levels& levels, int by) { return (Levels)((Pairs)levels << by); }

inline Levels levels_of(const uint8_t* bytes) {
#if defined(SELFSPEC_IN_GROUPS)
  const __m256i groups = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  return (Levels)_mm256_permutevar8x32_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)), groups);
#else
  return read<uint8_t, kLevels>(bytes);
#endif
}

// Of 16 bytes the lower halves, and then the upper ones.
inline Levels levels_of_halves(const uint8_t* bytes) {
#if defined(SELFSPEC_IN_GROUPS)
  const __m256i both = _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  const __m256i groups = _mm256_permutevar8x32_epi32(both, _mm256_setr_epi32(0, 2, 0, 2, 1, 3, 1, 3));
  return (Levels)_mm256_srlv_epi32(groups, _mm256_setr_epi32(0, 0, 4, 4, 0, 0, 4, 4)) & 15;
#elif defined(__AVX512BW__)
  // In registers: a load of what two stores wrote waits for both to reach the cache.
  const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  return (Levels)_mm256_set_m128i(_mm_srli_epi16(both, 4), both) & 15;
#else
  const Halves both = read<uint8_t, kLevels / 2>(bytes);
  const Halves parts[2] = {both & 15, both >> 4};
  return read<uint8_t, kLevels>(parts);
#endif
}

// 16 where a bit of four bytes is set, else 0: bit i is that of weight i.
inline Levels sixteens(const uint8_t* bytes) {
#if defined(__AVX512BW__)
  uint32_t bits;
  std::memcpy(&bits, bytes, sizeof bits);
  return (Levels)_mm256_maskz_set1_epi8(bits, 16);
#elif defined(SELFSPEC_IN_GROUPS)
  int32_t bits;
  std::memcpy(&bits, bytes, sizeof bits);
  const __m256i each = _mm256_set_epi32(0x03030303, 0x02020202, 0x01010101, 0, 0x03030303, 0x02020202, 0x01010101, 0);
  const __m256i places = _mm256_set_epi64x(int64_t(0x8040201080402010), int64_t(0x8040201080402010), 0x0804020108040201,
                                           0x0804020108040201);
  const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), each);
  return (Levels)_mm256_cmpeq_epi8(_mm256_and_si256(spread, places), places) & 16;
#else
  Levels spread, places;
  for (int i = 0; i < kLevels; ++i) {
    spread[i] = bytes[i / 8];
    places[i] = 1 << i % 8;
  }
  return (Levels)((spread & places) != 0) & 16;
#endif
}

// Vector number `Number` of the floats of 32 levels.
template <int Number>
inline Floats floats_of(const Levels& levels) {
#if defined(__AVX512BW__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm256_extracti128_si256((__m256i)levels, Number)));
#elif defined(SELFSPEC_IN_GROUPS)
  constexpr int first = 4 * Number, none = -128;
  const __m256i places = _mm256_setr_epi8(
      first, none, none, none, first + 1, none, none, none, first + 2, none, none, none, first + 3, none, none, none,
      first, none, none, none, first + 1, none, none, none, first + 2, none, none, none, first + 3, none, none, none);
  return (Floats)_mm256_cvtepi32_ps(_mm256_shuffle_epi8((__m256i)levels, places));
#else
  constexpr int lanes = kLanes<float>;
  uint8_t bytes[kLevels];
  std::memcpy(bytes, &levels, sizeof bytes);
  return __builtin_convertvector(read<uint8_t, lanes>(bytes + Number * lanes), Floats);
#endif
}

inline Floats all(float number) { return number - Floats{}; }

// scale * level + offset, rounded once.
inline Floats weights_of(const Floats& levels, const Floats& scale, const Floats& offset) {
  Floats sum = offset;
  add_product(sum, scale, levels);
  return sum;
}

// Calls `take(number, floats)` with each vector of 32 weights, the first one number `First`, with one scale and offset.
template <int First, int Number = 0, typename Take>
inline void take_alike(const Levels& levels, float scale, float offset, const Take& take) {
  take(First + Number, weights_of(floats_of<Number>(levels), all(scale), all(offset)));
  if constexpr (Number + 1 < kVectors) take_alike<First, Number + 1>(levels, scale, offset, take);
}

// The same with one scale for the first 16 weights, and another for the last.
template <int First, int Number = 0, typename Take>
inline void take_by_halves(const Levels& levels, const float* scales, float step, const Take& take) {
  const float scale = scales[Number * 2 / kVectors];
  take(First + Number, weights_of(floats_of<Number>(levels), all(scale), all(scale * step)));
  if constexpr (Number + 1 < kVectors) take_by_halves<First, Number + 1>(levels, scales, step, take);
}

inline float half(const uint8_t* bytes) {
  uint16_t stored;
  std::memcpy(&stored, bytes, sizeof stored);
  return Float16::number(stored);
}

// Eight levels in bytes, each times a unit.
template <typename Byte>
inline void put(const void* levels, float unit, float* to) {
#if defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(levels));
  const __m256i each = std::is_signed_v<Byte> ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
  _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtepi32_ps(each), _mm256_set1_ps(unit)));
#else
  for (int i = 0; i < 8; ++i) to[i] = unit * static_cast<const Byte*>(levels)[i];
#endif
}

// Each type has the weights and bytes of a block; `Scales`, what its weights share, as floats; and `take`, which gives the
// weights of one chunk of a block, vector by vector.

// Blocks of 32 weights, a chunk each.
template <typename Type>
struct OfThirtyTwo {
  static constexpr int kWeights = 32;
  static constexpr int kOfChunk = 32;

  struct Scales {
    float scale, offset;
  };

  static inline Scales scales(const uint8_t* block) {
    const float scale = half(block);
    return {scale, Type::kHasOffset ? half(block + 2) : -Type::kZero * scale};
  }

  template <typename Take>
  static inline void take(const uint8_t* block, const Scales& scales, int, const Take& take) {
    take_alike<0>(Type::levels(block), scales.scale, scales.offset, take);
  }
};

struct Q4_0 : OfThirtyTwo<Q4_0> {
  static constexpr int kBytes = 18, kZero = 8;
  static constexpr bool kHasOffset = false;
  static inline Levels levels(const uint8_t* block) { return levels_of_halves(block + 2); }
};

struct Q4_1 : OfThirtyTwo<Q4_1> {
  static constexpr int kBytes = 20, kZero = 0;
  static constexpr bool kHasOffset = true;
  static inline Levels levels(const uint8_t* block) { return levels_of_halves(block + 4); }
};

struct Q5_0 : OfThirtyTwo<Q5_0> {
  static constexpr int kBytes = 22, kZero = 16;
  static constexpr bool kHasOffset = false;
  static inline Levels levels(const uint8_t* block) { return levels_of_halves(block + 6) | sixteens(block + 2); }
};

struct Q5_1 : OfThirtyTwo<Q5_1> {
  static constexpr int kBytes = 24, kZero = 0;
  static constexpr bool kHasOffset = true;
  static inline Levels levels(const uint8_t* block) { return levels_of_halves(block + 8) | sixteens(block + 4); }
};

struct Q8_0 : OfThirtyTwo<Q8_0> {
  static constexpr int kBytes = 34, kZero = 128;
  static constexpr bool kHasOffset = false;
  static inline Levels levels(const uint8_t* block) { return levels_of(block + 2) ^ 128; }
};

// Blocks of 256 weights in eight groups, whose scales and offsets have 6 bits and are in units of two numbers of the block.
template <typename Type>
struct InGroups {
  static constexpr int kWeights = 256;
  static constexpr int kOfChunk = 64;

  struct Scales {
    float scales[8], offsets[8];
  };

  static inline Scales scales(const uint8_t* block) {
    uint32_t words[3];
    std::memcpy(words, block + 4, sizeof words);
    constexpr uint32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, two = 0x30303030;
    const uint32_t of_scales[2] = {words[0] & six, (words[2] & four) | ((words[0] >> 2) & two)};
    const uint32_t of_offsets[2] = {words[1] & six, ((words[2] >> 4) & four) | ((words[1] >> 2) & two)};
    Scales found;
    put<uint8_t>(of_scales, half(block), found.scales);
    put<uint8_t>(of_offsets, -half(block + 2), found.offsets);
    return found;
  }

  template <typename Take>
  static inline void take(const uint8_t* block, const Scales& scales, int chunk, const Take& take) {
    const Levels both = levels_of(block + Type::kFirst + chunk * 32);
    const float *scale = scales.scales + 2 * chunk, *offset = scales.offsets + 2 * chunk;
    take_alike<0>(Type::with_fifth_bit(both & 15, block, 2 * chunk), scale[0], offset[0], take);
    take_alike<kVectors>(Type::with_fifth_bit(shifted_down(both, 4) & 15, block, 2 * chunk + 1), scale[1], offset[1],
                         take);
  }
};

struct Q4_K : InGroups<Q4_K> {
  static constexpr int kBytes = 144, kFirst = 16;
  static inline Levels with_fifth_bit(const Levels& levels, const uint8_t*, int) { return levels; }
};

struct Q5_K : InGroups<Q5_K> {
  static constexpr int kBytes = 176, kFirst = 48;
  static inline Levels with_fifth_bit(const Levels& levels, const uint8_t* block, int group) {
    return levels | (shifted_up(shifted_down(levels_of(block + 16), group), 4) & 16);
  }
};

// Blocks of 256 weights in 16 groups, whose scales have 8 bits and a sign, in units of a number of the block. A chunk is half
// of a half: lower or upper four bits of 64 bytes, and two bits of 32.
struct Q6_K {
  static constexpr int kWeights = 256, kBytes = 210;
  static constexpr int kOfChunk = 64;

  struct Scales {
    float scales[16];
  };

  static inline Scales scales(const uint8_t* block) {
    const float unit = half(block + 208);
    Scales found;
    put<int8_t>(block + 192, unit, found.scales);
    put<int8_t>(block + 200, unit, found.scales + 8);
    return found;
  }

  template <typename Take>
  static inline void take(const uint8_t* block, const Scales& scales, int chunk, const Take& take) {
    const int part = chunk / 2, upper = chunk % 2 * 4;
    const Levels first = levels_of(block + part * 64), last = levels_of(block + part * 64 + 32);
    const Levels bits = shifted_down(levels_of(block + 128 + part * 32), upper);
    const float* scale = scales.scales + 4 * chunk;
    take_by_halves<0>((shifted_down(first, upper) & 15) | (shifted_up(bits, 4) & 48), scale, -32, take);
    take_by_halves<kVectors>((shifted_down(last, upper) & 15) | (shifted_up(bits, 2) & 48), scale + 2, -32, take);
  }
};

template <typename Type>
constexpr int64_t bytes_of(int64_t in) {
  return in / Type::kWeights * Type::kBytes;
}

// The weights of a row of `in`, as floats.
template <typename Type>
void take_row(const uint8_t* row, int64_t in, float* to) {
  for (const uint8_t* end = row + bytes_of<Type>(in); row < end; row += Type::kBytes) {
    const auto scales = Type::scales(row);
    for (int chunk = 0; chunk < Type::kWeights / Type::kOfChunk; ++chunk, to += Type::kOfChunk) {
      Type::take(row, scales, chunk, [&](int vector, const Floats& weights) {
        std::memcpy(to + vector * kLanes<float>, &weights, sizeof weights);
      });
    }
  }
}

// What a product reads and writes; bias and what is added to it are null where there are none.
template <typename Type>
struct BlocksProduct {
  using Sum = float;

  const float* x;  // [rows, in]
  const uint8_t* weight;
  float* y;
  const float* bias;
  const float* residual;
  int64_t in;
  int64_t out;

  int64_t inputs_of_row() const { return in; }
  bool in_line(int64_t) const { return false; }

  template <int Rows, int Outputs>
  inline void tile(int64_t first) const {
    Floats sums[Outputs][Rows] = {};
    const int64_t bytes = bytes_of<Type>(in);
    const uint8_t* row = weight + first * bytes;
    const uint8_t* end = row + bytes;
    const uint8_t* ahead = row + (Outputs > 1 ? Outputs * bytes : kAhead);
    const float* inputs = x;
    for (; row < end; row += Type::kBytes) {
      typename Type::Scales scales[Outputs];
#pragma GCC unroll 4
      for (int output = 0; output < Outputs; ++output) {
        scales[output] = Type::scales(row + output * bytes);
        for (int line = 0; line < Type::kBytes; line += 64) __builtin_prefetch(ahead + line, 0, Outputs > 1 ? 2 : 3);
        ahead += Type::kBytes;
      }
      for (int chunk = 0; chunk < Type::kWeights / Type::kOfChunk; ++chunk, inputs += Type::kOfChunk) {
#pragma GCC unroll 4
        for (int output = 0; output < Outputs; ++output) {
          Type::take(row + output * bytes, scales[output], chunk, [&](int vector, Floats weights) {
            KEEP_IN_REGISTER(weights);
#pragma GCC unroll 16
            for (int of = 0; of < Rows; ++of) {
              add_product(sums[output][of], weights,
                          read<float, kLanes<float>>(inputs + of * in + vector * kLanes<float>));
            }
          });
        }
      }
    }
    put_tile(*this, first, sums, static_cast<const float*>(nullptr));
  }
};

// What a weight is read by.
template <typename Type>
struct Weight {
  static constexpr bool kJoined = true;

  const uint8_t* bytes;
  int64_t in;

  static int64_t padded(int64_t in) { return in; }
  void take(int64_t row, float* to) const { take_row<Type>(bytes + row * bytes_of<Type>(in), in, to); }
  void take(int64_t row, uint16_t* to) const {
    std::vector<float> found(in);
    take(row, found.data());
    std::transform(found.begin(), found.end(), to, BFloat16::stored);
  }
  BlocksProduct<Type> product(const float* x, float* y, const float* bias, const float* residual, int64_t out) const {
    return {x, bytes, y, bias, residual, in, out};
  }
};

}  // namespace blocks
