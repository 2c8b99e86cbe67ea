// A product with weights in 4 bits, in groups of 32 inputs that have a scale and a zero each.
//
// Inputs are rounded to 8 bits by the same groups. Each output of each row is summed in one order, whatever the number
// of rows and threads.

#pragma once

#include <algorithm>

#include "lanes.h"
#include "rounding.h"

namespace four_bits {

// A block is four groups, in 16 lanes of 8 levels: the lower four bits of four bytes, and their higher four bits. A
// group's 16 bytes hold its first 16 levels and its last.
constexpr int kGroup = 32;
constexpr int kGroups = 4;
constexpr int kBlockLanes = 16;
constexpr int kLanesOfGroup = kBlockLanes / kGroups;
constexpr int kBytes = kGroups * kGroup / 2;

struct Block {
  uint16_t scales[kGroups];  // bfloat16, as the zeros: what level 8 stands for
  uint16_t zeros[kGroups];
  uint8_t levels[kBytes];
};
constexpr int kGroupBytes = sizeof(Block) / kGroups;

struct RoundedBlock {
  int8_t first[kBytes];  // of each group's 16 bytes
  int8_t last[kBytes];
  float scales[kBlockLanes];
  float sums[kBlockLanes];
};

// Groups beyond `groups` are zeros: rows may end within a block.
inline RoundedBlock rounded_block(const float* x, int64_t groups) {
  RoundedBlock inputs = {};
  for (int64_t group = 0; group < groups; ++group) {
    const float* first = x + group * kGroup;
    const float* last = first + kGroup / 2;
    const Step step = step_of<kGroup>(first);
    int32_t sum = 0;
    if (step.factor > 0) {
      for (int i = 0; i < kGroup / 2; ++i) {
        const int32_t one = step.level(first[i]), other = step.level(last[i]);
        inputs.first[group * kGroup / 2 + i] = one;
        inputs.last[group * kGroup / 2 + i] = other;
        sum += one + other;
      }
    }
    for (int lane = group * kLanesOfGroup; lane < (group + 1) * kLanesOfGroup; ++lane) {
      inputs.scales[lane] = step.scale;
      inputs.sums[lane] = step.scale * sum / kLanesOfGroup;
    }
  }
  return inputs;
}

constexpr int kLanesAtOnce = kLanes<float>;
constexpr int kParts = kBlockLanes / kLanesAtOnce;
using Floats = Lanes<float, kLanesAtOnce>::Vector;
using Ints = Lanes<int32_t, kLanesAtOnce>::Vector;
using Bytes = Lanes<uint8_t, kVectorBytes>::Vector;

// Eight products a lane.
inline Ints dots(const Bytes& low, const Bytes& high, const int8_t* first, const int8_t* last) {
#if defined(__AVX512VNNI__)
  const auto sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), (__m512i)low, _mm512_loadu_si512(first));
  return (Ints)_mm512_dpbusd_epi32(sums, (__m512i)high, _mm512_loadu_si512(last));
#elif defined(__AVX512BW__)
  const auto pairs = _mm512_add_epi16(_mm512_maddubs_epi16((__m512i)low, _mm512_loadu_si512(first)),
                                      _mm512_maddubs_epi16((__m512i)high, _mm512_loadu_si512(last)));
  return (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  const auto inputs = [](const int8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); };
  const auto pairs = _mm256_add_epi16(_mm256_maddubs_epi16((__m256i)low, inputs(first)),
                                      _mm256_maddubs_epi16((__m256i)high, inputs(last)));
  return (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
  int32x4_t halves[2] = {};
  int8x16_t levels[4];
  std::memcpy(levels, &low, sizeof low);
  std::memcpy(levels + 2, &high, sizeof high);
  for (int half = 0; half < 2; ++half) {
    halves[half] = vdotq_s32(halves[half], levels[half], vld1q_s8(first + 16 * half));
    halves[half] = vdotq_s32(halves[half], levels[2 + half], vld1q_s8(last + 16 * half));
  }
  Ints sums;
  std::memcpy(&sums, halves, sizeof sums);
  return sums;
#else
  Ints sums = {};
  for (int i = 0; i < kVectorBytes; ++i) sums[i / 4] += low[i] * first[i] + high[i] * last[i];
  return sums;
#endif
}

