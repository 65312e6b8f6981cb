// A row of the dispatch table from what differs between instruction sets.
#pragma once

#include "tide_lists.hpp"
#include "tide_restore.hpp"
#include "tide_trellis.hpp"

namespace kvtide {
namespace {

inline void third_rows(std::span<const std::int16_t> values, std::span<const std::uint32_t> which, std::size_t columns, std::span<std::int16_t> out) {
  for (const std::size_t row : which) {
    // 43691 / 2^17 is near enough to a third for all 16 bits.
    for (std::size_t i = row * columns; i < (row + 1) * columns; ++i) {
      out[i] = static_cast<std::int16_t>((values[i] * 43691 + (1 << 16)) >> 17);
    }
  }
}

inline void items_to_symbols(std::span<const std::int16_t> items, std::size_t tops, std::span<std::uint8_t> out) {
  for (std::size_t i = 0; i < tops; ++i) {
    // Negative ones are large without their sign.
    const auto symbol = static_cast<std::uint16_t>(items[i] + 15);
    out[i] = static_cast<std::uint8_t>(symbol < 31 ? symbol : 31);
  }
  for (std::size_t i = tops; i < items.size(); ++i) out[i] = static_cast<std::uint8_t>(items[i] + 1);
}

inline void add_loudness(std::span<const std::int16_t> steps, std::span<const float> weights, std::span<float> loud) {
  const std::size_t columns = weights.size();
  std::vector<float> row(padded(columns, lanes)), factors(row.size());
  std::ranges::copy(weights, factors.begin());
  for (std::size_t t = 0; t < loud.size(); ++t) {
    for (std::size_t k = 0; k < columns; ++k) row[k] = std::abs(static_cast<float>(steps[t * columns + k]));
    Lanes sums;
    by_lanes(row, [&](std::size_t i, Floats value, std::size_t first) {
      Floats factor;
      std::memcpy(&factor, factors.data() + first, sizeof factor);
      sums.at[i] += value * factor;
    });
    for (std::size_t i = 0; i < lanes; ++i) loud[t] += sums[i];
  }
}

template <ElementType type>
void add_squares(const TideShape& shape, std::span<const std::uint8_t> bits, std::span<float> out) {
  std::vector<float> row(padded(shape.channels(), lanes));
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::size_t layer = i / shape.tokens, token = i % shape.tokens;
    const std::uint8_t* from = bits.data() + ((2 * layer + 1) * shape.tokens + token) * shape.row_bytes();
    for (std::size_t c = 0; c < shape.channels(); ++c) row[c] = load<type>(from + c * element_bytes(type));
    Lanes sums;
    by_lanes(row, [&](std::size_t lane, Floats value, std::size_t) { sums.at[lane] += value * value; });
    out[i] = 0;
    for (std::size_t lane = 0; lane < lanes; ++lane) out[i] += sums[lane];
  }
}

inline void value_squares(const TideShape& shape, std::span<const std::uint8_t> bits, std::span<float> out) {
  with_type(shape.type, [&]<ElementType type>() { add_squares<type>(shape, bits, out); });
}

template <class Isa>
constexpr TidePath tide_path(const char* name, bool (*is_supported)()) {
  return {name, is_supported, count_rows, take_rows<Isa>, put_rows<Isa>, count_states<Isa>, take_states<Isa>, put_states<Isa>, find_path<Isa>, project_tokens<Isa>, arrange_rows<Isa>,
          restore_tokens<Isa>, add_loudness, value_squares, third_rows, items_to_symbols};
}

}  // namespace
}  // namespace kvtide
