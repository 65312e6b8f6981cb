// The loops that turn keys, which every file compiles for its own instruction set (see tide_transform.hpp).
#pragma once

#include <algorithm>

#include "rope.hpp"

namespace kvtide {
namespace {

// Turns the pairs of one head's rotated dims from `in` to `out`, which do not overlap.
inline void turn(const float* __restrict in, float* __restrict out, const RopeShape& shape, const float* cos, const float* sin) {
  const std::size_t pairs = shape.pairs;
  if (shape.neighbours) {
    for (std::size_t i = 0; i < pairs; ++i) {
      const float a = in[2 * i], b = in[2 * i + 1];
      out[2 * i] = a * cos[i] - b * sin[i];
      out[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  for (std::size_t i = 0; i < pairs; ++i) {
    const float a = in[i], b = in[i + pairs];
    out[i] = a * cos[i] - b * sin[i];
    out[i + pairs] = b * cos[i] + a * sin[i];
  }
}

// Turns one head of one token; dims outside the rotated ones stay.
inline void turn_head(const float* in, float* out, const RopeShape& shape, const float* cos, const float* sin) {
  const std::size_t dim_stop = shape.dim_start + 2 * shape.pairs;
  std::copy(in, in + shape.dim_start, out);
  turn(in + shape.dim_start, out + shape.dim_start, shape, cos, sin);
  std::copy(in + dim_stop, in + shape.head_dim, out + dim_stop);
}

}  // namespace
}  // namespace kvtide
