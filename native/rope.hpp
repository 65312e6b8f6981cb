// Loads keys, their rotated dims turned by tables of cosine and sine: forth or back, as the tables say (docs/format.md).
//
// Float32, one operation at a time (no contraction), so that the twin in the tests gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "elements.hpp"

namespace kvtide {

// Keys are (tokens, heads, head_dim); 2 * pairs dims from dim_start on turn. Tables are (tokens, pairs).
struct RopeShape {
  std::size_t tokens, heads, head_dim, dim_start, pairs;
  bool neighbours;
};

void rope_load(std::span<const std::uint8_t> keys, ElementType type, const RopeShape& shape, std::span<const float> cos,
               std::span<const float> sin, std::span<float> out);

}  // namespace kvtide
