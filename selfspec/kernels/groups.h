// Products with codes of 4 or 8 bits in groups of weights that share a scale, and perhaps a zero, as they lie in quantised
// checkpoints. Sums are those of `Product` with the weights that the codes stand for, in its order, to the last bit.
//
// A row is codes one after the other, of two in a byte the first in the lower bits, but where a kind of code says otherwise.
// A weight is what the code stands for, less the zero, times the scale. Zeros are integers as well, packed along the
// outputs: `[out * bits / 32, groups]`; without them integers have the middle one, and other codes none.

#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "numbers.h"

namespace groups {

using Floats = Lanes<float, kLanes<float>>::Vector;
using Ints = Lanes<int32_t, kLanes<float>>::Vector;
using Codes = Lanes<uint32_t, kLanes<float>>::Vector;

// Codes of 4 bits from a byte on, each in the lowest bits of a lane, below others.
template <int First>
inline Codes spread(const uint8_t* from) {
  int32_t words[kLanes<float> / 8];
  std::memcpy(words, from, sizeof words);
#if defined(__AVX512F__)
  const Codes both = (Codes)_mm512_mask_set1_epi32(_mm512_set1_epi32(words[0]), 0xff00, words[1]);
#else
  const Codes both = Codes{} + static_cast<uint32_t>(words[0]);
#endif
  Codes places;
  for (int lane = 0; lane < kLanes<float>; ++lane) places[lane] = (lane % 8 * 4) ^ First;
  return both >> places;
}

// A kind of codes: what those from some byte on stand for, as many as a register holds floats, in units of `1 / kUnit`.
template <int Bits>
struct Integer {
  static constexpr int kBits = Bits;
  static constexpr int64_t kMiddle = int64_t{1} << (Bits - 1);
  static constexpr float kUnit = 1;

  inline Floats lanes(const uint8_t* from) const {
    if constexpr (Bits == 8) {
#if defined(__AVX512F__)
      return (Floats)_mm512_cvtepi32_ps(
          _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
      return (Floats)_mm256_cvtepi32_ps(
          _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
      return __builtin_convertvector(read<uint8_t, kLanes<float>>(from), Floats);
#endif
    } else {
      return __builtin_convertvector((Ints)(spread<0>(from) & 15), Floats);
    }
  }
};

// Codes of 4 bits that stand for the numbers of a table. `First`: the lowest bit of the first one in a byte, 0 or 4.
template <int First>
struct Named {
  static constexpr int kBits = 4;
  static constexpr int64_t kMiddle = 0;
  static constexpr float kUnit = 1;

  const float* table;

  inline Floats lanes(const uint8_t* from) const {
    const Codes codes = spread<First>(from);
#if defined(__AVX512F__)
    return (Floats)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
    // Of a lane these read the lowest three bits, and the highest one.
    const __m256 lower = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)codes);
    const __m256 upper = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)codes);
    return (Floats)_mm256_blendv_ps(lower, upper, (__m256)(codes << 28));
#else
    Floats found;
    for (int lane = 0; lane < kLanes<float>; ++lane) found[lane] = table[codes[lane] & 15];
    return found;
#endif
  }
};

// Floats of 8 bits with 4 of exponent and 3 of mantissa, whose bits are those of a float of 16 bits 2^8 times as small.
struct Float8 {
  static constexpr int kBits = 8;
  static constexpr int64_t kMiddle = 0;
  static constexpr float kUnit = 256;

  inline Floats lanes(const uint8_t* from) const {
    using Halves = Lanes<uint16_t, kLanes<float>>::Vector;
    const Halves bits = __builtin_convertvector(read<uint8_t, kLanes<float>>(from), Halves);
    const Halves size = bits << 7 & 0x3f80;
    const Halves halves = (bits << 8 & 0x8000) | size | ((Halves)(size == 0x3f80) & 0x7fff);  // the largest: not a number
    return Float16::lanes(reinterpret_cast<const uint16_t*>(&halves));
  }
};

enum class Scale : int64_t { kFloat, kBFloat16, kFloat16, kExponent, kRounded };

// What a weight is read by. A row has a whole number of groups, and a group of vectors.
template <typename Code>
struct Weight {
  static constexpr bool kJoined = true;
  static constexpr int64_t kMask = (int64_t{1} << Code::kBits) - 1;
  static constexpr int64_t kInWord = 32 / Code::kBits;

  Code code;
  const uint8_t* codes;
  const void* scales;     // [out / outputs of a group, groups]
  const uint32_t* zeros;  // or null
  const float* steps;     // of rounded scales: what their 256 codes stand for, what is added, and a factor for 256 scales each
  Scale kind;
  int64_t in;
  int64_t inputs;  // of a group
  int64_t outputs;

