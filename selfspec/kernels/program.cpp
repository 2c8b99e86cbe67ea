// Runs a recorded pass: a flat list of operations over memory that was planned ahead, by threads that never part.
//
// A program is a row of words of 64 bits: how many constants follow, these, and the operations. An operation is its
// kind and what its `run` below reads. An operand is a place in the table of addresses, those of the call first and the
// constants behind them, and how many bytes behind that address; place -1: there is none.
// selfspec/runtime/native/instructions.py writes what this file reads.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <omp.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "attention.h"
#include "draws.h"
#include "eight_bits.h"
#include "four_bits.h"
#include "functions.h"
#include "products.h"
#include "states.h"
#include "team.h"

namespace {

enum class Kind : int64_t { kEnd, kWait, kProduct, kNorm, kRotate, kWrite, kAttend, kMap, kEmbed };
enum class Dtype : int64_t { kFloat, kBFloat16, kInt8, kInt4, kInt64, kFloatColumns };

// What the table has before the addresses of the tensors of a call.
enum Given : int64_t { kMemory, kCapacity, kSlots, kStart, kDepths, kSees, kNodes, kPlaces, kTop, kTopWords, kFirstTensor };

constexpr int64_t kChunk = 256;
constexpr int kDims = 4;

struct Words {
  const int64_t* at;
  const std::vector<int64_t>& table;

  int64_t number() { return *at++; }
  double real() {
    double value;
    std::memcpy(&value, at++, sizeof value);
    return value;
  }
  template <typename Number>
  Number* operand() {
    const int64_t place = number(), offset = number();
    return place < 0 ? nullptr : reinterpret_cast<Number*>(table[place] + offset);
  }
  template <typename Number = int64_t>
  Number kind() {
    return static_cast<Number>(number());
  }
  template <int Size>
  std::array<int64_t, Size> numbers() {
    std::array<int64_t, Size> found;
    for (auto& each : found) each = number();
    return found;
  }
};

// Room that grows as needed.
struct Room {
  std::vector<char> bytes;

  template <typename Number>
  Number* of(int64_t count) {
    if (bytes.size() < count * sizeof(Number) + 64) bytes.resize(count * sizeof(Number) + 64);
    return reinterpret_cast<Number*>((reinterpret_cast<uintptr_t>(bytes.data()) + 63) & ~uintptr_t(63));
  }
};

// A thread of a call.
struct Worker : Member {
  Room inputs, room;
};

// kProduct: dtype of the weight, rows, in, out, x, weight, scales, bias, residual, factors of the inputs, y.
void run_product(Words& words, Worker& worker) {
  const auto dtype = words.kind<Dtype>();
  const auto [rows, in, out] = words.numbers<3>();
  const float* x = words.operand<const float>();
  const void* weight = words.operand<const void>();
  const float *scales = words.operand<const float>(), *bias = words.operand<const float>();
  const float *residual = words.operand<const float>(), *factors = words.operand<const float>();
  float* y = words.operand<float>();
  const Range share = worker.share(out, dtype == Dtype::kFloatColumns ? 2 * kLanes<float> : 8);
  if (share.begin == share.end) return;
  if (factors) {
    float* scaled = worker.inputs.of<float>(rows * in);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < in; ++i) scaled[row * in + i] = x[row * in + i] * factors[i];
    }
    x = scaled;
  }
  const auto run = [&](const auto& work) { in_tiles(work, rows, share.begin, share.end); };
  if (dtype == Dtype::kFloat) {
    run(Product<Plain<float>>{x, static_cast<const float*>(weight), y, nullptr, bias, residual, in, out});
  } else if (dtype == Dtype::kFloatColumns) {
    ColumnsProduct{x, static_cast<const float*>(weight), y, bias, residual, in, out}.run(rows, share.begin, share.end);
  } else if (dtype == Dtype::kBFloat16) {
    run(Product<BFloat16>{x, static_cast<const uint16_t*>(weight), y, nullptr, bias, residual, in, out});
  } else if (dtype == Dtype::kInt8) {
#if defined(__AVX512VNNI__)
    const int64_t groups = IntegerProduct::groups_of(in);
    auto* rounded = worker.room.of<RoundedGroup>(rows * groups);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t first = group * kInputsOfGroup;
        rounded[row * groups + group] =
            IntegerProduct::rounded(x + row * in + first, std::min<int64_t>(kInputsOfGroup, in - first));
      }
    }
    run(IntegerProduct{rounded, static_cast<const int8_t*>(weight), y, scales, bias, residual, in, out});
