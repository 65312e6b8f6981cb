// The transforms' loops around one kernel, which every instruction set compiles for itself.
//
// Everything is in an unnamed namespace on purpose, as in rans_driver.hpp: each instruction set compiles its own copy.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "tide_paths.hpp"

namespace kvtide {
namespace {

// Tokens whose sums are kept while the panels of a matrix pass by: a panel then stays in the nearest cache.
constexpr std::size_t block_tokens = 64;
// Norms below this, in 16ths of a step, keep every sum within 31 bits; louder tokens are halved until they fit.
constexpr float norm_max = 131072.0f;
constexpr float value_max = 32000.0f;
// Coefficients beyond this don't fit 16 bits as 16ths.
constexpr std::int64_t coefficient_max = 2000;
constexpr int halvings_max = 8;
// Values that are looked at side by side.
constexpr std::size_t lanes = 16;

std::size_t padded(std::size_t count, std::size_t unit) { return (count + unit - 1) / unit * unit; }

// Sums of a block of tokens: (block_tokens, columns padded). `multiply` takes one panel of tokens and one of columns,
// [pairs][4][2] and [pairs][16][2], to sums of (4, 16), by the pairs in a list: those that are not zero in all four tokens.
template <auto multiply>
class Product {
 public:
  explicit Product(const TideMatrix& matrix)
      : matrix_(matrix), columns_(tide_panels(matrix.used_columns) * tide_panel_columns),
        pairs_(tide_pairs(matrix.used_rows)), sums_(block_tokens * columns_),
        listed_(block_tokens / tide_panel_tokens * pairs_) {}

  std::size_t pairs() const { return pairs_; }

  // tokens: panels of [pairs][4][2]; count is a multiple of 4.
  void run(const std::int16_t* tokens, std::size_t count) {
    std::array<std::size_t, block_tokens / tide_panel_tokens> listed;
    for (std::size_t i = 0; i < count / tide_panel_tokens; ++i) {
      listed[i] = list_pairs(tokens + i * tide_panel_tokens * pairs_ * 2, listed_.data() + i * pairs_);
    }
    const std::size_t stride = tide_pairs(matrix_.rows) * tide_panel_columns * 2;
    alignas(32) std::int32_t tile[tide_panel_tokens * tide_panel_columns];
    for (std::size_t panel = 0; panel < columns_ / tide_panel_columns; ++panel) {
      const std::int16_t* columns = matrix_.panels.data() + panel * stride;
      for (std::size_t first = 0; first < count; first += tide_panel_tokens) {
        const std::size_t i = first / tide_panel_tokens;
        multiply(tokens + first * pairs_ * 2, columns, {listed_.data() + i * pairs_, listed[i]}, tile);
        for (std::size_t t = 0; t < tide_panel_tokens; ++t) {
          std::memcpy(sums_.data() + (first + t) * columns_ + panel * tide_panel_columns, tile + t * tide_panel_columns,
                      tide_panel_columns * sizeof(std::int32_t));
        }
      }
    }
  }

  const std::int32_t* of(std::size_t token) const { return sums_.data() + token * columns_; }

 private:
  // Many are zeros: of four tokens a sixth of the pairs at a fine step, two fifths in a base.
  std::size_t list_pairs(const std::int16_t* panel, std::uint32_t* list) const {
    constexpr std::size_t words = tide_panel_tokens * 2 * sizeof *panel / sizeof(std::uint64_t);
    std::size_t count = 0;
    for (std::size_t pair = 0; pair < pairs_; ++pair) {
      std::array<std::uint64_t, words> all;
      std::memcpy(all.data(), panel + pair * tide_panel_tokens * 2, sizeof all);
      std::uint64_t any = 0;
      for (const std::uint64_t word : all) any |= word;
      list[count] = static_cast<std::uint32_t>(pair);
      count += any != 0;
    }
    return count;
  }

