#include "rope.hpp"

#include <algorithm>
#include <vector>

namespace kvtide {
namespace {

// Turns the pairs of one head's rotated dims from `in` to `out`, which do not overlap.
void turn(const float* in, float* out, const RopeShape& shape, const float* cos, const float* sin) {
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
void turn_head(const float* in, float* out, const RopeShape& shape, const float* cos, const float* sin) {
  const std::size_t dim_stop = shape.dim_start + 2 * shape.pairs;
  std::copy(in, in + shape.dim_start, out);
  turn(in + shape.dim_start, out + shape.dim_start, shape, cos, sin);
  std::copy(in + dim_stop, in + shape.head_dim, out + dim_stop);
}

}  // namespace

void rope_load(std::span<const std::uint8_t> keys, ElementType type, const RopeShape& shape, std::span<const float> cos,
               std::span<const float> sin, std::span<float> out) {
  with_type(type, [&]<ElementType element>() {
    const std::size_t item_bytes = element_bytes(element), head_dim = shape.head_dim;
    std::vector<float> head(head_dim);
    for (std::size_t row = 0; row < shape.tokens * shape.heads; ++row) {
      const std::uint8_t* source = keys.data() + row * head_dim * item_bytes;
      for (std::size_t i = 0; i < head_dim; ++i) head[i] = load<element>(source + i * item_bytes);
      const std::size_t angles = row / shape.heads * shape.pairs;
      turn_head(head.data(), out.data() + row * head_dim, shape, cos.data() + angles, sin.data() + angles);
    }
  });
}

void rope_store(std::span<const float> keys, const RopeShape& shape, std::span<const float> cos, std::span<const float> sin,
                ElementType type, std::span<std::uint8_t> out) {
  with_type(type, [&]<ElementType element>() {
    const std::size_t item_bytes = element_bytes(element), head_dim = shape.head_dim;
    std::vector<float> head(head_dim);
    for (std::size_t row = 0; row < shape.tokens * shape.heads; ++row) {
      const std::size_t angles = row / shape.heads * shape.pairs;
      turn_head(keys.data() + row * head_dim, head.data(), shape, cos.data() + angles, sin.data() + angles);
      std::uint8_t* target = out.data() + row * head_dim * item_bytes;
      for (std::size_t i = 0; i < head_dim; ++i) store<element>(head[i], target + i * item_bytes);
    }
  });
}

}  // namespace kvtide