#else
    run(Product<Int8>{x, static_cast<const int8_t*>(weight), y, scales, bias, residual, in, out});
#endif
  } else {
    using namespace four_bits;
    const int64_t groups = in / kGroup, blocks = (groups + kGroups - 1) / kGroups;
    auto* rounded = worker.room.of<RoundedBlock>(rows * blocks);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t block = 0; block < blocks; ++block) {
        rounded[row * blocks + block] = rounded_block(
            x + row * in + block * kGroups * kGroup, std::min<int64_t>(kGroups, groups - block * kGroups));
      }
    }
    run(FourBitsProduct{rounded, static_cast<const uint8_t*>(weight), y, bias, residual, groups, out});
  }
}

// kNorm: rows, size, epsilon, what is added to the weight, x, weight, bias, y. With a bias, a layer norm.
void run_norm(Words& words, Worker& worker) {
  const auto [rows, size] = words.numbers<2>();
  const float epsilon = words.real(), shift = words.real();
  const float *x = words.operand<const float>(), *weight = words.operand<const float>();
  const float* bias = words.operand<const float>();
  float* y = words.operand<float>();
  const Range share = worker.share(rows);
  for (int64_t row = share.begin; row < share.end; ++row) {
    if (bias) {
      normalize_around_mean(x + row * size, weight, bias, y + row * size, size, epsilon);
    } else {
      normalize(x + row * size, weight, shift, y + row * size, size, epsilon);
    }
  }
}

// kRotate: sizes of x (batch, heads, tokens), half a head; of x, cosines and sines an operand and three strides; y.
void run_rotate(Words& words, Worker& worker) {
  const auto [batch, heads, tokens, half] = words.numbers<4>();
  const float* x = words.operand<const float>();
  const auto of_x = words.numbers<3>();
  const float* cos = words.operand<const float>();
  const auto of_cos = words.numbers<3>();
  const float* sin = words.operand<const float>();
  const auto of_sin = words.numbers<3>();
  float* y = words.operand<float>();
  const Range share = worker.share(batch * heads * tokens);
  for (int64_t number = share.begin; number < share.end; ++number) {
    const int64_t token = number % tokens, head = number / tokens % heads, row = number / tokens / heads;
    const auto offset = [&](const auto& strides) { return row * strides[0] + head * strides[1] + token * strides[2]; };
    rotate_head(x + offset(of_x), cos + offset(of_cos), sin + offset(of_sin), y + number * 2 * half, half);
  }
}

template <typename Slots>
void write_slots(Words& words, Worker& worker) {
  const auto [batch, heads, tokens, size] = words.numbers<4>();
  const bool alike = words.number();
  auto* cache = words.operand<typename Slots::Stored>();
  const float* states = words.operand<const float>();
  const auto strides = words.numbers<4>();
  const int64_t capacity = words.table[kCapacity];
  const auto* slots = reinterpret_cast<const int64_t*>(words.table[kSlots]);
  const Range share = worker.share(batch * heads * tokens);
  for (int64_t number = share.begin; number < share.end; ++number) {
    const int64_t token = number % tokens, head = number / tokens % heads, row = number / tokens / heads;
    const int64_t slot = slots[(alike ? 0 : row * tokens) + token];
    auto* to = cache + ((row * heads + head) * capacity + slot) * size;
    const float* from = states + row * strides[0] + head * strides[1] + token * strides[2];
    for (int64_t i = 0; i < size; ++i) to[i] = Slots::stored(from[i * strides[3]]);
  }
}

// kWrite: dtype, sizes (batch, heads, tokens, size), whether all rows have the same slots; buffer; states, their
// strides.
void run_write(Words& words, Worker& worker) {
  if (words.kind<Dtype>() == Dtype::kFloat) return write_slots<FloatSlots>(words, worker);
  write_slots<BFloat16Slots>(words, worker);
}