// Four numbers in bfloat16, each in all lanes of its group.
template <int Part>
inline Floats by_lane(const uint16_t* numbers) {
#if defined(__AVX512BW__)
  int64_t four;
  std::memcpy(&four, numbers, sizeof four);
  // The higher two of a lane's bytes are those of its number; the lower ones become zeros.
  constexpr Ints places = {0x0100ffff, 0x0100ffff, 0x0100ffff, 0x0100ffff, 0x0302ffff, 0x0302ffff, 0x0302ffff, 0x0302ffff,
                           0x0504ffff, 0x0504ffff, 0x0504ffff, 0x0504ffff, 0x0706ffff, 0x0706ffff, 0x0706ffff, 0x0706ffff};
  return (Floats)_mm512_shuffle_epi8(_mm512_set1_epi64(four), (__m512i)places);
#else
  Ints bits;
  for (int lane = 0; lane < kLanesAtOnce; ++lane) {
    bits[lane] = numbers[(Part * kLanesAtOnce + lane) / kLanesOfGroup] << 16;
  }
  return (Floats)bits;
#endif
}

// What a product reads and writes; bias and what is added to it are null where there are none.
struct FourBitsProduct {
  using Sum = float;

  const RoundedBlock* x;  // [rows, blocks]
  const uint8_t* weight;
  float* y;
  const float* bias;
  const float* residual;
  int64_t groups;
  int64_t out;

  int64_t inputs_of_row() const { return (groups + kGroups - 1) / kGroups; }
  bool in_line(int64_t) const { return false; }

  template <int Rows, int Outputs>
  inline void tile(int64_t first) const {
    Floats sums[Outputs][Rows] = {};
    const int64_t bytes = groups * kGroupBytes, whole = groups / kGroups;
    const int64_t blocks = inputs_of_row();
    const uint8_t* row = weight + first * bytes;
    const uint8_t* ahead = row + kAhead;
    for (int64_t block = 0; block < whole; ++block) {
      for (int output = 0; output < Outputs; ++output) {
        const uint8_t* at = row + output * bytes + block * sizeof(Block);
        __builtin_prefetch(ahead, 0, 3);
        ahead += sizeof(Block);
        add<Rows>(sums[output], reinterpret_cast<const Block*>(at), x + block, blocks);
      }
    }
    if (whole < blocks) {
      const int64_t rest = groups - whole * kGroups;
      for (int output = 0; output < Outputs; ++output) {
        Block end = {};
        const uint8_t* at = row + output * bytes + whole * sizeof(Block);
        std::memcpy(end.scales, at, 2 * rest);
        std::memcpy(end.zeros, at + 2 * rest, 2 * rest);
        std::memcpy(end.levels, at + 4 * rest, rest * kGroup / 2);
        add<Rows>(sums[output], &end, x + whole, blocks);
      }
    }
    put_tile(*this, first, sums, static_cast<const float*>(nullptr));
  }

  template <int Rows, int Part = 0>
  static inline void add(Floats* sums, const Block* block, const RoundedBlock* x, int64_t blocks) {
    constexpr int byte = Part * kVectorBytes, lane = Part * kLanesAtOnce;
    const auto levels = read<uint8_t, kVectorBytes>(block->levels + byte);
    // No bytes are shifted by themselves: pairs are.
    using Pairs = Lanes<uint16_t, kVectorBytes / 2>::Vector;
    Bytes low = levels & 15, high = (Bytes)((Pairs)levels >> 4) & 15;
    const Floats scales = by_lane<Part>(block->scales);
    const Floats zeros = by_lane<Part>(block->zeros) - 8 * scales;
    for (int row = 0; row < Rows; ++row) {
      const RoundedBlock& inputs = x[row * blocks];
      const auto products = __builtin_convertvector(dots(low, high, inputs.first + byte, inputs.last + byte), Floats);
      add_product(sums[row], products, scales * read<float, kLanesAtOnce>(inputs.scales + lane));
      add_product(sums[row], zeros, read<float, kLanesAtOnce>(inputs.sums + lane));
    }
    if constexpr (Part + 1 < kParts) add<Rows, Part + 1>(sums, block, x, blocks);
  }
};

}  // namespace four_bits
