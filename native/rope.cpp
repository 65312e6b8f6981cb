#include "rope.hpp"

#include <vector>

#include "rope_turn.hpp"

namespace kvtide {
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

}  // namespace kvtide
