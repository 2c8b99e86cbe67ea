// Products with weights in planes: a bfloat16 weight as one byte, of sign, 4-bit code of the exponent and upper 3 bits of
// the mantissa, and half a byte, the mantissa's lower 4 bits. Sums are those of `Product`, in its order, to the last bit.
//
// A row is blocks of 64 weights, the last one filled up with zeros. Bytes of the upper plane lie in pairs of a half of 32:
// weights 0 and 16, 1 and 17, and on, so that pairs of 16 bits become two vectors of floats by a shift and a mask. Byte j
// of the lower plane belongs to byte j of both halves, the first half's in the lower bits.
//
// The exponent is the row's base plus the code. Where code and mantissa are 0 the weight is 0. Any other weight that no
// code from 1 to 15 holds is an escape, whose byte means nothing: beside the planes lie the place of the byte in its row,
// in the upper 16 bits, and the weight, in the lower ones, row by row, in the order of places.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "lanes.h"

constexpr int kBlockOfPlanes = 64;

template <bool Whole>
struct PlanesProduct;

// What the planes of a weight are read by.
struct Planes {
  static constexpr bool kJoined = true;
  using Floats = Lanes<float, kLanes<float>>::Vector;
  static constexpr int kVectors = kBlockOfPlanes / kLanes<float>;
  static constexpr int kPairs = kVectorBytes / 2;  // numbers of 16 bits in a register
  using Shorts = Lanes<uint16_t, kPairs>::Vector;

  const uint8_t* upper;     // [out, blocks * 64]
  const uint8_t* lower;     // [out, blocks * 32]; null: half a step in its place
  const int32_t* bases;     // [out]
  const int32_t* ends;      // [out]: how many escapes the rows up to this one have
  const uint32_t* escapes;
  int64_t in;

  static int64_t blocks_of(int64_t in) { return (in + kBlockOfPlanes - 1) / kBlockOfPlanes; }
  static int64_t padded(int64_t in) { return blocks_of(in) * kBlockOfPlanes; }
  PlanesProduct<true> product(const float* x, float* y, const float* bias, const float* residual, int64_t out) const;

