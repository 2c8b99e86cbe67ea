// Runs a recorded pass: a flat list of operations over memory that was planned ahead, by threads that never part.
//
// A program is a row of words of 64 bits: how many constants follow, these, and the operations. An operation is its
// kind and what its `run` below reads. An operand is a place in the table of addresses, those of the call first and the
// constants behind them, and how many bytes behind that address; place -1: there is none.
// selfspec/runtime/native/instructions.py writes what this file reads.

#if defined(__linux__) && defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention.h"
#include "blocks.h"
#include "draws.h"
#include "eight_bits.h"
#include "four_bits.h"
#include "functions.h"
#include "groups.h"
#include "maps.h"
#include "numbers.h"
#include "planes.h"
#include "products.h"
#include "states.h"
#include "team.h"

namespace {

enum class Kind : int64_t {
  kEnd, kWait, kProduct, kNorm, kRotate, kWrite, kAttend, kMap, kEmbed, kAttendAlone, kChoose
};
enum class Dtype : int64_t {
  kFloat, kBFloat16, kInt8, kInt4, kInt64, kFloatColumns, kDouble, kFloat16, kPlanes, kUpper, kGroups
};

// Types of GGUF's blocks are 100 more than its own numbers.
enum class BlockType : int64_t {
  kQ4_0 = 102, kQ4_1 = 103, kQ5_0 = 106, kQ5_1 = 107, kQ8_0 = 108, kQ4_K = 112, kQ5_K = 113, kQ6_K = 114
};

// What the table has before the addresses of the tensors of a call.
enum Given : int64_t { kMemory, kCapacity, kSlots, kStart, kDepths, kSees, kNodes, kPlaces, kFirstTensor };

constexpr int64_t kChunk = 256;
constexpr int kDims = 4;
constexpr int64_t kOutputsJoined = 64;

struct Words {
  const int64_t* at;
  const int64_t* table;

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

// Calls `work` with how numbers of a dtype are stored.
template <typename Work>
void stored_as(Dtype dtype, const Work& work) {
  switch (dtype) {
    case Dtype::kFloat: return work(Plain<float>{});
    case Dtype::kBFloat16: return work(BFloat16{});
    case Dtype::kFloat16: return work(Float16{});
    default: return;
  }
}

// Calls `work` with a type of blocks; false: the number is that of no type.
template <typename Work>
bool in_blocks(Dtype dtype, const Work& work) {
  switch (static_cast<BlockType>(dtype)) {
    case BlockType::kQ4_0: work(blocks::Q4_0{}); break;
    case BlockType::kQ4_1: work(blocks::Q4_1{}); break;
    case BlockType::kQ5_0: work(blocks::Q5_0{}); break;
    case BlockType::kQ5_1: work(blocks::Q5_1{}); break;
    case BlockType::kQ8_0: work(blocks::Q8_0{}); break;
    case BlockType::kQ4_K: work(blocks::Q4_K{}); break;
    case BlockType::kQ5_K: work(blocks::Q5_K{}); break;
    case BlockType::kQ6_K: work(blocks::Q6_K{}); break;
    default: return false;
  }
  return true;
}

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

// The operands of a packed weight: its first part, a number that its format gives a meaning, and further parts or null.
struct PackedOperands {
  static constexpr int kParts = 3;

  int64_t in;
  int64_t out;
  int64_t setting;
  const void* first;
  const void* parts[kParts];