  const TideMatrix& matrix_;
  std::size_t columns_, pairs_;
  std::vector<std::int32_t> sums_;
  std::vector<std::uint32_t> listed_;  // for each panel of tokens, room for all pairs
};

// Rounds to nearest even by an addition, which vectors can do: values are below 2^15.
std::int16_t rounded(float value) { return static_cast<std::int16_t>((value + 0x1.8p23f) - 0x1.8p23f); }

// Scales one token's values and returns how often they must be halved to fit 16 bits, or -1 if they are too loud. There is room
// for whole lanes, with zeros behind the values.
int load_token(const TideProject& job, std::size_t token, float* scaled) {
  const TideShape& shape = job.shape;
  for (std::size_t stream = 0; stream < shape.streams; ++stream) {
    const float* from = job.values.data() + (stream * shape.tokens + token) * shape.channels;
    const float* mean = job.mean.data() + stream * shape.channels;
    const float* scale = job.scale.data() + stream * shape.channels;
    for (std::size_t c = 0; c < shape.channels; ++c) scaled[stream * shape.channels + c] = (from[c] - mean[c]) * scale[c];
  }
  // Sixteen sums side by side: the compiler may not reorder one.
  float square[lanes] = {}, peak[lanes] = {};
  for (std::size_t first = 0; first < shape.values(); first += lanes) {
    for (std::size_t i = 0; i < lanes; ++i) {
      const float value = scaled[first + i];
      square[i] += value * value;
      peak[i] = std::max(peak[i], std::abs(value));
    }
  }
  float loudest = *std::ranges::max_element(peak), norm = 0;
  for (const float part : square) norm += part;
  norm = std::sqrt(norm);
  int halvings = 0;
  for (; norm > norm_max || loudest > value_max; norm *= 0.5f, loudest *= 0.5f) {
    if (++halvings > halvings_max) return -1;
  }
  return halvings;
}

// Rounds a token's sums to steps; false if one does not fit.
bool round_steps(std::span<const std::int32_t> sums, int halvings, std::int16_t* out) {
  constexpr int bits = tide_one_bits + tide_step_bits;
  bool fits = true;
  for (std::size_t k = 0; k < sums.size(); ++k) {
    // Of a token that was not halved no sum reaches 2^31 less half a step.
    const std::int64_t wide = (static_cast<std::int64_t>(sums[k]) << halvings) + (std::int64_t{1} << (bits - 1));
    const auto steps = static_cast<std::int32_t>(wide >> bits);
    fits &= steps <= coefficient_max && steps >= -coefficient_max;
    out[k] = static_cast<std::int16_t>(steps);
  }
  return fits;
}

// Pulls of one class, for magnitudes 1, 2 and above.
struct Pulls {
  int one, two, more;
};

// Puts one token's values into its lane of a panel, pair by pair.
void put_token(std::span<const std::int16_t> whole, std::int16_t* panel, std::size_t lane) {
  for (std::size_t pair = 0; pair < whole.size() / 2; ++pair) {
    std::memcpy(panel + 2 * (pair * tide_panel_tokens + lane), whole.data() + 2 * pair, 2 * sizeof(std::int16_t));
  }
}

// One part of a row as 16ths of a step: the middle of what each coefficient stands for, in its class. Free of branches.
void pull_part(const std::int16_t* from, std::size_t count, Pulls pulls, std::int16_t* out) {
  const auto one = static_cast<std::int16_t>(pulls.one), two = static_cast<std::int16_t>(pulls.two);
  const auto more = static_cast<std::int16_t>(pulls.more);
  for (std::size_t t = 0; t < count; ++t) {
    const std::int16_t value = from[t];
    const auto magnitude = static_cast<std::int16_t>(value < 0 ? -value : value);
    const auto first = static_cast<std::int16_t>(magnitude == 1 ? one : 0);
    const auto second = static_cast<std::int16_t>(magnitude == 2 ? two : 0);
    const auto rest = static_cast<std::int16_t>(magnitude > 2 ? more : 0);
    const auto pull = static_cast<std::int16_t>(first | second | rest);
    const auto signed_pull = static_cast<std::int16_t>(value < 0 ? -pull : pull);
    out[t] = static_cast<std::int16_t>(value * (1 << tide_step_bits) - signed_pull);
  }
}

// One row of coefficients as 16ths.
void pull_row(const TideRestore& job, std::size_t row, std::int16_t* out) {
  const std::size_t tokens = job.shape.tokens;
  const std::int16_t* from = job.coefficients.data() + row * tokens;
  for (std::size_t part = 0; part < tide_parts; ++part) {
    const std::int8_t* pulls = job.pulls.data() + 4 * std::size_t{job.classes[row * tide_parts + part]};
    const std::size_t start = tide_part_start(part, tokens), stop = tide_part_start(part + 1, tokens);
    pull_part(from + start, stop - start, {pulls[1], pulls[2], pulls[3]}, out + start);
  }
}

// All rows as panels of tokens: [tokens / 4][pairs][4][2].
std::vector<std::int16_t> token_panels(const TideRestore& job, std::size_t pairs) {
  const std::size_t tokens = job.shape.tokens, rows = job.matrix.used_rows;
  std::vector<std::int16_t> panels(padded(tokens, tide_panel_tokens) * pairs * 2);
  std::vector<std::int16_t> even(padded(tokens, tide_panel_tokens)), odd(even.size());
  for (std::size_t pair = 0; pair < pairs; ++pair) {
    pull_row(job, 2 * pair, even.data());
    if (2 * pair + 1 < rows) {
      pull_row(job, 2 * pair + 1, odd.data());
    } else {
      std::ranges::fill(odd, std::int16_t{0});
    }
    for (std::size_t first = 0; first < even.size(); first += tide_panel_tokens) {
      std::int16_t* to = panels.data() + (first * pairs + pair * tide_panel_tokens) * 2;
      for (std::size_t t = 0; t < tide_panel_tokens; ++t) {
        to[2 * t] = even[first + t];
        to[2 * t + 1] = odd[first + t];
      }
    }
  }
  return panels;
}

// Without a matrix: rows of some channels are made side by side and turned into tokens while they are in the nearest cache.
void restore_ordered(const TideRestore& job) {
  constexpr std::size_t width = 16;
  const TideShape& shape = job.shape;
  const std::size_t tokens = shape.tokens, none = job.matrix.used_rows;
  std::vector<std::size_t> row_of(shape.values(), none);
  for (std::size_t k = 0; k < none; ++k) row_of[job.order[k]] = k;
  std::vector<std::int16_t> row(tokens);
  std::vector<float> tile(width * tokens);
  for (std::size_t value = 0; value < shape.values();) {
    const std::size_t stream = value / shape.channels, channel = value % shape.channels;
    const std::size_t count = std::min(width, shape.channels - channel);
    for (std::size_t c = 0; c < count; ++c, ++value) {
      float* to = tile.data() + c * tokens;
      const float scale = job.scale[value] * static_cast<float>(1 << tide_one_bits), mean = job.mean[value];
      if (row_of[value] == none) {
        std::fill(to, to + tokens, mean);
        continue;
      }
      pull_row(job, row_of[value], row.data());
      for (std::size_t t = 0; t < tokens; ++t) to[t] = static_cast<float>(row[t]) * scale + mean;
    }
    for (std::size_t t = 0; t < tokens; ++t) {
      float* to = job.out.data() + (stream * tokens + job.places[t]) * shape.channels + channel;
      for (std::size_t c = 0; c < count; ++c) to[c] = tile[c * tokens + t];
    }
  }
}

template <auto multiply>
void project_block(const TideProject& job) {
  const TideShape& shape = job.shape;
  const std::size_t columns = job.matrix.used_columns, values = shape.values();
  Product<multiply> product(job.matrix);
  std::vector<float> scaled(padded(values, lanes));
  std::vector<std::int16_t> whole(padded(values, 2)), panels(block_tokens * whole.size()), steps(block_tokens * columns);
  std::vector<std::int32_t> ordered(columns);
  for (std::size_t start = 0; start < shape.tokens; start += block_tokens) {
    const std::size_t count = std::min(block_tokens, shape.tokens - start);
    int halvings[block_tokens];
    std::ranges::fill(steps, std::int16_t{0});
    for (std::size_t t = 0; t < count; ++t) {
      halvings[t] = job.apart[start + t] ? -1 : load_token(job, start + t, scaled.data());
      if (halvings[t] < 0) {
        job.apart[start + t] = 1;
        std::ranges::fill(whole, std::int16_t{0});
      } else {
        const float factor = std::ldexp(1.0f, -halvings[t]);
        for (std::size_t i = 0; i < whole.size(); ++i) whole[i] = rounded(scaled[i] * factor);
      }
      if (job.order.empty()) {
        put_token(whole, panels.data() + t / tide_panel_tokens * tide_panel_tokens * whole.size(), t % tide_panel_tokens);
      } else if (halvings[t] >= 0) {
        for (std::size_t k = 0; k < columns; ++k) ordered[k] = std::int32_t{whole[job.order[k]]} << tide_one_bits;
        job.apart[start + t] = !round_steps(ordered, halvings[t], steps.data() + t * columns);
      }
    }
    if (job.order.empty()) product.run(panels.data(), padded(count, tide_panel_tokens));
    for (std::size_t t = 0; t < count; ++t) {
      std::int16_t* row = steps.data() + t * columns;
      if (job.order.empty() && halvings[t] >= 0) {
        job.apart[start + t] = !round_steps({product.of(t), columns}, halvings[t], row);
      }
      if (job.apart[start + t]) std::fill(row, row + columns, std::int16_t{0});
    }
    for (std::size_t k = 0; k < columns; ++k) {
      std::int16_t* to = job.out.data() + k * shape.tokens + start;
      for (std::size_t t = 0; t < count; ++t) to[t] = steps[t * columns + k];
    }
  }
}

template <auto multiply>
void restore_block(const TideRestore& job) {
  if (!job.order.empty()) return restore_ordered(job);
  const TideShape& shape = job.shape;
  Product<multiply> product(job.matrix);
  const std::vector<std::int16_t> panels = token_panels(job, product.pairs());
  for (std::size_t start = 0; start < shape.tokens; start += block_tokens) {
    const std::size_t count = std::min(block_tokens, shape.tokens - start);
    product.run(panels.data() + start * product.pairs() * 2, padded(count, tide_panel_tokens));
    for (std::size_t t = 0; t < count; ++t) {
      const std::int32_t* sums = product.of(t);
      for (std::size_t stream = 0; stream < shape.streams; ++stream) {
        const std::size_t first = stream * shape.channels;
        float* to = job.out.data() + (stream * shape.tokens + job.places[start + t]) * shape.channels;
        for (std::size_t c = 0; c < shape.channels; ++c) {
          to[c] = static_cast<float>(sums[first + c]) * job.scale[first + c] + job.mean[first + c];
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvtide
