// Products with codes of 4 or 8 bits in groups of weights that share a scale, and perhaps a zero, as they lie in quantised
// checkpoints. Sums are those of `Product` with the weights that the codes stand for, in its order, to the last bit.
//
// A row is words of 32 bits, the first code in the lowest ones. A weight is the code, less the zero, times the scale. The
// zeros are codes as well, packed along the outputs: `[out * bits / 32, groups]`; without them it is the middle code.

#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "numbers.h"

namespace groups {

using Floats = Lanes<float, kLanes<float>>::Vector;
using Ints = Lanes<int32_t, kLanes<float>>::Vector;
using Codes = Lanes<uint32_t, kLanes<float>>::Vector;

// Codes from `Bits * i / 8` bytes on, as many as a register holds floats.
template <int Bits>
struct Integer {
  static constexpr int kBits = Bits;

  static inline Floats lanes(const uint8_t* from) {
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
      return __builtin_convertvector((Ints)(spread(from) & 15), Floats);
    }
  }

  // Words of eight codes, each code in the lowest bits of a lane.
  static inline Codes spread(const uint8_t* from) {
    int32_t words[kLanes<float> / 8];
    std::memcpy(words, from, sizeof words);
#if defined(__AVX512F__)
    const __m512i both = _mm512_mask_set1_epi32(_mm512_set1_epi32(words[0]), 0xff00, words[1]);
    return (Codes)both >> Codes{0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
#else
    return (Codes{} + static_cast<uint32_t>(words[0])) >> Codes{0, 4, 8, 12, 16, 20, 24, 28};
#endif
  }
};

enum class Scale : int64_t { kFloat, kBFloat16, kFloat16 };

// What a weight is read by. A row has a whole number of groups, and a group of vectors.
template <typename Code>
struct Weight {
  static constexpr bool kJoined = true;
  static constexpr int64_t kMiddle = int64_t{1} << (Code::kBits - 1);
  static constexpr int64_t kMask = (int64_t{1} << Code::kBits) - 1;
  static constexpr int64_t kInWord = 32 / Code::kBits;

  const uint8_t* codes;
  const void* scales;     // [out / outputs of a group, groups]
  const uint32_t* zeros;  // or null
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

  Step step(int64_t row, int64_t group) const {
    const int64_t place = row / outputs * groups() + group;
    float scale;
    if (kind == Scale::kFloat) {
      scale = static_cast<const float*>(scales)[place];
    } else {
      const uint16_t bits = static_cast<const uint16_t*>(scales)[place];
      scale = kind == Scale::kBFloat16 ? BFloat16::number(bits) : Float16::number(bits);
    }
    int64_t zero = kMiddle;
    if (zeros) zero = zeros[row / kInWord * groups() + group] >> row % kInWord * Code::kBits & kMask;
    return {Floats{} + scale, Floats{} - scale * static_cast<float>(zero)};
  }

  static inline Floats weights(const uint8_t* from, const Step& step) {
    Floats found = step.shift;
    add_product(found, Code::lanes(from), step.scale);
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
            Floats held = weights(from + output * bytes + i * Code::kBits / 8, steps[output]);
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
