// Choosing a draft's next token from its logits: the likeliest, or a draw by temperature, top-k and top-p.

#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "functions.h"

struct Choice {
  double temperature;  // 0: the likeliest token
  int64_t most;        // top-k; 0: all
  double mass;         // top-p, of the `most` likeliest; 1: all of them
};

struct Chosen {
  int64_t token;
  float confidence;  // the largest probability; 0 where there is no distribution
};

// Largest of some numbers; NaN is left out.
inline float largest(const float* x, int64_t count) {
  constexpr int lanes = kLanes<float>;
  FloatLanes most = FloatLanes{} - std::numeric_limits<float>::infinity();
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const FloatLanes each = read<float, lanes>(x + i);
    most = each > most ? each : most;
  }
  float found = -std::numeric_limits<float>::infinity();
  for (int lane = 0; lane < lanes; ++lane) found = std::max(found, most[lane]);
  for (; i < count; ++i) found = x[i] > found ? x[i] : found;
  return found;
}

// Weights e^((x - most) / temperature), written to `weights` unless it is null; their sum.
inline double weigh(const float* x, int64_t count, float most, float temperature, float* weights) {
  constexpr int lanes = kLanes<float>;
  FloatLanes sums = {};
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const FloatLanes each = exp_of((read<float, lanes>(x + i) - most) / temperature);
    sums += each;
    if (weights) std::memcpy(weights + i, &each, sizeof each);
  }
  double sum = 0;
  for (int lane = 0; lane < lanes; ++lane) sum += sums[lane];
  for (; i < count; ++i) {
    const float each = std::exp((x[i] - most) / temperature);
    sum += each;
    if (weights) weights[i] = each;
  }
  return sum;
}

class Drawing {
 public:
  // One of `vocabulary` tokens by their logits. `uniform`, in [0, 1), chooses a token; with a `second` number the first
  // chooses a block of tokens. Unless the likeliest is chosen, `q` becomes the distribution that the token is drawn
  // from: the uniform one where the logits give none.
  Chosen run(const float* logits, int64_t vocabulary, const Choice& choice, double uniform, const double* second,
             float* q) {
    const float most = largest(logits, vocabulary);
    if (choice.temperature == 0) {
      const double sum = weigh(logits, vocabulary, most, 1.f, nullptr);
      const int64_t token = std::find(logits, logits + vocabulary, most) - logits;
      return {std::min(token, vocabulary - 1), std::isfinite(sum) && sum > 0 ? float(1 / sum) : 0.f};
    }
    const bool some = choice.most > 0 && choice.most < vocabulary;
    double sum = some ? weigh_likeliest(logits, vocabulary, choice, most, q)
                      : weigh(logits, vocabulary, most, float(choice.temperature), q);
    const bool proper = std::isfinite(sum) && sum > 0;
    if (!proper) {
      std::fill(q, q + vocabulary, 1.f);
      sum = vocabulary;
    }
    if (!some || !proper) {
      kept_.resize(vocabulary);
      std::iota(kept_.begin(), kept_.end(), 0);
    }
    const float scale = float(1 / sum);
    for (const int64_t token : kept_) q[token] *= scale;
    // The likeliest token has weight 1.
    return {drawn(q, vocabulary, uniform, second), proper ? scale : 0.f};
  }

 private:
  static constexpr int64_t kBlock = 256;

  // Weights of the likeliest tokens, which are those kept, in the order of their numbers; 0 for all others.
  double weigh_likeliest(const float* logits, int64_t vocabulary, const Choice& choice, float most, float* q) {
    std::fill(q, q + vocabulary, 0.f);
    maxima_.clear();
    for (int64_t first = 0; first < vocabulary; first += kBlock) {
      maxima_.push_back(largest(logits + first, std::min(kBlock, vocabulary - first)));
    }
    // So many blocks have a token that is at least this large.
    numbers_ = maxima_;
    const float least = kth(choice.most);
    kept_.clear();
    for (size_t block = 0; block < maxima_.size(); ++block) {
      if (maxima_[block] < least) continue;
      const int64_t first = int64_t(block) * kBlock;
      for (int64_t i = first; i < std::min(first + kBlock, vocabulary); ++i) {
        if (logits[i] >= least) kept_.push_back(i);
      }
    }
    numbers_.clear();
    for (const int64_t token : kept_) numbers_.push_back(logits[token]);
    const float smallest = kth(choice.most);
    const auto falls_out = [&](int64_t token) { return logits[token] < smallest; };
    kept_.erase(std::remove_if(kept_.begin(), kept_.end(), falls_out), kept_.end());
    double sum = 0;
    for (const int64_t token : kept_) {
      q[token] = float(std::exp((double(logits[token]) - most) / choice.temperature));
      sum += q[token];
    }
    return choice.mass < 1 ? within_mass(q, sum, choice.mass) : sum;
  }

  // As transformers counts: the least likely go while all that went have at most 1 - mass.
  double within_mass(float* q, double sum, double mass) {
    order_ = kept_;
    std::stable_sort(order_.begin(), order_.end(), [q](int64_t one, int64_t other) { return q[one] < q[other]; });
    double gone = 0, left = sum;
    for (size_t i = 0; i + 1 < order_.size(); ++i) {
      gone += q[order_[i]];
      if (gone > (1 - mass) * sum) break;
      left -= q[order_[i]];
      q[order_[i]] = 0;
    }
    return left;
  }

  // The k-th largest of `numbers_`.
  float kth(int64_t k) {
    if (int64_t(numbers_.size()) < k) return -std::numeric_limits<float>::infinity();
    std::nth_element(numbers_.begin(), numbers_.begin() + (k - 1), numbers_.end(), std::greater<float>());
    return numbers_[k - 1];
  }

  // Of weights in turn, the first whose sum with those before it is above a number, which becomes what is left of it;
  // where rounding leaves none, the last that is not 0.
  template <typename Weight>
  static int64_t found(int64_t count, const Weight& weight, double& left) {
    int64_t last = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (!(weight(i) > 0)) continue;
      last = i;
      if (left < weight(i)) break;
      left -= weight(i);
    }
    return last;
  }

  int64_t drawn(const float* q, int64_t vocabulary, double uniform, const double* second) {
    sums_.assign((vocabulary + kBlock - 1) / kBlock, 0);
    for (const int64_t token : kept_) sums_[token / kBlock] += q[token];
    double left = uniform * std::accumulate(sums_.begin(), sums_.end(), 0.0);
    const int64_t block = found(sums_.size(), [&](int64_t i) { return sums_[i]; }, left);
    if (second) left = *second * sums_[block];
    const int64_t first = kBlock * block, size = std::min(kBlock, vocabulary - first);
    return first + found(size, [&](int64_t i) { return double(q[first + i]); }, left);
  }

  std::vector<float> maxima_, numbers_;
  std::vector<double> sums_;
  std::vector<int64_t> kept_, order_;
};