template <typename Slots>
void attend_slots(Words& words, Worker& worker) {
  const auto [batch, heads, shared, tokens, size, size_of_values] = words.numbers<6>();
  const bool source = words.number(), alike = words.number(), tree = words.number();
  const auto [window, recent, sinks, top] = words.numbers<4>();
  const float scale = words.real(), cap = words.real();
  const float* queries = words.operand<const float>();
  const auto strides = words.numbers<3>();
  const auto* keys = words.operand<const typename Slots::Stored>();
  const auto* values = words.operand<const typename Slots::Stored>();
  float* y = words.operand<float>();
  const int64_t bits = words.number();
  const auto* copied = words.operand<const int64_t>();
  const auto *levels = words.operand<const uint8_t>();
  const auto *factors = words.operand<const float>();
  const auto *levels_of_values = words.operand<const uint8_t>();
  const auto *factors_of_values = words.operand<const float>();
  const auto* seen = words.operand<const bool>();
  const auto& table = words.table;
  const int64_t capacity = table[source ? kPlaces : kCapacity], nodes = table[kNodes];
  const auto* slots = reinterpret_cast<const int64_t*>(table[kSlots]);
  const auto* starts = reinterpret_cast<const int64_t*>(table[kStart]);
  const auto* depths = reinterpret_cast<const int64_t*>(table[kDepths]);
  const auto* sees = reinterpret_cast<const bool*>(table[kSees]);
  const int64_t room = capacity + kLanes<float>;
  const int64_t of_block = bits ? kSlotsTogether * std::max(size, size_of_values) : 0;
  float* block = worker.room.of<float>(of_block + kQueriesTogether * room);
  float* scores = block + of_block;
  const Range share = worker.share(batch * heads * tokens);
  // Heads that share their keys come after each other.
  std::vector<Query> together;
  const int64_t alike_heads = heads / shared * tokens;
  for (int64_t number = share.begin; number < share.end; ++number) {
    const int64_t token = number % tokens, head = number / tokens % heads, row = number / tokens / heads;
    const int64_t slot = source ? capacity - 1 : slots[(alike ? 0 : row * tokens) + token];
    Sight sight = {0, 0, 0, slot + 1, 0, seen ? seen + row * capacity : nullptr, nullptr, 0, nullptr};
    int64_t position = slot;
    if (tree) {
      const int64_t start = starts[alike ? 0 : row], node = slot - start;
      position = start + depths[node];
      sight = {0, 0, 0, std::min(start + nodes, capacity), start, sees + node * nodes, depths, 0, nullptr};
      if (window) sight.reach = depths[node] - window + 1;
    }
    if (window) sight.first = std::max<int64_t>(0, position - window + 1);
    if (recent && sight.first < position - recent + 1) {
      sight.first_sink = sight.first;
      sight.first = position - recent + 1;
      sight.end_of_sinks = std::clamp<int64_t>(sinks, sight.first_sink, sight.first);
    }
    if (top) {
      const auto* of_row = reinterpret_cast<const int64_t*>(table[kTop]) + row * table[kTopWords];
      sight.first = of_row[0];
      sight.end_of_sinks = of_row[1] * kSlotsChosen;
      sight.ranks = of_row + 2;
    }
    together.push_back({queries + row * strides[0] + head * strides[1] + token * strides[2], sight,
                        scores + together.size() * room, y + ((row * tokens + token) * heads + head) * size_of_values});
    const bool last = number + 1 == share.end || (number + 1) % alike_heads == 0;
    if (!last && together.size() < kQueriesTogether) continue;
    const int64_t head_of_cache = number / alike_heads, first = head_of_cache * capacity;
    const Head<Slots> exact_keys = {keys + first * size, size};
    const Head<Slots> exact_values = {values + first * size_of_values, size_of_values};
    const auto by_copies = [&](auto of_bits) {
      constexpr int64_t each = decltype(of_bits)::value;
      const auto part = [&](const Head<Slots>& exact, const uint8_t* of_levels, const float* of_factors) {
        const int64_t held = exact.size, groups = held / slot_group(held);
        const RoundedHead<each> copy = {of_levels + first * held * each / 8, of_factors + 2 * groups * first, held,
                                        capacity};
        return WithCopy<Slots, each>{exact, copy, copied[row], held};
      };
      attend(together, part(exact_keys, levels, factors), part(exact_values, levels_of_values, factors_of_values),
             scale, cap, block);
    };
    if (bits == 8) {
      by_copies(std::integral_constant<int, 8>{});
    } else if (bits == 4) {
      by_copies(std::integral_constant<int, 4>{});
    } else {
      attend(together, exact_keys, exact_values, scale, cap, block);
    }
    together.clear();
  }
}