  // A weight is `code * scale - shift`, rounded once: with scales of 16 bits, and where the zero is the middle, nothing is.
  struct Step {
    Floats scale;
    Floats shift;
  };

  static int64_t padded(int64_t in) { return in; }
  int64_t groups() const { return in / inputs; }
  int64_t bytes_of_row() const { return in * Code::kBits / 8; }

  float scale(int64_t place) const {
    const auto byte = [&] { return static_cast<const uint8_t*>(scales)[place]; };
    const auto half = [&] { return static_cast<const uint16_t*>(scales)[place]; };
    switch (kind) {
      case Scale::kFloat: return static_cast<const float*>(scales)[place];
      case Scale::kBFloat16: return BFloat16::number(half());
      case Scale::kFloat16: return Float16::number(half());
      case Scale::kExponent: return power(byte());
      default: break;
    }
    float found = steps[byte()] * steps[257 + place / 256];
    ROUNDED(found);
    return found + steps[256];
  }

  // 2^(exponent - 127); 255: not a number.
  static float power(uint32_t exponent) {
    const uint32_t bits = exponent == 0 ? 1 << 22 : exponent == 255 ? 0x7fc00000 : exponent << 23;
    float found;
    std::memcpy(&found, &bits, sizeof found);
    return found;
  }

  Step step(int64_t row, int64_t group) const {
    const float each = scale(row / outputs * groups() + group);
    int64_t zero = Code::kMiddle;
    if (zeros) zero = zeros[row / kInWord * groups() + group] >> row % kInWord * Code::kBits & kMask;
    return {Floats{} + each * Code::kUnit, Floats{} - each * static_cast<float>(zero)};
  }

  inline Floats weights(const uint8_t* from, const Step& step) const {
    Floats found = step.shift;
    add_product(found, code.lanes(from), step.scale);
    return found;
  }

  void take(int64_t row, float* to) const {
    const uint8_t* from = codes + row * bytes_of_row();
    for (int64_t group = 0; group < groups(); ++group) {
      const Step each = step(row, group);
      for (int64_t i = 0; i < inputs; i += kLanes<float>, to += kLanes<float>, from += kLanes<float> * Code::kBits / 8) {
        const Floats found = weights(from, each);
        std::memcpy(to, &found, sizeof found);
      }
    }
  }

  void take(int64_t row, uint16_t* to) const {
    std::vector<float> found(in);
    take(row, found.data());
    for (int64_t i = 0; i < in; ++i) to[i] = BFloat16::stored(found[i]);
  }

  struct Product {
    using Sum = float;
    // Codes that a line of the cache holds.
    static constexpr int64_t kLine = 512 / Code::kBits;

    const float* x;
    Weight weight;
    float* y;
    const float* bias;
    const float* residual;
    int64_t out;

    int64_t inputs_of_row() const { return weight.in; }
    bool in_line(int64_t) const { return false; }

    template <int Rows, int Outputs>
    inline void tile(int64_t first) const {
      Floats sums[Outputs][Rows] = {};
      const int64_t bytes = weight.bytes_of_row(), in = weight.in, groups = weight.groups(), inputs = weight.inputs;
      const uint8_t* from = weight.codes + first * bytes;
      const uint8_t* ahead = from + (Outputs > 1 ? Outputs * bytes : kAhead);
      for (int64_t group = 0, i = 0; group < groups; ++group) {
        Step steps[Outputs];
        for (int output = 0; output < Outputs; ++output) steps[output] = weight.step(first + output, group);
        for (const int64_t end = i + inputs; i < end; i += kLanes<float>) {
          if (i % kLine == 0) {
            for (int output = 0; output < Outputs; ++output, ahead += 64) __builtin_prefetch(ahead, 0, Outputs > 1 ? 2 : 3);
          }
#pragma GCC unroll 4
          for (int output = 0; output < Outputs; ++output) {
            Floats held = weight.weights(from + output * bytes + i * Code::kBits / 8, steps[output]);
            KEEP_IN_REGISTER(held);
            for (int row = 0; row < Rows; ++row) {
              add_product(sums[output][row], held, read<float, kLanes<float>>(x + row * in + i));
            }
          }
        }
      }
      put_tile(*this, first, sums, static_cast<const float*>(nullptr));
    }
  };

  Product product(const float* x, float* y, const float* bias, const float* residual, int64_t out) const {
    return {x, *this, y, bias, residual, out};
  }
};

}  // namespace groups
