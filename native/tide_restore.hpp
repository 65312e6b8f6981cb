// Steps to stored values: what every instruction set shares, as in tide_product.hpp.
#pragma once

#include "tide_project.hpp"

namespace kvtide {
namespace {

// Pulls of one class, for magnitudes 1, 2 and above.
struct Pulls {
  int one, two, more;
};

// One part of a row as 16ths of a step: the middle of what each coefficient stands for, in its class. Free of branches.
inline void pull_part(const std::int16_t* __restrict from, std::size_t count, Pulls pulls, std::int16_t* __restrict out) {
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
inline void pull_row(const TideRestore& job, std::size_t row, std::int16_t* out) {
  const std::size_t tokens = job.shape.tokens;
  const std::int16_t* from = job.coefficients.data() + row * tokens;
  for (std::size_t part = 0; part < tide_parts; ++part) {
    const std::int8_t* pulls = job.pulls.data() + 4 * std::size_t{job.classes[row * tide_parts + part]};
    const std::size_t start = tide_part_start(part, tokens), stop = tide_part_start(part + 1, tokens);
    pull_part(from + start, stop - start, {pulls[1], pulls[2], pulls[3]}, out + start);
  }
}

// All rows as panels of tokens: [tokens / 4][pairs][4][2].
inline std::vector<std::int16_t> token_panels(const TideRestore& job, std::size_t pairs) {
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

// Writes tokens of a job: values turned and stored while they are in the nearest cache.
template <ElementType type>
class TokenWriter {
 public:
  explicit TokenWriter(const TideRestore& job)
      : job_(job), shape_(turned_shape(job.shape, job.turns)), row_(job.shape.channels()), turned_(job.shape.channels()) {}

  // numbers: of one token of K or V of a layer; scale: of all values of a token.
  template <class Number>
  void write(std::size_t stream, std::size_t token, const Number* __restrict numbers, const float* scale) {
    const std::size_t channels = job_.shape.channels();
    const float* __restrict factor = scale + stream * channels;
    const float* __restrict mean = job_.mean.data() + stream * channels;
    float* __restrict row = row_.data();
    for (std::size_t c = 0; c < channels; ++c) row[c] = static_cast<float>(numbers[c]) * factor[c] + mean[c];
    store_row(stream, token);
  }

  // Writes the tokens that were kept whole where they belong.
  void write_apart() {
    const TideShape& shape = job_.shape;
    const std::size_t count = job_.apart.positions.size();
    for (std::size_t i = 0; i < shape.streams() * count; ++i) {
      for (std::size_t c = 0; c < shape.channels(); ++c) {
        const float scale = from_bfloat(job_.apart.scales[i * shape.heads + c / shape.head_dim]);
        row_[c] = static_cast<float>(job_.apart.values[i * shape.channels() + c]) * scale;
      }
      store_row(i / count, job_.apart.positions[i % count]);
    }
  }

 private:
  void store_row(std::size_t stream, std::size_t token) {
    const TideShape& shape = job_.shape;
    const float* row = row_.data();
    if (stream % 2 == 0 && shape_.pairs != 0) {
      const std::size_t angles = angles_of(shape, job_.turns, stream, token);
      for (std::size_t head = 0; head < shape.heads; ++head) {
        turn_head(row + head * shape.head_dim, turned_.data() + head * shape.head_dim, shape_, job_.turns.cos.data() + angles,
                  job_.turns.sin.data() + angles);
      }
      row = turned_.data();
    }
    std::uint8_t* __restrict to = job_.bits.data() + (stream * shape.tokens + token) * shape.row_bytes();
    // Bytes may be anything's: a count that is not a local would be read again for each.
    const std::size_t channels = shape.channels();
    for (std::size_t c = 0; c < channels; ++c) store<type>(row[c], to + c * element_bytes(type));
  }

  const TideRestore& job_;
  const RopeShape shape_;
  std::vector<float> row_, turned_;
};

// Without a matrix: the rows of K or V of a layer are pulled, then turned into tokens, eight at a time.
template <class Isa, ElementType type>
void restore_ordered(const TideRestore& job, TokenWriter<type>& writer) {
  const TideShape& shape = job.shape;
  const std::size_t tokens = shape.tokens, channels = shape.channels(), none = job.matrix.used_rows;
  std::vector<std::size_t> row_of(shape.values(), none);
  for (std::size_t k = 0; k < none; ++k) row_of[job.order[k]] = k;
  std::vector<float> scale(job.scale.begin(), job.scale.end());
  for (float& each : scale) each *= static_cast<float>(1 << tide_one_bits);
  std::vector<std::int16_t> rows(channels * tokens), tile(tile_rows * channels);
  std::vector<const std::int16_t*> from(channels);
  std::array<std::int16_t*, tile_rows> to;
  for (std::size_t i = 0; i < tile_rows; ++i) to[i] = tile.data() + i * channels;
  for (std::size_t stream = 0; stream < shape.streams(); ++stream) {
    for (std::size_t c = 0; c < channels; ++c) {
      std::int16_t* row = rows.data() + c * tokens;
      const std::size_t coded = row_of[stream * channels + c];
      if (coded == none) {
        std::fill(row, row + tokens, std::int16_t{0});
      } else {
        pull_row(job, coded, row);
      }
    }
    for (std::size_t first = 0; first < tokens; first += tile_rows) {
      const std::size_t count = std::min(tile_rows, tokens - first);
      for (std::size_t c = 0; c < channels; ++c) from[c] = rows.data() + c * tokens + first;
      transpose<Isa>(from.data(), channels, count, to.data());
      for (std::size_t i = 0; i < count; ++i) writer.write(stream, job.places[first + i], to[i], scale.data());
    }
  }
}

template <class Isa, ElementType type>
void restore_products(const TideRestore& job, TokenWriter<type>& writer) {
  const TideShape& shape = job.shape;
  Product<Isa> product(job.matrix);
  const std::vector<std::int16_t> panels = token_panels(job, product.pairs());
  for (std::size_t start = 0; start < shape.tokens; start += block_tokens) {
    const std::size_t count = std::min(block_tokens, shape.tokens - start);
    product.run(panels.data() + start * product.pairs() * 2, padded(count, tide_panel_tokens));
    for (std::size_t stream = 0; stream < shape.streams(); ++stream) {
      for (std::size_t t = 0; t < count; ++t) {
        writer.write(stream, job.places[start + t], product.of(t) + stream * shape.channels(), job.scale.data());
      }
    }
  }
}

template <class Isa>
void restore_tokens(const TideRestore& job) {
  with_type(job.shape.type, [&]<ElementType type>() {
    TokenWriter<type> writer(job);
    if (job.order.empty()) {
      restore_products<Isa>(job, writer);
    } else {
      restore_ordered<Isa>(job, writer);
    }
    writer.write_apart();
  });
}

}  // namespace
}  // namespace kvtide