// kAttend: dtype of the cache, sizes (batch, heads, heads of the cache, tokens, of keys, of values), whether keys and
// values are those of what an encoder has read, all of which is seen but for what a mask hides, whether all rows have
// the same slots, whether the tokens are nodes of a tree, the window of the layer or 0, of a window of the pass the
// latest positions and the sinks, or 0, whether chosen slots alone are seen, scale, cap of scores or 0; queries and three
// strides; keys; values; y, `[batch, tokens, heads, size of values]`; bits of copies or 0, how many slots of each row they
// hold, levels and factors of keys and of values; the mask, `[batch, places]`.
void run_attend(Words& words, Worker& worker) {
  if (words.kind<Dtype>() == Dtype::kFloat) return attend_slots<FloatSlots>(words, worker);
  attend_slots<BFloat16Slots>(words, worker);
}

enum class Function : int64_t {
  kCopy, kNegative, kCosine, kSine, kTanh, kSigmoid, kSilu, kGelu, kGeluByTanh, kRelu, kExponential, kRootOfInverse,
  kPower, kSum, kDifference, kMultiply, kQuotient, kSiluTimes, kGeluTimes, kGeluByTanhTimes
};

template <typename Of>
inline void each(const float* x, const float* z, float* y, int64_t count, const Of& function) {
  for (int64_t i = 0; i < count; ++i) y[i] = function(x[i], z ? z[i] : 0.f);
}

template <typename Of>
inline void lanes_of(const float* x, float* y, int64_t count, const Of& function) {
  constexpr int lanes = kLanes<float>;
  // There is room behind the last.
  for (int64_t i = 0; i < count; i += lanes) {
    const FloatLanes found = function(read<float, lanes>(x + i));
    std::memcpy(y + i, &found, sizeof found);
  }
}

inline FloatLanes gelu_by_tanh(FloatLanes x) {
  return 0.5f * x * (1.f + tanh_of(0.7978845608f * (x + 0.044715f * x * x * x)));
}

inline float gelu(float x) { return 0.5f * x * (1.f + std::erf(x * 0.70710678f)); }

// `count` numbers, at most a chunk, of chunks that hold as many; y may be one of the others.
void apply(Function function, const float* x, const float* z, float* y, int64_t count) {
  const auto times = [&] { each(y, z, y, count, [](float a, float b) { return a * b; }); };
  switch (function) {
    case Function::kCopy: return each(x, z, y, count, [](float a, float) { return a; });
    case Function::kNegative: return each(x, z, y, count, [](float a, float) { return -a; });
    case Function::kCosine: return each(x, z, y, count, [](float a, float) { return std::cos(a); });
    case Function::kSine: return each(x, z, y, count, [](float a, float) { return std::sin(a); });
    case Function::kTanh: return lanes_of(x, y, count, tanh_of);
    case Function::kSigmoid: return lanes_of(x, y, count, sigmoid_of);
    case Function::kSilu: return lanes_of(x, y, count, [](FloatLanes a) { return a * sigmoid_of(a); });
    case Function::kGelu: return each(x, z, y, count, [](float a, float) { return gelu(a); });
    case Function::kGeluByTanh: return lanes_of(x, y, count, gelu_by_tanh);
    case Function::kRelu: return each(x, z, y, count, [](float a, float) { return a < 0 ? 0 : a; });
    case Function::kExponential: return lanes_of(x, y, count, exp_of);
    case Function::kRootOfInverse: return each(x, z, y, count, [](float a, float) { return 1 / std::sqrt(a); });
    case Function::kPower:
      return each(x, z, y, count, [](float a, float b) { return b == 2 ? a * a : b == 3 ? a * a * a : std::pow(a, b); });
    case Function::kSum: return each(x, z, y, count, [](float a, float b) { return a + b; });
    case Function::kDifference: return each(x, z, y, count, [](float a, float b) { return a - b; });
    case Function::kMultiply: return each(x, z, y, count, [](float a, float b) { return a * b; });
    case Function::kQuotient: return each(x, z, y, count, [](float a, float b) { return a / b; });
    case Function::kSiluTimes:
      return lanes_of(x, y, count, [](FloatLanes a) { return a * sigmoid_of(a); }), times();
    case Function::kGeluTimes: return each(x, z, y, count, [](float a, float b) { return gelu(a) * b; });
    case Function::kGeluByTanhTimes: return lanes_of(x, y, count, gelu_by_tanh), times();
  }
}