  void take_parts(Words& words) {
    for (auto& each : parts) each = words.operand<const void>();
  }
  template <typename Number>
  const Number* part(int number) const {
    return static_cast<const Number*>(parts[number]);
  }
};

// Planes: the lower one, what the rows have, `[2, out]`, which is their bases and then the ends of their escapes, and the
// escapes. Of the upper one alone: what the rows have.
Planes planes_of(const PackedOperands& of, const uint8_t* lower, const int32_t* rows, const uint32_t* escapes) {
  return {static_cast<const uint8_t*>(of.first), lower, rows, rows + of.out, escapes, of.in};
}

// Groups: scales, zeros or null, and numbers or null: of named codes the table of 16, and behind it what rounded scales are
// read by. The setting is the kind of codes, and 8 bits further that of the scales, then in 24 bits the inputs of a group,
// and its outputs.
enum Codes : int64_t { kIntegersOf4 = 4, kIntegersOf8 = 8, kFirstLower = 16, kFirstUpper = 17, kFloats8 = 18 };

template <typename Work>
bool with_groups(const PackedOperands& of, const Work& work) {
  const float* numbers = of.part<float>(2);
  const auto read_by = [&](auto code) {
    work(groups::Weight<decltype(code)>{code, static_cast<const uint8_t*>(of.first), of.parts[0], of.part<uint32_t>(1),
                                        numbers ? numbers + 16 : nullptr, static_cast<groups::Scale>(of.setting >> 8 & 0xff), of.in,
                                        of.setting >> 16 & 0xffffff, of.setting >> 40});
    return true;
  };
  switch (of.setting & 0xff) {
    case kIntegersOf4: return read_by(groups::Integer<4>{});
    case kIntegersOf8: return read_by(groups::Integer<8>{});
    case kFirstLower: return read_by(groups::Named<0>{numbers});
    case kFirstUpper: return read_by(groups::Named<4>{numbers});
    case kFloats8: return read_by(groups::Float8{});
    default: return false;
  }
}

// Calls `work` with what reads a packed weight, and returns whether there is a format of this number. A format is
// `padded(in)`, the inputs of a row filled up to whole blocks; `product(x, y, bias, residual, out)`, which runs by tiles
// over inputs with zeros behind the last; and, if it is `kJoined`, `take(row, to)`, which writes the weights of a row as
// floats or in bfloat16, as many as it has blocks for.
template <typename Work>
bool with_packed(Dtype dtype, const PackedOperands& of, const Work& work) {
  switch (dtype) {
    case Dtype::kPlanes:
      return work(planes_of(of, of.part<uint8_t>(0), of.part<int32_t>(1), of.part<uint32_t>(2))), true;
    case Dtype::kUpper: return work(UpperPlane{planes_of(of, nullptr, of.part<int32_t>(0), nullptr)}), true;
    case Dtype::kGroups: return with_groups(of, work);
    default:
      return in_blocks(dtype, [&](auto type) {
        work(blocks::Weight<decltype(type)>{static_cast<const uint8_t*>(of.first), of.in});
      });
  }
}

// Outputs of a share, of all rows, with a packed weight.
template <typename Weight>
void run_packed(const Weight& weight, int64_t rows, int64_t in, int64_t out, const float* x, const float* bias,
                const float* residual, float* y, Worker& worker, Range share) {
  const int64_t padded = Weight::padded(in);
  if (padded > in) {
    float* filled = worker.inputs.of<float>(rows * padded);
    for (int64_t row = 0; row < rows; ++row) {
      std::fill(std::copy_n(x + row * in, in, filled + row * padded), filled + (row + 1) * padded, 0.f);
    }
    x = filled;
  }
  if constexpr (Weight::kJoined) {
    if (rows > kRowsOfTile) {
      // Each weight is joined once for all rows: as many outputs as the second cache holds beside their inputs.
      float* joined = worker.room.of<float>(kOutputsJoined * padded);
      for (int64_t first = share.begin; first < share.end; first += kOutputsJoined) {
        const int64_t next = std::min(first + kOutputsJoined, share.end);
        for (int64_t output = first; output < next; ++output) weight.take(output, joined + (output - first) * padded);
        in_tiles(Product<Plain<float>>{x, joined - first * padded, y, nullptr, bias, residual, padded, out}, rows, first,
                 next);
      }
      return;
    }
  }
  in_tiles(weight.product(x, y, bias, residual, out), rows, share.begin, share.end);
}

// kProduct: dtype or format of the weight, rows, in, out, the format's setting; x; the weight, or its first part, and three
// more, of which the first of int8 is its scales; bias, residual, factors of the inputs, y: in float32, or all in float64,
// without factors.
void run_product(Words& words, Worker& worker) {
  const auto dtype = words.kind<Dtype>();
  const auto [rows, in, out, setting] = words.numbers<4>();
  const float* x = words.operand<const float>();
  const void* weight = words.operand<const void>();
  PackedOperands packed = {in, out, setting, weight, {}};
  packed.take_parts(words);
  const float *bias = words.operand<const float>(), *residual = words.operand<const float>();
  const float* factors = words.operand<const float>();
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
  const auto by_format = [&, rows = rows, in = in, out = out](const auto& reader) {
    run_packed(reader, rows, in, out, x, bias, residual, y, worker, share);
  };
  if (with_packed(dtype, packed, by_format)) return;
  const auto run = [&, rows = rows](const auto& work) { in_tiles(work, rows, share.begin, share.end); };
  const auto in_doubles = [](const void* numbers) { return static_cast<const double*>(numbers); };
  if (dtype == Dtype::kDouble) {
    run(Product<Plain<double>>{in_doubles(x), in_doubles(weight), reinterpret_cast<double*>(y), nullptr,
                               in_doubles(bias), in_doubles(residual), in, out});
  } else if (dtype == Dtype::kFloatColumns) {
    ColumnsProduct{x, static_cast<const float*>(weight), y, bias, residual, in, out}.run(rows, share.begin, share.end);
  } else if (dtype == Dtype::kInt8) {
    const auto* scales = packed.part<float>(0);
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
  } else if (dtype == Dtype::kInt4) {
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
  } else {
    stored_as(dtype, [&, in = in, out = out](auto stored) {
      using Weight = decltype(stored);
      const auto* from = static_cast<const typename Weight::Stored*>(weight);
      run(Product<Weight>{x, from, y, nullptr, bias, residual, in, out});
    });
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
  stored_as(words.kind<Dtype>(), [&](auto stored) { write_slots<decltype(stored)>(words, worker); });
}

template <typename Slots>
void attend_slots(Words& words, Worker& worker) {
  const auto [batch, heads, shared, tokens, size, size_of_values] = words.numbers<6>();
  const bool source = words.number(), alike = words.number(), tree = words.number();
  const auto [window, recent, sinks] = words.numbers<3>();
  const float scale = words.real(), cap = words.real();
  const float* queries = words.operand<const float>();
  const auto strides = words.numbers<3>();
  const auto* keys = words.operand<const typename Slots::Stored>();
  const auto* values = words.operand<const typename Slots::Stored>();
  float* y = words.operand<float>();
  const auto* seen = words.operand<const bool>();
  const int64_t* table = words.table;
  const int64_t capacity = table[source ? kPlaces : kCapacity], nodes = table[kNodes];
  const auto* slots = reinterpret_cast<const int64_t*>(table[kSlots]);
  const auto* starts = reinterpret_cast<const int64_t*>(table[kStart]);
  const auto* depths = reinterpret_cast<const int64_t*>(table[kDepths]);
  const auto* sees = reinterpret_cast<const bool*>(table[kSees]);
  const int64_t room = capacity + kLanes<float>;
  float* scores = worker.room.of<float>(kQueriesTogether * room);
  const Range share = worker.share(batch * heads * tokens);
  // Heads that share their keys come after each other.
  std::vector<Query> together;
  const int64_t alike_heads = heads / shared * tokens;
  for (int64_t number = share.begin; number < share.end; ++number) {
    const int64_t token = number % tokens, head = number / tokens % heads, row = number / tokens / heads;
    const int64_t slot = source ? capacity - 1 : slots[(alike ? 0 : row * tokens) + token];
    Sight sight = {0, 0, 0, slot + 1, 0, seen ? seen + row * capacity : nullptr, nullptr, 0};
    int64_t position = slot;
    if (tree) {
      const int64_t start = starts[alike ? 0 : row], node = slot - start;
      position = start + depths[node];
      sight = {0, 0, 0, std::min(start + nodes, capacity), start, sees + node * nodes, depths, 0};
      if (window) sight.reach = depths[node] - window + 1;
    }
    if (window) sight.first = std::max<int64_t>(0, position - window + 1);
    if (recent && sight.first < position - recent + 1) {
      sight.first_sink = sight.first;
      sight.first = position - recent + 1;
      sight.end_of_sinks = std::clamp<int64_t>(sinks, sight.first_sink, sight.first);
    }
    together.push_back({queries + row * strides[0] + head * strides[1] + token * strides[2], sight,
                        scores + together.size() * room, y + ((row * tokens + token) * heads + head) * size_of_values});
    const bool last = number + 1 == share.end || (number + 1) % alike_heads == 0;
    if (!last && together.size() < kQueriesTogether) continue;
    const int64_t head_of_cache = number / alike_heads, first = head_of_cache * capacity;
    attend(together, Head<Slots>{keys + first * size, size},
           Head<Slots>{values + first * size_of_values, size_of_values}, scale, cap);
    together.clear();
  }
}

// kAttend: dtype of the cache, sizes (batch, heads, heads of the cache, tokens, of keys, of values), whether keys and
// values are those of what an encoder has read, all of which is seen but for what a mask hides, whether all rows have
// the same slots, whether the tokens are nodes of a tree, the window of the layer or 0, of a window of the pass the
// latest positions and the sinks, or 0, scale, cap of scores or 0; queries and three
// strides; keys; values; y, `[batch, tokens, heads, size of values]`; the mask, `[batch, places]`.
void run_attend(Words& words, Worker& worker) {
  stored_as(words.kind<Dtype>(), [&](auto stored) { attend_slots<decltype(stored)>(words, worker); });
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
    if (dtype == Dtype::kInt64) return copy([](int64_t a) { return float(a); }, reinterpret_cast<const int64_t*>(at));
    stored_as(dtype, [&](auto stored) {
      using Number = decltype(stored);
      copy(Number::number, reinterpret_cast<const typename Number::Stored*>(at));
    });
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

// kEmbed: dtype or format of the table, rows of the table, size, how many ids, dtype of y, the format's setting; the table,
// or its first part, and three more; ids; y: floats, or where a packed table is read in bfloat16.
void run_embed(Words& words, Worker& worker) {
  const auto dtype = words.kind<Dtype>();
  const auto [known, size, count] = words.numbers<3>();
  const auto made = words.kind<Dtype>();
  const int64_t setting = words.number();
  const char* table = words.operand<const char>();
  PackedOperands packed = {size, known, setting, table, {}};
  packed.take_parts(words);
  const auto* ids = words.operand<const int64_t>();
  float* y = words.operand<float>();
  const Range share = worker.share(count);
  const auto by_format = [&, size = size, known = known](const auto& reader) {
    using Weight = std::decay_t<decltype(reader)>;
    if constexpr (Weight::kJoined) {
      const auto rows = [&](auto* to, auto missing) {
        auto* whole = worker.room.of<std::remove_pointer_t<decltype(to)>>(Weight::padded(size));
        for (int64_t i = share.begin; i < share.end; ++i) {
          if (ids[i] < 0 || known <= ids[i]) {
            std::fill_n(to + i * size, size, missing);
            continue;
          }
          reader.take(ids[i], whole);
          std::copy_n(whole, size, to + i * size);
        }
      };
      constexpr uint16_t kNaN = 0x7fc0;
      made == Dtype::kBFloat16 ? rows(reinterpret_cast<uint16_t*>(y), kNaN) : rows(y, NAN);
    }
  };
  if (with_packed(dtype, packed, by_format)) return;
  for (int64_t i = share.begin; i < share.end; ++i) {
    const bool is_known = 0 <= ids[i] && ids[i] < known;
    const Source row = {dtype, is_known ? table : nullptr, {0, 0, 0, 1}, NAN};
    row.take(is_known ? ids[i] * size : 0, size, y + i * size);
  }
}

template <typename Slots>
void attend_alone(Words& words, Worker& worker) {
  using Stored = typename Slots::Stored;
  const auto [batch, heads, shared, tokens, slots, size, size_of_values] = words.numbers<7>();
  const bool causal = words.number();
  const float scale = words.real();
  const float* queries = words.operand<const float>();
  const Stored* keys = words.operand<const Stored>();
  const auto of_keys = words.numbers<2>();
  const Stored* values = words.operand<const Stored>();
  const auto of_values = words.numbers<2>();
  const bool* mask = words.operand<const bool>();
  float* y = words.operand<float>();
  const int64_t group = heads / shared;
  Alone<Slots> alone(slots, group);
  std::vector<int64_t> seen;
  const Range share = worker.share(batch * shared * tokens);
  for (int64_t place = share.begin; place < share.end; ++place) {
    const int64_t token = place % tokens, head = place / tokens % shared, row = place / tokens / shared;
    const bool* shown = mask ? mask + (row * tokens + token) * slots : nullptr;
    seen.clear();
    for (int64_t slot = 0; slot < (causal ? token + 1 : slots); ++slot) {
      if (!shown || shown[slot]) seen.push_back(slot);
    }
    float* to = y + ((row * tokens + token) * heads + head * group) * size_of_values;
    if (seen.empty()) {
      std::fill_n(to, group * size_of_values, 0.f);
      continue;
    }
    alone.run(queries + ((row * heads + head * group) * tokens + token) * size, tokens,
              {keys + row * of_keys[0] + head * of_keys[1], size},
              {values + row * of_values[0] + head * of_values[1], size_of_values}, seen, scale, to);
  }
}

// kAttendAlone: dtype of keys and values, sizes (batch, heads, heads of keys, tokens, slots, of keys, of values), whether
// a token sees the slots up to its own alone, scale; queries; keys, values, and each's strides of rows and heads; which
// slots a token sees, `[batch, tokens, slots]`; y, `[batch, tokens, heads, size of values]`.
void run_attend_alone(Words& words, Worker& worker) {
  stored_as(words.kind<Dtype>(), [&](auto stored) { attend_alone<decltype(stored)>(words, worker); });
}

// kChoose: rows, tokens that logits are of, vocabulary, temperature, top-k, top-p, logits; the ids of these tokens and
// room for the logits of all, where -inf lies already, or neither; how many tokens are never chosen, and these; numbers
// in [0, 1), second numbers, how far those of the next row are; q and how far its next row is; the chosen token of each
// row, its confidence; and twice how many positions or slots there are, and these, which go one further.
void run_choose(Words& words, Worker& worker) {
  const auto [rows, given, vocabulary] = words.numbers<3>();
  const double temperature = words.real();
  const int64_t top_k = words.number();
  const double top_p = words.real();
  float* logits = words.operand<float>();
  const int64_t* ids = words.operand<const int64_t>();
  float* spread = words.operand<float>();
  const int64_t never = words.number();
  const int64_t* suppressed = words.operand<const int64_t>();
  const auto *uniform = words.operand<const double>(), *second = words.operand<const double>();
  const int64_t next = words.number();
  float* q = words.operand<float>();
  const int64_t next_of_q = words.number();
  int64_t* tokens = words.operand<int64_t>();
  double* confidences = words.operand<double>();
  Drawing drawing;
  const Range share = worker.share(rows);
  for (int64_t row = share.begin; row < share.end; ++row) {
    float* scores = logits + row * given;
    if (spread) {
      for (int64_t i = 0; i < given; ++i) spread[row * vocabulary + ids[i]] = scores[i];
      scores = spread + row * vocabulary;
    }
    for (int64_t i = 0; i < never; ++i) scores[suppressed[i]] = -std::numeric_limits<float>::infinity();
    const Chosen chosen = drawing.run(scores, vocabulary, {temperature, top_k, top_p}, uniform[row * next],
                                      second ? second + row * next : nullptr, q ? q + row * next_of_q : nullptr);
    tokens[row] = chosen.token;
    confidences[row] = chosen.confidence;
  }
  for (int list = 0; list < 2; ++list) {
    const int64_t count = words.number();
    int64_t* places = words.operand<int64_t>();
    const Range some = worker.share(count);
    for (int64_t i = some.begin; i < some.end; ++i) ++places[i];
  }
}

void run(const int64_t* first, const int64_t* table, Barrier& barrier, Worker& worker) {
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
      case Kind::kAttendAlone: run_attend_alone(words, worker); break;
      case Kind::kChoose: run_choose(words, worker); break;
    }
  }
}

}  // namespace

#if defined(_WIN32)
#define INTERFACE extern "C" __declspec(dllexport)
#else
#define INTERFACE extern "C" __attribute__((visibility("default")))
#endif

// Runs a program over `count` addresses of a call, by at most so many threads.
INTERFACE void selfspec_run(const int64_t* program, const int64_t* addresses, int64_t count, int64_t threads) {
  std::vector<int64_t> table(addresses, addresses + count);
  table.insert(table.end(), program + 1, program + 1 + program[0]);
  const int64_t* first = program + 1 + program[0];
  run_together(static_cast<int>(threads), [&](Member member, Barrier& barrier) {
    Worker worker{member, {}, {}};
    run(first, table.data(), barrier, worker);
  });
}

// Names the sources that this was built from.
INTERFACE const char* selfspec_sources() { return SELFSPEC_SOURCES; }

// Whether this processor knows all instructions that this was built of.
INTERFACE int selfspec_runs_here() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool runs = true;
#if defined(__AVX2__)
  runs = runs && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
#endif
#if defined(__AVX512F__)
  runs = runs && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
#endif
#if defined(__AVX512VNNI__)
  runs = runs && __builtin_cpu_supports("avx512vnni");
#endif
#if defined(__AVX512BF16__)
  runs = runs && __builtin_cpu_supports("avx512bf16");
#endif
  return runs;
#elif defined(__linux__) && defined(__ARM_FEATURE_DOTPROD)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return 1;
#endif
}
