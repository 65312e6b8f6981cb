// Stored values to steps: what every instruction set shares, as in tide_product.hpp.
#pragma once

#include <cmath>

#include "rope_turn.hpp"
#include "tide_product.hpp"

namespace kvtide {
namespace {

// Norms below this, in 16ths of a step, keep every sum within 31 bits; louder tokens are halved until they fit.
constexpr float norm_max = 131072.0f;
constexpr float value_max = 32000.0f;
// Coefficients beyond this don't fit 16 bits as 16ths.
constexpr std::int32_t coefficient_max = 2000;
constexpr int halvings_max = 8;
// Values that are looked at side by side, in as many vectors as it takes: compilers take wider ones apart badly.
constexpr std::size_t lanes = 16;
#if defined(__AVX512F__)
constexpr std::size_t vector_lanes = 16;
#elif defined(__AVX2__)
constexpr std::size_t vector_lanes = 8;
#else
constexpr std::size_t vector_lanes = 4;
#endif
using Floats [[gnu::vector_size(vector_lanes * sizeof(float))]] = float;

struct Lanes {
  Floats at[lanes / vector_lanes] = {};
  float operator[](std::size_t lane) const { return at[lane / vector_lanes][lane % vector_lanes]; }
};

// Calls `work(vector number, values, first)` for all values, whole lanes of them, in turn.
template <class Work>
void by_lanes(std::span<const float> values, Work work) {
  for (std::size_t first = 0; first < values.size(); first += lanes) {
    for (std::size_t i = 0; i < lanes / vector_lanes; ++i) {
      Floats each;
      std::memcpy(&each, values.data() + first + i * vector_lanes, sizeof each);
      work(i, each, first + i * vector_lanes);
    }
  }
}

// Rounds to nearest even by an addition, which vectors can do: values are below 2^15.
inline std::int16_t rounded(float value) { return static_cast<std::int16_t>((value + 0x1.8p23f) - 0x1.8p23f); }

// Tells which pairs of a stream's heads turn.
inline RopeShape turned_shape(const TideShape& shape, const TideTurns& turns) {
  return {1, shape.heads, shape.head_dim, turns.dim_start, turns.pairs, turns.neighbours};
}

// The angles of one token in K of a layer: where they begin in cosines and sines.
inline std::size_t angles_of(const TideShape& shape, const TideTurns& turns, std::size_t stream, std::size_t token) {
  return (turns.kinds[stream / 2] * shape.tokens + token) * turns.pairs;
}

// Puts one token's values into its lane of a panel, pair by pair.
inline void put_token(std::span<const std::int16_t> whole, std::int16_t* panel, std::size_t lane) {
  for (std::size_t pair = 0; pair < whole.size() / 2; ++pair) {
    std::memcpy(panel + 2 * (pair * tide_panel_tokens + lane), whole.data() + 2 * pair, 2 * sizeof(std::int16_t));
  }
}

// Reads tokens of a job, one after the other, as whole numbers of 16ths.
template <ElementType type>
class TokenReader {
 public:
  explicit TokenReader(const TideProject& job)
      : job_(job), shape_(turned_shape(job.shape, job.turns)), row_(job.shape.channels()), turned_(job.shape.channels()),
        scaled_(padded(job.shape.values(), lanes)), whole_(padded(job.shape.values(), 2)) {}

  // False if a value is not finite.
  bool read(std::size_t token) {
    std::int32_t largest = 0;
    for (std::size_t stream = 0; stream < job_.shape.streams(); ++stream) {
      largest = std::max(largest, read_stream(stream, token));
    }
    return largest < 0x7f800000;
  }

  // The sum of squares of the token that `halvings` looked at, in steps.
  double square() const { return static_cast<double>(square_) / (1 << 2 * tide_step_bits); }

