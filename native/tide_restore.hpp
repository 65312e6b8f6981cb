// Steps to stored values: what every instruction set shares, as in tide_product.hpp.
#pragma once

#include "tide_project.hpp"

namespace kvtide {
namespace {

// One part of a row as 16ths of a step: the middle of what each coefficient stands for. pulls: of its class, for magnitudes 0, which
// has none, 1, 2 and above. Free of branches.
inline void pull_part(const std::int16_t* __restrict from, std::size_t count, const std::int8_t* pulls, std::int16_t* __restrict out) {
  const std::int16_t one = pulls[1], two = pulls[2], more = pulls[3];
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

// The same of half steps, which stand for themselves.
inline void widen_part(const std::int16_t* __restrict from, std::size_t count, std::int16_t* __restrict out) {
  for (std::size_t t = 0; t < count; ++t) out[t] = static_cast<std::int16_t>(from[t] * (1 << (tide_step_bits - 1)));
}

// One row of coefficients as 16ths.
template <class Isa>
void pull_row(const TideRestore& job, std::size_t row, std::int16_t* out) {
  const std::size_t tokens = job.shape.tokens;
  const std::int16_t* from = job.coefficients.data() + row * tokens;
  if (job.pulls.empty()) return widen_part(from, tokens, out);
  for (std::size_t part = 0; part < tide_parts; ++part) {
    const std::int8_t* pulls = job.pulls.data() + 4 * std::size_t{job.classes[row * tide_parts + part]};
    const std::size_t start = tide_part_start(part, tokens), stop = tide_part_start(part + 1, tokens);
    Isa::pull_part(from + start, stop - start, pulls, out + start);
  }
}

// The even row's values each before the odd one's.
inline void interleave(const std::int16_t* __restrict even, const std::int16_t* __restrict odd, std::size_t count,
                       std::uint32_t* __restrict both) {
  for (std::size_t t = 0; t < count; ++t) {
    both[t] = static_cast<std::uint16_t>(even[t]) | static_cast<std::uint32_t>(static_cast<std::uint16_t>(odd[t])) << 16;
  }
}

// Pairs of rows that are put into panels at a time: what they have of four tokens fills a line of the nearest cache.
constexpr std::size_t panel_pairs = 4;

// Rows as panels of tokens: [tokens / 4][pairs][4][2]. `write(row, to)` writes a row; the last pair may have one.
template <class Write>
void token_panels(std::size_t tokens, std::size_t rows, std::int16_t* panels, Write write) {
  const std::size_t pairs = tide_pairs(rows), stride = padded(tokens, tide_panel_tokens);
  std::vector<std::int16_t> even(stride), odd(stride);
  std::vector<std::uint32_t> both(panel_pairs * stride);
  for (std::size_t pair = 0; pair < pairs; pair += panel_pairs) {
    const std::size_t count = std::min(panel_pairs, pairs - pair);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t row = 2 * (pair + i);
      write(row, even.data());
      if (row + 1 < rows) {
        write(row + 1, odd.data());
      } else {
        std::ranges::fill(odd, std::int16_t{0});
      }
      interleave(even.data(), odd.data(), stride, both.data() + i * stride);
    }
    for (std::size_t first = 0; first < stride; first += tide_panel_tokens) {
      std::int16_t* to = panels + (first * pairs + pair * tide_panel_tokens) * 2;
      for (std::size_t i = 0; i < count; ++i) {
        std::memcpy(to + i * tide_panel_tokens * 2, both.data() + i * stride + first, tide_panel_tokens * sizeof both[0]);
      }
    }
  }
}

// Values of a token from what was coded: numbers times factor plus mean.
template <class Number>
struct Coded {
  const Number* numbers;
  const float *factor, *mean;