struct Source {
  Dtype dtype;
  const char* at;
  std::array<int64_t, kDims> strides;
  float fixed;

  void take(int64_t offset, int64_t count, float* to) const {
    const int64_t step = strides[kDims - 1];
    const auto copy = [&](auto convert, const auto* from) {
      for (int64_t i = 0; i < count; ++i) to[i] = convert(from[offset + i * step]);
    };
    if (!at) return static_cast<void>(std::fill_n(to, count, fixed));
    switch (dtype) {
      case Dtype::kFloat: return copy([](float a) { return a; }, reinterpret_cast<const float*>(at));
      case Dtype::kBFloat16: return copy(BFloat16Slots::number, reinterpret_cast<const uint16_t*>(at));
      case Dtype::kInt64: return copy([](int64_t a) { return float(a); }, reinterpret_cast<const int64_t*>(at));
      default: return;
    }
  }
};

// kMap: function, four sizes, how many sources; of each a dtype, an operand, four strides and a number, which all are
// where there is no operand; y and its four strides, the last of which is 1.
void run_map(Words& words, Worker& worker) {
  const auto function = words.kind<Function>();
  const auto sizes = words.numbers<kDims>();
  const int64_t count = words.number();
  std::array<Source, 2> sources;
  for (int64_t i = 0; i < count; ++i) {
    sources[i].dtype = words.kind<Dtype>();
    sources[i].at = words.operand<const char>();
    sources[i].strides = words.numbers<kDims>();
    sources[i].fixed = words.real();
  }
  float* y = words.operand<float>();
  const auto of_y = words.numbers<kDims>();
  const int64_t row = sizes[3], rows = sizes[0] * sizes[1] * sizes[2];
  // Rows are cut where there are few of them.
  const int64_t chunks = (row + kChunk - 1) / kChunk;
  const Range share = worker.share(rows * chunks);
  alignas(64) float taken[2][kChunk + 16], found[kChunk + 16];
  for (int64_t number = share.begin; number < share.end; ++number) {
    const int64_t first = number % chunks * kChunk, index = number / chunks, size = std::min(kChunk, row - first);
    const std::array<int64_t, kDims> at = {index / sizes[2] / sizes[1], index / sizes[2] % sizes[1], index % sizes[2],
                                           first};
    const auto offset = [&](const auto& strides) {
      int64_t sum = 0;
      for (int i = 0; i < kDims; ++i) sum += at[i] * strides[i];
      return sum;
    };
    for (int64_t i = 0; i < count; ++i) sources[i].take(offset(sources[i].strides), size, taken[i]);
    apply(function, taken[0], count > 1 ? taken[1] : nullptr, found, size);
    std::memcpy(y + offset(of_y), found, size * sizeof(float));
  }
}

// kEmbed: dtype of the table, rows of the table, size, how many ids; table; ids; y.
void run_embed(Words& words, Worker& worker) {
  const auto dtype = words.kind<Dtype>();
  const auto [known, size, count] = words.numbers<3>();
  const char* table = words.operand<const char>();
  const auto* ids = words.operand<const int64_t>();
  float* y = words.operand<float>();
  const Range share = worker.share(count);
  for (int64_t i = share.begin; i < share.end; ++i) {
    const bool is_known = 0 <= ids[i] && ids[i] < known;
    const Source row = {dtype, is_known ? table : nullptr, {0, 0, 0, 1}, NAN};
    row.take(is_known ? ids[i] * size : 0, size, y + i * size);
  }
}

void run(const int64_t* first, const std::vector<int64_t>& table, Barrier& barrier, Worker& worker) {
  Words words = {first, table};
  while (true) {
    switch (words.kind<Kind>()) {
      case Kind::kEnd: return;
      case Kind::kWait: barrier.wait(); break;
      case Kind::kProduct: run_product(words, worker); break;
      case Kind::kNorm: run_norm(words, worker); break;
      case Kind::kRotate: run_rotate(words, worker); break;
      case Kind::kWrite: run_write(words, worker); break;
      case Kind::kAttend: run_attend(words, worker); break;
      case Kind::kMap: run_map(words, worker); break;
      case Kind::kEmbed: run_embed(words, worker); break;
    }
  }
}

// What a call gives, as addresses; it keeps copies of tensors that do not lie in a row.
struct Call {
  std::vector<int64_t> table;
  std::vector<at::Tensor> copies;