  // Returns how often the token must be halved to fit 16 bits, or -1 if it is too loud.
  int halvings() {
    // Sixteen sums side by side: the compiler may not reorder one.
    Lanes squares, peaks;
    by_lanes(scaled_, [&](std::size_t i, Floats value, std::size_t) {
      squares.at[i] += value * value;
      const Floats magnitude = value < 0 ? -value : value;
      peaks.at[i] = peaks.at[i] < magnitude ? magnitude : peaks.at[i];
    });
    float loudest = 0, norm = 0;
    for (std::size_t i = 0; i < lanes; ++i) {
      loudest = std::max(loudest, peaks[i]);
      norm += squares[i];
    }
    square_ = norm;
    norm = std::sqrt(norm);
    int halvings = 0;
    for (; norm > norm_max || loudest > value_max; norm *= 0.5f, loudest *= 0.5f) {
      if (++halvings > halvings_max) return -1;
    }
    return halvings;
  }

  // The token's values, halved so often; all zeros for -1. An odd number of values is followed by a zero.
  std::span<const std::int16_t> whole(int halvings) {
    if (halvings < 0) {
      std::ranges::fill(whole_, std::int16_t{0});
    } else {
      const float factor = std::ldexp(1.0f, -halvings);
      for (std::size_t i = 0; i < whole_.size(); ++i) whole_[i] = rounded(scaled_[i] * factor);
    }
    return whole_;
  }

 private:
  // Returns the largest magnitude, as a bit pattern.
  std::int32_t read_stream(std::size_t stream, std::size_t token) {
    const TideShape& shape = job_.shape;
    const std::size_t channels = shape.channels();
    const std::uint8_t* from = job_.bits.data() + (stream * shape.tokens + token) * shape.row_bytes();
    float* row = row_.data();
    for (std::size_t c = 0; c < channels; ++c) row[c] = load<type>(from + c * element_bytes(type));
    if (stream % 2 == 0 && shape_.pairs != 0) {
      const std::size_t angles = angles_of(shape, job_.turns, stream, token);
      for (std::size_t head = 0; head < shape.heads; ++head) {
        turn_head(row + head * shape.head_dim, turned_.data() + head * shape.head_dim, shape_, job_.turns.cos.data() + angles,
                  job_.turns.sin.data() + angles);
      }
      row = turned_.data();
    }
    const float* mean = job_.mean.data() + stream * channels;
    const float* scale = job_.scale.data() + stream * channels;
    float* to = scaled_.data() + stream * channels;
    std::int32_t largest = 0;
    for (std::size_t c = 0; c < channels; ++c) {
      largest = std::max(largest, std::bit_cast<std::int32_t>(row[c]) & 0x7fffffff);
      to[c] = (row[c] - mean[c]) * scale[c];
    }
    return largest;
  }

  const TideProject& job_;
  const RopeShape shape_;
  std::vector<float> row_, turned_, scaled_;  // there is room for whole lanes, with zeros behind the values
  std::vector<std::int16_t> whole_;
  float square_ = 0;
};

// Rounds coefficients in units of 2^-bits to steps; false if one does not fit. Of a token that was not halved no sum reaches 2^31 less
// half a step, and the others are told by their sums before they are doubled.
inline bool round_steps(std::span<const std::int32_t> sums, int bits, std::int16_t* out) {
  const std::int32_t half = std::int32_t{1} << (bits - 1);
  std::int32_t largest = 0;
  for (std::size_t k = 0; k < sums.size(); ++k) {
    // Wraps where a matrix is not what it should be: then a sum means nothing.
    const auto sum = static_cast<std::int32_t>(static_cast<std::uint32_t>(sums[k]) + static_cast<std::uint32_t>(half));
    const std::int32_t steps = sum >> bits;
    largest = std::max(largest, std::max(steps, -steps));
    out[k] = static_cast<std::int16_t>(steps);
  }
  return largest <= coefficient_max;
}

// Adds up, token by token, what the profile is judged by. Sums are of whole numbers, so that every path gives the same.
//
// Rows of the transform are orthonormal: of a token z with coefficients y = U z, coded as v, the error |z - U' v|^2 is
// |z|^2 - |v|^2 - 2 v (y - v).
class Seen {
 public:
  explicit Seen(std::size_t columns) : sums_(columns) {}