  Coded from(std::size_t first) const { return {numbers + first, factor + first, mean + first}; }
};

template <ElementType type, class Number>
[[gnu::always_inline]] inline void store_plain(Coded<Number> coded, std::size_t count, std::uint8_t* __restrict to) {
  const Number* __restrict numbers = coded.numbers;
  const float *__restrict factor = coded.factor, *__restrict mean = coded.mean;
  for (std::size_t c = 0; c < count; ++c) {
    store<type>(static_cast<float>(numbers[c]) * factor[c] + mean[c], to + c * element_bytes(type));
  }
}

// As `turn`, without writing down the values between.
template <ElementType type, class Number>
[[gnu::always_inline]] inline void store_halves(Coded<Number> coded, std::size_t pairs, const float* __restrict cos,
                                                const float* __restrict sin, std::uint8_t* __restrict to) {
  const Number* __restrict numbers = coded.numbers;
  const float *__restrict factor = coded.factor, *__restrict mean = coded.mean;
  std::uint8_t* __restrict other = to + pairs * element_bytes(type);
  for (std::size_t i = 0; i < pairs; ++i) {
    const float a = static_cast<float>(numbers[i]) * factor[i] + mean[i];
    const float b = static_cast<float>(numbers[i + pairs]) * factor[i + pairs] + mean[i + pairs];
    store<type>(a * cos[i] - b * sin[i], to + i * element_bytes(type));
    store<type>(b * cos[i] + a * sin[i], other + i * element_bytes(type));
  }
}

template <ElementType type, class Number>
[[gnu::always_inline]] inline void store_neighbours(Coded<Number> coded, std::size_t pairs, const float* __restrict cos,
                                                    const float* __restrict sin, std::uint8_t* __restrict to) {
  const auto [numbers, factor, mean] = coded;
  for (std::size_t i = 0; i < pairs; ++i) {
    const float a = static_cast<float>(numbers[2 * i]) * factor[2 * i] + mean[2 * i];
    const float b = static_cast<float>(numbers[2 * i + 1]) * factor[2 * i + 1] + mean[2 * i + 1];
    store<type>(a * cos[i] - b * sin[i], to + 2 * i * element_bytes(type));
    store<type>(b * cos[i] + a * sin[i], to + (2 * i + 1) * element_bytes(type));
  }
}

// Writes tokens of a job: values turned and stored while they are in registers.
template <ElementType type>
class TokenWriter {
 public:
  explicit TokenWriter(const TideRestore& job) : job_(job), shape_(turned_shape(job.shape, job.turns)) {}

  // numbers: of one token of K or V of a layer; scale: of all values of a token.
  template <class Number>
  void write(std::size_t stream, std::size_t token, const Number* numbers, const float* scale) const {
    const std::size_t first = stream * job_.shape.channels();
    write(stream, token, Coded<Number>{numbers, scale + first, job_.mean.data() + first});
  }

  // numbers: of one head of that.
  void write_head(std::size_t stream, std::size_t token, std::size_t head, const std::int32_t* numbers) const {
    const std::size_t values = head * job_.shape.head_dim, first = stream * job_.shape.channels() + values;
    write_heads(stream, token, head, head + 1, Coded<std::int32_t>{numbers, job_.scale.data() + first, job_.mean.data() + first});
  }

  // Writes the tokens that were kept whole where they belong.
  void write_apart() const {
    const TideShape& shape = job_.shape;
    const std::size_t count = job_.apart.positions.size();
    // Minus zero: adding it changes nothing, not even the sign of a zero.
    const std::vector<float> nothing(shape.channels(), -0.0f);
    std::vector<float> scale(shape.channels());
    for (std::size_t i = 0; i < shape.streams() * count; ++i) {
      for (std::size_t c = 0; c < shape.channels(); ++c) {
        scale[c] = from_bfloat(job_.apart.scales[(i * shape.channels() + c) / job_.apart.scaled_values]);
      }
      const std::int8_t* values = job_.apart.values.data() + i * shape.channels();
      write(i / count, job_.apart.positions[i % count], Coded<std::int8_t>{values, scale.data(), nothing.data()});
    }
  }