  // `places` of tensors, or -1: the first and the last buffer, slots, start, depths, sees, keys of an encoder's places,
  // which slots are seen.
  Call(const at::Tensor& memory, at::TensorList tensors, at::IntArrayRef places) : table(kFirstTensor) {
    for (const auto& each : tensors) {
      const auto& held = each.is_contiguous() ? each : copies.emplace_back(each.contiguous());
      table.push_back(reinterpret_cast<int64_t>(held.const_data_ptr()));
    }
    const auto address = [&](int64_t place) { return place < 0 ? 0 : table[kFirstTensor + place]; };
    table[kMemory] = (reinterpret_cast<int64_t>(memory.const_data_ptr()) + 63) & ~int64_t(63);
    table[kCapacity] = tensors[places[0]].size(2);
    table[kSlots] = address(places[2]);
    table[kStart] = address(places[3]);
    table[kDepths] = address(places[4]);
    table[kSees] = address(places[5]);
    table[kNodes] = places[4] < 0 ? 0 : tensors[places[4]].size(0);
    table[kPlaces] = places[6] < 0 ? 0 : tensors[places[6]].size(2);
    table[kTop] = address(places[7]);
    table[kTopWords] = places[7] < 0 ? 0 : tensors[places[7]].size(1);
  }
};

// Whether all buffers can be written where they are, and have as many slots.
bool fits(at::TensorList tensors, at::IntArrayRef places) {
  const int64_t capacity = tensors[places[0]].size(2);
  for (int64_t place = places[0]; place <= places[1]; ++place) {
    if (!tensors[place].is_contiguous() || tensors[place].size(2) != capacity) return false;
  }
  return true;
}

// `program` as above, over the tensors of this call; by at most so many threads. Returns whether it ran: see `fits`.
bool run_program(const at::Tensor& program, const at::Tensor& memory, at::TensorList tensors, at::IntArrayRef places,
                 int64_t threads) {
  if (!fits(tensors, places)) return false;
  Call call(memory, tensors, places);
  const auto* words = program.const_data_ptr<int64_t>();
  call.table.insert(call.table.end(), words + 1, words + 1 + words[0]);
  const int64_t* first = words + 1 + words[0];
  const int wanted = at::in_parallel_region() ? 1 : static_cast<int>(threads);
  std::optional<Barrier> barrier;
#pragma omp parallel num_threads(wanted) if (wanted > 1)
  {
    // There may be fewer threads than asked for. Nobody goes on before they are counted.
#pragma omp single
    barrier.emplace(omp_get_num_threads());
    Worker worker{{omp_get_thread_num(), omp_get_num_threads()}, {}, {}};
    run(first, call.table, *barrier, worker);
  }
  return true;
}

// A pass over the last token of each row, and the choice of the next one, which takes its place: tokens, slots and
// positions are the first tensors, logits the last. `q`, `[rows, steps, vocab]`, keeps what this step drew from. Returns
// each row's confidence in its token. `uniform` is `[1 or 2, rows, steps]`; tokens that are suppressed are never chosen.
std::vector<double> draft_step(const at::Tensor& program, const at::Tensor& memory, at::TensorList tensors,
                               at::IntArrayRef places, int64_t threads, double temperature, int64_t top_k,
                               double top_p, const at::Tensor& suppressed, const at::Tensor& uniform,
                               const std::optional<at::Tensor>& q, int64_t step, const std::optional<at::Tensor>& kept,
                               const std::optional<at::Tensor>& spread) {
  TORCH_CHECK(run_program(program, memory, tensors, places, threads), "the buffers of a chain do not fit its program");
  const at::Tensor& given = tensors[tensors.size() - 1];
  // Of tokens that a reduced vocabulary leaves out, -inf lies there already.
  const at::Tensor logits = spread ? *spread : given;
  const int64_t rows = logits.size(0), vocabulary = logits.size(-1);
  auto* tokens = tensors[0].mutable_data_ptr<int64_t>();
  const auto* numbers = uniform.const_data_ptr<double>();
  const int64_t steps = uniform.size(2);
  std::vector<double> confidences(rows);
  Drawing drawing;
  for (int64_t row = 0; row < rows; ++row) {
    if (spread) {
      const auto* ids = kept->const_data_ptr<int64_t>();
      const auto* from = given.const_data_ptr<float>() + row * kept->numel();
      auto* to = spread->mutable_data_ptr<float>() + row * vocabulary;
      for (int64_t i = 0; i < kept->numel(); ++i) to[ids[i]] = from[i];
    }
    float* scores = logits.mutable_data_ptr<float>() + row * vocabulary;
    const auto* never = suppressed.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < suppressed.numel(); ++i) scores[never[i]] = -std::numeric_limits<float>::infinity();
    float* of_row = q ? q->mutable_data_ptr<float>() + (row * q->size(1) + step) * vocabulary : nullptr;
    const double* number = numbers + row * steps + step;
    const Chosen chosen =
        drawing.run(scores, vocabulary, {temperature, top_k, top_p}, *number,
                    uniform.size(0) > 1 ? number + rows * steps : nullptr, of_row);
    tokens[row] = chosen.token;
    confidences[row] = chosen.confidence;
  }
  for (int place = 1; place <= 2; ++place) {
    auto* next = tensors[place].mutable_data_ptr<int64_t>();
    for (int64_t i = 0; i < tensors[place].numel(); ++i) ++next[i];
  }
  return confidences;
}