  // exact: coefficients in units of 2^-bits; steps: what they were rounded to; square: |z|^2.
  void add(std::span<const std::int32_t> exact, const std::int16_t* steps, int bits, double square) {
    std::int64_t squares = 0, crossed = 0;
    for (std::size_t first = 0; first < exact.size(); first += chunk) {
      std::int32_t squares_here = 0, upper = 0, lower = 0;
      for (std::size_t k = first; k < std::min(exact.size(), first + chunk); ++k) {
        const std::int32_t step = steps[k];
        sums_[k] += step;
        // Wraps where a matrix is not what it should be, as sums do.
        const auto rest = static_cast<std::int32_t>(static_cast<std::uint32_t>(exact[k]) - (static_cast<std::uint32_t>(step) << bits));
        squares_here += step * step;
        upper += (step * rest) >> 16;
        lower += (step * rest) & 0xffff;
      }
      squares += squares_here;
      crossed += std::int64_t{upper} * 65536 + lower;
    }
    const auto coded = static_cast<double>(squares);
    error_ += square - coded - std::ldexp(static_cast<double>(crossed), 1 - bits);
    energy_ += coded;
    tokens_ += 1;
  }

  // values: how many a token has. A token that was halved was rounded to coarser values than sixteenths of a step.
  void add_halved(std::size_t values, int halvings) {
    error_ += std::ldexp(static_cast<double>(values), 2 * (halvings - tide_step_bits)) / 12;
  }

  TideSeen found() const {
    double means = 0;
    for (const std::int32_t sum : sums_) means += static_cast<double>(sum) * static_cast<double>(sum);
    return {error_, tokens_ > 0 ? energy_ - means / tokens_ : 0, tokens_};
  }

 private:
  // Of so many steps, at most coefficient_max each, sums of squares fit 32 bits, and so do those of both halves of steps times rests.
  static constexpr std::size_t chunk = 512;
  static_assert(chunk * coefficient_max * coefficient_max < std::size_t{1} << 31);

  std::vector<std::int32_t> sums_;  // of 65,536 tokens' steps at most
  double error_ = 0, energy_ = 0, tokens_ = 0;
};

// Whole 16ths of a step from the sums of a token that was halved so often, for a second product. False if one does not fit: it is cut.
inline bool to_sixteenths(const std::int32_t* sums, std::size_t count, int halvings, std::int16_t* out) {
  constexpr std::int32_t half = 1 << (tide_one_bits - 1);
  const std::int32_t most = (coefficient_max << tide_step_bits) >> halvings;
  std::int32_t largest = 0;
  for (std::size_t k = 0; k < count; ++k) {
    const auto sum = static_cast<std::int32_t>(static_cast<std::uint32_t>(sums[k]) + static_cast<std::uint32_t>(half)) >> tide_one_bits;
    largest = std::max(largest, std::max(sum, -sum));
    out[k] = static_cast<std::int16_t>(std::clamp(sum, -most, most));
  }
  return largest <= most;
}

// Rounds a token's coefficients, in units of 2^-bits, to steps and adds up what that loses; false if one does not fit. out: in 16ths of a
// step by `fraction_bits`, which fit 16 bits because steps do with as many to spare.
inline bool code_sums(std::span<const std::int32_t> sums, int bits, double square, int fraction_bits, std::int16_t* out, Seen& seen) {
  if (!round_steps(sums, bits, out)) return false;
  seen.add(sums, out, bits, square);
  if (fraction_bits == 0) return true;
  const int finer = bits - fraction_bits;
  const std::int32_t half = finer > 0 ? std::int32_t{1} << (finer - 1) : 0;
  for (std::size_t k = 0; k < sums.size(); ++k) out[k] = static_cast<std::int16_t>((sums[k] + half) >> finer);
  return true;
}

// The bits below one step in the sums of a token that was halved so often.
constexpr int sum_bits(int halvings) { return tide_one_bits + tide_step_bits - halvings; }

// The three transforms take a block of tokens: `put` each one's whole values, `run`, then `code` each: its steps, and what they lose.
// `run` and `code` find tokens that are too loud: those get halvings of -1, and false.

// No transform: values are coded as they are, those that are not coded as zeros.
template <class Isa>
class Values {
 public:
  explicit Values(const TideProject& job)
      : masks_(job.shape.values()), whole_(tokens_at_once<Isa>(job.shape.tokens) * masks_.size()), exact_(masks_.size()),
        fraction_bits_(job.fraction_bits) {
    for (std::size_t v = 0; v < masks_.size(); ++v) masks_[v] = static_cast<std::int16_t>(job.is_coded[v] != 0 ? -1 : 0);
  }