 private:
  template <class Number>
  void write(std::size_t stream, std::size_t token, Coded<Number> coded) const {
    write_heads(stream, token, 0, job_.shape.heads, coded);
  }

  // Heads [start, stop); `coded` is of the first of them.
  template <class Number>
  void write_heads(std::size_t stream, std::size_t token, std::size_t start, std::size_t stop, Coded<Number> coded) const {
    const TideShape& shape = job_.shape;
    const std::size_t head_bytes = shape.head_dim * element_bytes(type);
    std::uint8_t* to = job_.bits.data() + (stream * shape.tokens + token) * shape.row_bytes() + start * head_bytes;
    if (stream % 2 != 0 || shape_.pairs == 0) return store_plain<type>(coded, (stop - start) * shape.head_dim, to);
    const std::size_t angles = angles_of(shape, job_.turns, stream, token);
    const float *cos = job_.turns.cos.data() + angles, *sin = job_.turns.sin.data() + angles;
    for (std::size_t i = 0; i < stop - start; ++i) {
      store_head(coded.from(i * shape.head_dim), cos, sin, to + i * head_bytes);
    }
  }

  template <class Number>
  void store_head(Coded<Number> coded, const float* cos, const float* sin, std::uint8_t* to) const {
    const std::size_t start = shape_.dim_start, pairs = shape_.pairs, stop = start + 2 * pairs;
    if (start != 0) store_plain<type>(coded, start, to);
    std::uint8_t* turned = to + start * element_bytes(type);
    if (shape_.neighbours) {
      store_neighbours<type>(coded.from(start), pairs, cos, sin, turned);
    } else if (pairs == 32) {
      // Most models' heads: a count that the compiler knows leaves no loop at all.
      store_halves<type>(coded.from(start), 32, cos, sin, turned);
    } else if (pairs == 64) {
      store_halves<type>(coded.from(start), 64, cos, sin, turned);
    } else {
      store_halves<type>(coded.from(start), pairs, cos, sin, turned);
    }
    if (stop != shape_.head_dim) {
      store_plain<type>(coded.from(stop), shape_.head_dim - stop, to + stop * element_bytes(type));
    }
  }