// Rounds slots of all layers, those of each row from `begins` on and before `ends`. `exact` are keys and values, and
// `copies` levels and factors of each.
void round_slots(at::TensorList exact, at::TensorList copies, at::IntArrayRef begins, at::IntArrayRef ends,
                 int64_t bits) {
  const auto work = [&](auto of_bits, auto slots, int64_t number, int64_t head) {
    constexpr int each = decltype(of_bits)::value;
    using Slots = decltype(slots);
    const at::Tensor& from = exact[number];
    const int64_t heads = from.size(1), capacity = copies[2 * number].size(2), size = from.size(3);
    const int64_t row = head / heads, bytes = size * each / 8;
    const auto* states = static_cast<const typename Slots::Stored*>(from.const_data_ptr()) + row * from.stride(0) +
                         head % heads * from.stride(1);
    auto* levels = copies[2 * number].mutable_data_ptr<uint8_t>() + head * capacity * bytes;
    auto* factors = copies[2 * number + 1].mutable_data_ptr<float>() + head * copies[2 * number + 1].size(2) * capacity;
    for (int64_t slot = begins[row]; slot < ends[row]; ++slot) {
      round_slot<each, Slots>(states + slot * from.stride(2), size, levels + slot * bytes, factors + slot, capacity);
    }
  };
  int64_t most = 0;
  for (size_t row = 0; row < ends.size(); ++row) most = std::max(most, ends[row] - begins[row]);
  for (size_t number = 0; number < exact.size(); ++number) {
    const at::Tensor& from = exact[number];
    TORCH_CHECK(from.stride(3) == 1 && copies[2 * number].is_contiguous() && copies[2 * number + 1].is_contiguous(),
                "round_slots: numbers of a slot lie side by side");
    const bool wide = from.scalar_type() == at::kFloat;
    const auto heads = [&](auto of_bits, auto slots) {
      at::parallel_for(0, from.size(0) * from.size(1), std::max<int64_t>(1, 1024 / std::max<int64_t>(1, most)),
                       [&](int64_t begin, int64_t end) {
                         for (int64_t head = begin; head < end; ++head) work(of_bits, slots, number, head);
                       });
    };
    const auto of = [&](auto of_bits) { wide ? heads(of_bits, FloatSlots{}) : heads(of_bits, BFloat16Slots{}); };
    bits == 8 ? of(std::integral_constant<int, 8>{}) : of(std::integral_constant<int, 4>{});
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(selfspec, m) {
  m.def(
      "draft_step(Tensor program, Tensor memory, Tensor[] tensors, int[] places, int threads, float temperature, "
      "int top_k, float top_p, Tensor suppressed, Tensor uniform, Tensor? q, int step, Tensor? kept, Tensor? spread) -> float[]");
  m.def("run_program(Tensor program, Tensor memory, Tensor[] tensors, int[] places, int threads) -> bool");
  m.def("round_slots(Tensor[] exact, Tensor(a!)[] copies, int[] begins, int[] ends, int bits) -> ()");
  m.def("attend(Tensor queries, Tensor keys, Tensor values, Tensor? mask, float scale, float cap) -> Tensor");
}

TORCH_LIBRARY_IMPL(selfspec, CPU, m) {
  m.impl("run_program", run_program);
  m.impl("round_slots", round_slots);
  m.impl("draft_step", draft_step);
}