  void put(std::span<const std::int16_t> whole, std::size_t token) {
    std::int16_t* to = whole_.data() + token * masks_.size();
    for (std::size_t v = 0; v < masks_.size(); ++v) to[v] = whole[v] & masks_[v];
  }
  void run(std::size_t, int*) {}

  bool code(std::size_t token, int halvings, double square, std::int16_t* steps, Seen& seen) {
    const std::int16_t* whole = whole_.data() + token * masks_.size();
    for (std::size_t v = 0; v < masks_.size(); ++v) exact_[v] = whole[v] * (1 << halvings);
    return code_sums(exact_, tide_step_bits, square, fraction_bits_, steps, seen);
  }

 private:
  std::vector<std::int16_t> masks_, whole_;
  std::vector<std::int32_t> exact_;  // in sixteenths
  int fraction_bits_;
};

// One matrix.
template <class Isa>
class OneProduct {
 public:
  explicit OneProduct(const TideProject& job)
      : job_(job), columns_(job.matrix.used_columns), stride_(panel_columns(columns_)), product_(job.matrix),
        panels_(tokens_at_once<Isa>(job.shape.tokens) * padded(job.shape.values(), 2)),
        sums_(tokens_at_once<Isa>(job.shape.tokens) * stride_) {}

  void put(std::span<const std::int16_t> whole, std::size_t token) {
    put_token(whole, panels_.data() + token / tide_panel_tokens * tide_panel_tokens * whole.size(), token % tide_panel_tokens);
  }
  void run(std::size_t count, int*) { multiply_all(product_, job_.matrix, panels_.data(), count, sums_.data(), stride_); }

  bool code(std::size_t token, int halvings, double square, std::int16_t* steps, Seen& seen) {
    return code_sums(std::span(sums_).subspan(token * stride_, columns_), sum_bits(halvings), square, job_.fraction_bits, steps, seen);
  }

 private:
  const TideProject& job_;
  std::size_t columns_, stride_;
  Product<Isa> product_;
  std::vector<std::int16_t> panels_;
  std::vector<std::int32_t> sums_;
};

// Two stages: products of each block, the strongest of all blocks mixed, then both in coded order.
template <class Isa>
class BlockProducts {
 public:
  explicit BlockProducts(const TideProject& job)
      : job_(job), block_(job.stage.block), matrix_{{}, block_, block_, block_, block_}, product_(matrix_), mix_(job.matrix),
        width_(job.shape.values() + tide_panel_columns), mixed_width_(panel_columns(job.matrix.used_columns)),
        tokens_(tokens_at_once<Isa>(job.shape.tokens)), panels_(tokens_ * job.shape.values()), of_blocks_(tokens_ * width_),
        of_mix_(tokens_ * mixed_width_), mixed_(tokens_ * mix_.pairs() * 2), strongest_(padded(job.matrix.rows, 2)),
        exact_(job.stage.places.size()) {}

  void put(std::span<const std::int16_t> whole, std::size_t token) {
    for (std::size_t first = 0; first < job_.shape.values(); first += block_) {
      std::int16_t* to = panels_.data() + first * tokens_ + token / tide_panel_tokens * tide_panel_tokens * block_;
      put_token(whole.subspan(first, block_), to, token % tide_panel_tokens);
    }
  }

