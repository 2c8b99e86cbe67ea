// How numbers are stored: in what they are summed, how a vector of them or one is read, and how one is rounded: to the
// nearest, of two as near to the even one.

#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.h"

template <typename Number>
struct Plain {
  using Stored = Number;
  using Sum = Number;
  static inline auto lanes(const Number* from) { return read<Number, kLanes<Number>>(from); }
  static Number number(Number stored) { return stored; }
  static Number stored(Number number) { return number; }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Sum = float;
  static inline auto lanes(const uint16_t* from) {
    constexpr int lanes = kLanes<float>;
    const auto bits = __builtin_convertvector(read<uint16_t, lanes>(from), typename Lanes<uint32_t, lanes>::Vector) << 16;
    return read<float, lanes>(&bits);
  }
  static float number(uint16_t stored) {
    const uint32_t bits = static_cast<uint32_t>(stored) << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
  }
  static uint16_t stored(float number) {
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    if (number != number) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

// Processors convert these, and numbers beyond 65,504 to infinity.
struct Float16 {
  using Stored = uint16_t;
  using Sum = float;
#if defined(__x86_64__)
  static inline auto lanes(const uint16_t* from) {
#if defined(__AVX512F__)
    return (Lanes<float, 16>::Vector)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
    return (Lanes<float, 8>::Vector)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
  }
  static float number(uint16_t stored) { return _cvtsh_ss(stored); }
  static uint16_t stored(float number) { return _cvtss_sh(number, _MM_FROUND_TO_NEAREST_INT); }
#else
  static inline auto lanes(const uint16_t* from) {
    const auto part = [&](int first) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + first))); };
    const float32x4_t parts[2] = {part(0), part(4)};
    return read<float, kLanes<float>>(parts);
  }
  static float number(uint16_t stored) {
    __fp16 half;
    std::memcpy(&half, &stored, sizeof half);
    return half;
  }
  static uint16_t stored(float number) {
    const __fp16 half = number;
    uint16_t bits;
    std::memcpy(&bits, &half, sizeof bits);
    return bits;
  }
#endif
};