  // Bytes in 16 bits each, their signs in the upper ones.
  static inline Shorts widened(const uint8_t* bytes) {
#if defined(__AVX512BW__)
    return (Shorts)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
#elif defined(__AVX2__)
    return (Shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
#else
    return (Shorts)__builtin_convertvector(read<int8_t, kPairs>(bytes), typename Lanes<int16_t, kPairs>::Vector);
#endif
  }

  // The same without signs.
  static inline Shorts filled(const uint8_t* bytes) {
#if defined(__AVX512BW__)
    return (Shorts)_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
#elif defined(__AVX2__)
    return (Shorts)_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
#else
    return __builtin_convertvector(read<uint8_t, kPairs>(bytes), Shorts);
#endif
  }

  // Sign, code and mantissa of an upper byte where bfloat16 has them; the bits between belong to the base.
  static inline Shorts placed(const uint8_t* bytes, const Shorts& others) {
    constexpr uint16_t kept = 0x87f0;
    const Shorts shifted = widened(bytes) << 4;
#if defined(__AVX512BW__)
    return (Shorts)_mm512_ternarylogic_epi64(_mm512_set1_epi16(static_cast<int16_t>(kept)), (__m512i)shifted,
                                             (__m512i)others, 0xca);
#else
    return (shifted & kept) | (others & static_cast<uint16_t>(~kept));
#endif
  }

  static constexpr int kWords = kBlockOfPlanes / kPairs;

  // The weights of a block, in the order of the upper plane's bytes.
  static inline void read_block(const uint8_t* bytes, const uint8_t* halves, int32_t base, Shorts* words) {
    for (int step = 0; step < kWords / 2; ++step) {
      // Other bits than the lower four are those of the upper plane, or zero.
      const Shorts both = filled(halves + step * kPairs);
      words[step] = based(placed(bytes + step * kPairs, both), base);
      words[kWords / 2 + step] = based(placed(bytes + (kWords / 2 + step) * kPairs, both >> 4), base);
    }
  }

  static inline Shorts based(const Shorts& words, int32_t base) {
    const uint16_t step = base << 7;
    const Shorts added = Shorts{} + step;
#if defined(__AVX512BW__)
    const auto numbers = _mm512_test_epi16_mask((__m512i)words, _mm512_set1_epi16(0x7fff));
    return (Shorts)_mm512_mask_add_epi16((__m512i)words, numbers, (__m512i)words, (__m512i)added);
#else
    return words + (added & (Shorts)((words & 0x7fff) != 0));
#endif
  }

  // The same of the upper plane alone, by a constant exponent in place of the base: `scale` makes up for it.
  static constexpr int32_t kConstant = 112;
  static inline void read_block(const uint8_t* bytes, Shorts* words) {
    const Shorts others = Shorts{} + static_cast<uint16_t>(kConstant << 7 | 8);
    for (int step = 0; step < kWords; ++step) words[step] = placed(bytes + step * kPairs, others);
  }

  // Floats in the order of the weights: pairs of bits become those of even places, and those 16 weights further.
  static inline void in_order(const Shorts* words, Floats* weights) {
    using Words = Lanes<uint32_t, kLanes<float>>::Vector;
    constexpr int steps = kWords / 2;
    for (int word = 0; word < kWords; ++word) {
      const int first = word / steps * 2 * steps + word % steps;
      weights[first] = (Floats)((Words)words[word] << 16);
      weights[first + steps] = (Floats)((Words)words[word] & 0xffff0000u);
    }
  }

  // The same in bfloat16.
  static inline void in_order(const Shorts* words, uint16_t* weights) {
    constexpr int lanes = kLanes<float>;
    using Words = Lanes<uint32_t, lanes>::Vector;
    using Halves = Lanes<uint16_t, lanes>::Vector;
    constexpr int steps = kWords / 2;
    for (int word = 0; word < kWords; ++word) {
      const int first = word / steps * 2 * steps + word % steps;
      const Halves even = __builtin_convertvector((Words)words[word], Halves);
      const Halves odd = __builtin_convertvector((Words)words[word] >> 16, Halves);
      std::memcpy(weights + first * lanes, &even, sizeof even);
      std::memcpy(weights + (first + steps) * lanes, &odd, sizeof odd);
    }
  }

  // A power of two, by its bits; bases are 0 to 239.
  float scale(int64_t row) const {
    const uint32_t bits = static_cast<uint32_t>(bases[row] - kConstant + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return power;
  }

  // Escapes of a row, of which `patch` takes those of one block after the other.
  struct Escapes {
    const uint32_t* next;
    const uint32_t* end;

    // The block of the next one.
    int64_t block() const { return next < end ? (*next >> 16) / kBlockOfPlanes : INT64_MAX; }
    void patch(Shorts* words) {
      for (const int64_t patched = block(); block() == patched; ++next) {
        const int place = (*next >> 16) % kBlockOfPlanes;
#if defined(__AVX512BW__)
        const __m512i weight = _mm512_set1_epi16(static_cast<int16_t>(*next));
        const uint64_t mask = uint64_t{1} << place;
        words[0] = (Shorts)_mm512_mask_mov_epi16((__m512i)words[0], static_cast<__mmask32>(mask), weight);
        words[1] = (Shorts)_mm512_mask_mov_epi16((__m512i)words[1], static_cast<__mmask32>(mask >> 32), weight);
#else
        uint16_t numbers[kBlockOfPlanes];
        std::memcpy(numbers, words, sizeof numbers);
        numbers[place] = static_cast<uint16_t>(*next);
        std::memcpy(words, numbers, sizeof numbers);
#endif
      }
    }
  };

  Escapes escapes_of(int64_t row) const { return {escapes + (row ? ends[row - 1] : 0), escapes + ends[row]}; }

  // The weights of a row, as many as it has blocks for: floats, or in bfloat16.
  template <typename Number>
  void take(int64_t row, Number* to) const {
    const int64_t blocks = blocks_of(in);
    const uint8_t *bytes = upper + row * blocks * kBlockOfPlanes, *halves = lower + row * blocks * kBlockOfPlanes / 2;
    Escapes left = escapes_of(row);
    for (int64_t block = 0; block < blocks; ++block) {
      Shorts words[kWords];
      std::conditional_t<std::is_same_v<Number, float>, Floats[kVectors], uint16_t[kBlockOfPlanes]> weights;
      read_block(bytes + block * kBlockOfPlanes, halves + block * kBlockOfPlanes / 2, bases[row], words);
      if (left.block() == block) left.patch(words);
      in_order(words, weights);
      std::memcpy(to + block * kBlockOfPlanes, weights, sizeof weights);
    }
  }
};

// What a product reads and writes. `Whole`: both planes and the escapes; else the upper plane alone.
template <bool Whole>
struct PlanesProduct {
  using Sum = float;
  using Floats = Planes::Floats;
  static constexpr int kVectors = Planes::kVectors;

  const float* x;  // [rows, blocks * 64], zeros behind the inputs
  Planes weight;
  float* y;
  const float* bias;
  const float* residual;
  int64_t blocks;
  int64_t out;

  int64_t inputs_of_row() const { return blocks * kBlockOfPlanes; }
  bool in_line(int64_t rows) const { return false; }

  template <int Rows, int Outputs>
  inline void tile(int64_t first) const {
    Floats sums[Outputs][Rows] = {};
    const int64_t in = inputs_of_row();
    const uint8_t* upper = weight.upper + first * in;
    const uint8_t* ahead = upper + (Outputs > 1 ? 2 * Outputs * in : kAhead);
    const uint8_t *lower = nullptr, *lower_ahead = nullptr;
    Planes::Escapes escapes[Outputs];
    int64_t patched = INT64_MAX;  // the next block that has escapes, of any output
    if constexpr (Whole) {
      lower = weight.lower + first * in / 2;
      lower_ahead = lower + (ahead - upper) / 2;
      for (int output = 0; output < Outputs; ++output) {
        escapes[output] = weight.escapes_of(first + output);
        patched = std::min(patched, escapes[output].block());
      }
    }
    for (int64_t block = 0; block < blocks; ++block) {
      const float* inputs = x + block * kBlockOfPlanes;
      const bool patches = block == patched;
#pragma GCC unroll 4
      for (int output = 0; output < Outputs; ++output) {
        __builtin_prefetch(ahead, 0, Outputs > 1 ? 2 : 3);
        ahead += kBlockOfPlanes;
        Planes::Shorts words[Planes::kWords];
        Floats weights[kVectors];
        const uint8_t* bytes = upper + output * in + block * kBlockOfPlanes;
        if constexpr (Whole) {
          if (block % 2 == 0) __builtin_prefetch(lower_ahead, 0, Outputs > 1 ? 2 : 3);
          lower_ahead += kBlockOfPlanes / 2;
          Planes::read_block(bytes, lower + (output * in + block * kBlockOfPlanes) / 2, weight.bases[first + output],
                             words);
          if (__builtin_expect(patches, 0) && escapes[output].block() == block) escapes[output].patch(words);
        } else {
          Planes::read_block(bytes, words);
        }
        Planes::in_order(words, weights);
        for (int vector = 0; vector < kVectors; ++vector) {
          Floats held = weights[vector];
          KEEP_IN_REGISTER(held);
          for (int row = 0; row < Rows; ++row) {
            add_product(sums[output][row], held, read<float, kLanes<float>>(inputs + row * in + vector * kLanes<float>));
          }
        }
      }
      if (__builtin_expect(patches, 0)) {
        patched = INT64_MAX;
#pragma GCC unroll 4
        for (const auto& left : escapes) patched = std::min(patched, left.block());
      }
    }
    float scales[Outputs];
    for (int output = 0; output < Outputs; ++output) scales[output] = Whole ? 1 : weight.scale(first + output);
    put_tile(*this, first, sums, Whole ? nullptr : scales);
  }
};

inline PlanesProduct<true> Planes::product(const float* x, float* y, const float* bias, const float* residual,
                                           int64_t out) const {
  return {x, *this, y, bias, residual, blocks_of(in), out};
}

// The upper plane alone.
struct UpperPlane {
  static constexpr bool kJoined = false;

  Planes planes;

  static int64_t padded(int64_t in) { return Planes::padded(in); }
  PlanesProduct<false> product(const float* x, float* y, const float* bias, const float* residual, int64_t out) const {
    return {x, planes, y, bias, residual, Planes::blocks_of(planes.in), out};
  }
};