  const TideRestore& job_;
  const RopeShape shape_;
};

// Rows lie in the order of their scales, which no prefetcher guesses.
constexpr std::size_t rows_ahead = 8;

inline void fetch_row(const TideRestore& job, std::size_t row) {
  if (row >= job.matrix.used_rows) return;
  const std::int16_t* from = job.coefficients.data() + row * job.shape.tokens;
  for (std::size_t t = 0; t < job.shape.tokens; t += 64 / sizeof *from) __builtin_prefetch(from + t);
}

// Without a matrix: the rows of K or V of a layer are pulled, then turned into tokens, eight at a time.
template <class Isa, ElementType type>
void restore_ordered(const TideRestore& job, TokenWriter<type>& writer) {
  const TideShape& shape = job.shape;
  const std::size_t tokens = shape.tokens, channels = shape.channels(), none = job.matrix.used_rows;
  std::vector<std::size_t> row_of(shape.values(), none);
  for (std::size_t k = 0; k < none; ++k) row_of[job.order[k]] = k;
  std::vector<float> scale(job.scale.begin(), job.scale.end());
  for (float& each : scale) each *= static_cast<float>(1 << tide_one_bits);
  // Rows a power of two apart would share a few lines of the nearest cache.
  const std::size_t stride = tokens + 32;
  std::vector<std::int16_t> rows(channels * stride), tile(tile_rows * channels);
  std::vector<const std::int16_t*> from(channels);
  std::array<std::int16_t*, tile_rows> to;
  for (std::size_t i = 0; i < tile_rows; ++i) to[i] = tile.data() + i * channels;
  for (std::size_t stream = 0; stream < shape.streams(); ++stream) {
    const std::size_t* coded = row_of.data() + stream * channels;
    for (std::size_t c = 0; c < channels; ++c) {
      if (c + rows_ahead < channels) fetch_row(job, coded[c + rows_ahead]);
      std::int16_t* row = rows.data() + c * stride;
      if (coded[c] == none) {
        std::fill(row, row + tokens, std::int16_t{0});
      } else {
        pull_row<Isa>(job, coded[c], row);
      }
    }
    for (std::size_t first = 0; first < tokens; first += tile_rows) {
      const std::size_t count = std::min(tile_rows, tokens - first);
      for (std::size_t c = 0; c < channels; ++c) from[c] = rows.data() + c * stride + first;
      transpose<Isa>(from.data(), channels, count, to.data());
      for (std::size_t i = 0; i < count; ++i) writer.write(stream, job.places[first + i], to[i], scale.data());
    }
  }
}

template <class Isa, ElementType type>
void restore_products(const TideRestore& job, TokenWriter<type>& writer) {
  const TideShape& shape = job.shape;
  Product<Isa> product(job.matrix);
  // A stream of K or V may begin within a panel, and end within another.
  const std::size_t channels = shape.channels(), stride = panel_columns(channels) + tide_panel_columns;
  std::vector<std::int16_t> panels(padded(shape.tokens, tide_panel_tokens) * product.pairs() * 2);
  std::vector<std::int32_t> sums(tokens_at_once<Isa>(shape.tokens) * stride);
  token_panels(shape.tokens, job.matrix.used_rows, panels.data(), [&](std::size_t row, std::int16_t* to) { pull_row<Isa>(job, row, to); });
  for (std::size_t start = 0; start < shape.tokens; start += Isa::block_tokens) {
    const std::size_t count = std::min(Isa::block_tokens, shape.tokens - start);
    product.put(panels.data() + start * product.pairs() * 2, padded(count, tide_panel_tokens));
    for (std::size_t stream = 0; stream < shape.streams(); ++stream) {
      const std::size_t first = stream * channels / tide_panel_columns, offset = stream * channels % tide_panel_columns;
      product.run(first, tide_panels((stream + 1) * channels), sums.data(), stride);
      for (std::size_t t = 0; t < count; ++t) {
        writer.write(stream, job.places[start + t], sums.data() + t * stride + offset, job.scale.data());
      }
    }
  }
}

// The strongest coefficients of all blocks, in 16ths: (mixed, stride), from those that were coded in their place.
template <class Isa>
std::vector<std::int16_t> unmixed(const TideRestore& job, std::span<const std::uint32_t> coded, std::size_t stride) {
  const std::size_t tokens = job.shape.tokens, count = job.matrix.used_columns, width = panel_columns(count);
  Product<Isa> product(job.matrix);
  std::vector<std::int32_t> sums(tokens_at_once<Isa>(tokens) * width);
  std::vector<std::int16_t> panels(stride * product.pairs() * 2), rows(count * stride), tile(tokens_at_once<Isa>(tokens) * count);
  token_panels(tokens, coded.size(), panels.data(), [&](std::size_t row, std::int16_t* to) { pull_row<Isa>(job, coded[row], to); });
  std::array<const std::int16_t*, Isa::block_tokens> from;
  std::vector<std::int16_t*> to(count);
  for (std::size_t t = 0; t < tokens_at_once<Isa>(tokens); ++t) from[t] = tile.data() + t * count;
  for (std::size_t start = 0; start < tokens; start += Isa::block_tokens) {
    const std::size_t here = std::min(Isa::block_tokens, tokens - start);
    multiply_all(product, job.matrix, panels.data() + start * product.pairs() * 2, here, sums.data(), width);
    for (std::size_t t = 0; t < here; ++t) to_sixteenths(sums.data() + t * width, count, 0, tile.data() + t * count);
    for (std::size_t c = 0; c < count; ++c) to[c] = rows.data() + c * stride + start;
    transpose<Isa>(from.data(), here, count, to.data());
  }
  return rows;
}

// In two stages: what was mixed is taken apart, then each block goes back to its values.
template <class Isa, ElementType type>
void restore_blocks(const TideRestore& job, TokenWriter<type>& writer) {
  const TideShape& shape = job.shape;
  const std::size_t tokens = shape.tokens, stride = padded(tokens, tide_panel_tokens), block = job.stage.block;
  constexpr std::size_t none = ~std::size_t{0};
  std::vector<std::size_t> row_of(shape.values(), none);
  std::vector<std::uint32_t> coded;
  for (std::size_t k = 0; k < job.stage.places.size(); ++k) {
    if (job.stage.places[k] < shape.values()) {
      row_of[job.stage.places[k]] = k;
    } else {
      coded.push_back(static_cast<std::uint32_t>(k));
    }
  }
  const std::vector<std::int16_t> inner = unmixed<Isa>(job, coded, stride);
  std::vector<const std::int16_t*> inner_of(shape.values());
  for (std::size_t i = 0; i < job.stage.mixed.size(); ++i) inner_of[job.stage.mixed[i]] = inner.data() + i * stride;
  // A head at a time, so that what is between coefficients and stored values stays in a core's own cache.
  const std::size_t blocks = shape.head_dim / block, panel_size = stride * tide_pairs(block) * 2;
  // The last panel of a block may reach beyond it, into the next one's columns, which are written later, or into these.
  const std::size_t width = shape.head_dim + tide_panel_columns;
  std::vector<std::int16_t> panels(blocks * panel_size);
  std::vector<std::int32_t> sums(tokens_at_once<Isa>(shape.tokens) * width);
  TideMatrix matrix{{}, block, block, block, block};
  Product<Isa> product(matrix);
  for (std::size_t i = 0; i < shape.streams() * shape.heads; ++i) {
    for (std::size_t b = 0; b < blocks; ++b) {
      const std::size_t first = i * shape.head_dim + b * block;
      token_panels(tokens, block, panels.data() + b * panel_size, [&](std::size_t row, std::int16_t* to) {
        if (row + rows_ahead < block) fetch_row(job, row_of[first + row + rows_ahead]);
        if (const std::int16_t* from = inner_of[first + row]; from != nullptr) {
          std::copy(from, from + tokens, to);
        } else if (row_of[first + row] != none) {
          pull_row<Isa>(job, row_of[first + row], to);
        } else {
          std::fill(to, to + tokens, std::int16_t{0});
        }
      });
    }
    for (std::size_t start = 0; start < tokens; start += Isa::block_tokens) {
      const std::size_t count = std::min(Isa::block_tokens, tokens - start);
      for (std::size_t b = 0; b < blocks; ++b) {
        matrix.panels = job.stage.block_panels.subspan((i * blocks + b) * job.stage.panel_size(), job.stage.panel_size());
        const std::int16_t* from = panels.data() + b * panel_size + start * product.pairs() * 2;
        multiply_all(product, matrix, from, count, sums.data() + b * block, width);
      }
      for (std::size_t t = 0; t < count; ++t) {
        writer.write_head(i / shape.heads, job.places[start + t], i % shape.heads, sums.data() + t * width);
      }
    }
  }
}

template <class Isa>
void restore_tokens(const TideRestore& job) {
  with_type(job.shape.type, [&]<ElementType type>() {
    TokenWriter<type> writer(job);
    if (job.stage.block != 0) {
      restore_blocks<Isa>(job, writer);
    } else if (job.order.empty()) {
      restore_products<Isa>(job, writer);
    } else {
      restore_ordered<Isa>(job, writer);
    }
    writer.write_apart();
  });
}

}  // namespace
}  // namespace kvtide
