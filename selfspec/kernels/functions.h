// Functions of vectors of floats, to a few units in the last place.

#pragma once

#include <cmath>
#include <limits>
#include <utility>

#include "lanes.h"

using FloatLanes = Lanes<float, kLanes<float>>::Vector;
using IntLanes = Lanes<int32_t, kLanes<float>>::Vector;

#if defined(__GNUC__) && !defined(__clang__)
// Of two vectors of which `2 * Half` numbers each belong to one sum, the sums of the halves of these, first those of `x`.
template <int Half, int... Lane>
inline FloatLanes halved(FloatLanes x, FloatLanes z, std::integer_sequence<int, Lane...>) {
  constexpr int lanes = sizeof...(Lane);
  constexpr auto place = [](int lane) {
    const int own = lane % (lanes / 2);
    return own / Half * 2 * Half + own % Half + (lane < lanes / 2 ? 0 : lanes);
  };
  return __builtin_shuffle(x, z, IntLanes{place(Lane)...}) + __builtin_shuffle(x, z, IntLanes{(place(Lane) + Half)...});
}

template <int Half>
inline FloatLanes totals_of(FloatLanes* sums) {
  for (int i = 0; i < Half; ++i) {
    sums[i] = halved<Half>(sums[2 * i], sums[2 * i + 1], std::make_integer_sequence<int, kLanes<float>>{});
  }
  if constexpr (Half > 1) return totals_of<Half / 2>(sums);
  return sums[0];
}
#else
template <int Half>
inline FloatLanes totals_of(FloatLanes* sums) {
  FloatLanes found;
  for (int i = 0; i < kLanes<float>; ++i) found[i] = total<float, kLanes<float>>(sums[i]);
  return found;
}
#endif

// The totals of as many vectors as one has numbers, each summed as `total` does.
inline FloatLanes totals(FloatLanes* sums) { return totals_of<kLanes<float> / 2>(sums); }

// By powers of two and a polynomial between them; zero below what a normal number holds.
inline FloatLanes exp_of(FloatLanes x) {
  constexpr float most = 88.3762626f, least = -87.3365402f;
  const FloatLanes over = FloatLanes{} + std::numeric_limits<float>::infinity();
  const FloatLanes held = x > most ? FloatLanes{} + most : x < least ? FloatLanes{} + least : x;
  // Adding and taking back rounds to an integer.
  constexpr float shift = 12582912.f;
  FloatLanes turns = held * 1.44269504f + shift;
#if defined(__x86_64__)
  asm("" : "+v"(turns));
#endif
  turns -= shift;
  const FloatLanes rest = (held - turns * 0.693359375f) + turns * 2.12194440e-4f;
  FloatLanes sum = FloatLanes{} + 1.9875691500e-4f;
  for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    sum = sum * rest + factor;
  }
  sum = sum * (rest * rest) + rest + 1.f;
  const IntLanes power = (__builtin_convertvector(turns, IntLanes) + 127) << 23;
  FloatLanes scale;
  std::memcpy(&scale, &power, sizeof scale);
  const FloatLanes found = x > most ? over : x < least ? FloatLanes{} : sum * scale;
  return x == x ? found : x;
}

inline FloatLanes sigmoid_of(FloatLanes x) { return 1.f / (1.f + exp_of(-x)); }

inline FloatLanes tanh_of(FloatLanes x) { return 1.f - 2.f / (1.f + exp_of(2.f * x)); }