  void run(std::size_t count, int* halvings) {
    // The last panel of a block may reach beyond it, into the next one's columns, which are written later.
    for (std::size_t first = 0; first < job_.shape.values(); first += block_) {
      matrix_.panels = job_.stage.block_panels.subspan(first / block_ * job_.stage.panel_size(), job_.stage.panel_size());
      multiply_all(product_, matrix_, panels_.data() + first * tokens_, count, of_blocks_.data() + first, width_);
    }
    std::vector<std::int32_t> sums(job_.matrix.rows);
    for (std::size_t t = 0; t < count; ++t) {
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = of_blocks_[t * width_ + job_.stage.mixed[i]];
      if (!to_sixteenths(sums.data(), sums.size(), std::max(halvings[t], 0), strongest_.data())) halvings[t] = -1;
      put_token(strongest_, mixed_.data() + t / tide_panel_tokens * tide_panel_tokens * strongest_.size(), t % tide_panel_tokens);
    }
    multiply_all(mix_, job_.matrix, mixed_.data(), count, of_mix_.data(), mixed_width_);
  }

  bool code(std::size_t token, int halvings, double square, std::int16_t* steps, Seen& seen) {
    const std::size_t values = job_.shape.values();
    for (std::size_t k = 0; k < exact_.size(); ++k) {
      const std::size_t place = job_.stage.places[k];
      exact_[k] = place < values ? of_blocks_[token * width_ + place] : of_mix_[token * mixed_width_ + place - values];
    }
    return code_sums(exact_, sum_bits(halvings), square, job_.fraction_bits, steps, seen);
  }

 private:
  const TideProject& job_;
  const std::size_t block_;
  TideMatrix matrix_;
  Product<Isa> product_, mix_;
  std::size_t width_, mixed_width_, tokens_;
  std::vector<std::int16_t> panels_;
  std::vector<std::int32_t> of_blocks_, of_mix_;
  std::vector<std::int16_t> mixed_, strongest_;
  std::vector<std::int32_t> exact_;  // sums of a token in coded order
};

template <class Isa, class Transform, ElementType type>
bool project_by(const TideProject& job, std::size_t columns) {
  const TideShape& shape = job.shape;
  Transform transform(job);
  TokenReader<type> reader(job);
  Seen seen(columns);
  for (std::size_t start = 0; start < shape.tokens; start += Isa::block_tokens) {
    const std::size_t count = std::min(Isa::block_tokens, shape.tokens - start);
    int halvings[Isa::block_tokens];
    double squares[Isa::block_tokens];
    for (std::size_t t = 0; t < count; ++t) {
      if (!reader.read(start + t)) return false;
      halvings[t] = job.apart[start + t] ? -1 : reader.halvings();
      squares[t] = reader.square();
      transform.put(reader.whole(halvings[t]), t);
    }
    transform.run(count, halvings);
    for (std::size_t t = 0; t < count; ++t) {
      std::int16_t* steps = job.out.data() + (start + t) * columns;
      if (halvings[t] >= 0 && transform.code(t, halvings[t], squares[t], steps, seen)) {
        seen.add_halved(shape.values(), halvings[t]);
        continue;
      }
      job.apart[start + t] = 1;
      std::fill(steps, steps + columns, std::int16_t{0});
    }
  }
  job.seen = seen.found();
  return true;
}

template <class Isa>
bool project_tokens(const TideProject& job) {
  return with_type(job.shape.type, [&]<ElementType type>() {
    if (job.stage.block != 0) return project_by<Isa, BlockProducts<Isa>, type>(job, job.stage.places.size());
    if (job.is_coded.empty()) return project_by<Isa, OneProduct<Isa>, type>(job, job.matrix.used_columns);
    return project_by<Isa, Values<Isa>, type>(job, job.shape.values());
  });
}

}  // namespace
}  // namespace kvtide
