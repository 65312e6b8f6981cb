#include "quantise.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

namespace kvtide {
namespace {

constexpr float delta_max = 32767.0f;

// The largest magnitude of a token; not finite if one value is not.
template <ElementType type>
float magnitude_max(const std::uint8_t* token, std::size_t channels, std::size_t item_bytes) {
  float largest = 0.0f;
  for (std::size_t c = 0; c < channels; ++c) {
    const float magnitude = std::fabs(load<type>(token + c * item_bytes));
    if (!(magnitude <= 3.4028234e38f)) return INFINITY;
    largest = std::max(largest, magnitude);
  }
  return largest;
}

std::int16_t rounded(float value, float limit) {
  return static_cast<std::int16_t>(std::nearbyint(std::clamp(value, -limit, limit)));
}

// 0 for a scale so small that the factor would not be finite: such a token's values all become 0.
float inverse(float numerator, float scale) {
  const float factor = numerator / scale;
  return factor <= 3.4028234e38f ? factor : 0.0f;
}

}  // namespace

std::uint16_t scale_bits(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t up = (bits + 0xffffu) >> 16;
  // Above the largest bfloat16 there is only infinity: values are then clamped to it.
  return static_cast<std::uint16_t>(std::min(up, 0x7f7fu));
}

float scale_value(std::uint16_t bits) { return from_bfloat(bits); }

double delta_energy(std::span<const std::uint8_t> values, ElementType type, const Grouping& grouping) {
  return with_type(type, [&]<ElementType element>() {
    const std::size_t item_bytes = element_bytes(element);
    const std::size_t row_bytes = grouping.channels * item_bytes;
    double energy = 0.0;
    for (std::size_t token = 0; token < grouping.tokens; ++token) {
      const std::uint8_t* anchor = values.data() + (token - token % grouping.group) * row_bytes;
      const std::uint8_t* row = values.data() + token * row_bytes;
      float sum = 0.0f;
      for (std::size_t offset = 0; offset < row_bytes; offset += item_bytes) {
        const float delta = load<element>(row + offset) - load<element>(anchor + offset);
        sum += delta * delta;
      }
      energy += static_cast<double>(sum);
    }
    return energy;
  });
}

bool quantise(std::span<const std::uint8_t> values, ElementType type, const Grouping& grouping, int half, float step,
              std::span<std::int16_t> anchors, std::span<std::uint16_t> scales, std::span<std::int16_t> deltas) {
  return with_type(type, [&]<ElementType element>() {
    const std::size_t item_bytes = element_bytes(element);
    const std::size_t channels = grouping.channels, groups = grouping.groups(), delta_count = grouping.deltas();
    const float inverse_step = 1.0f / step, limit = static_cast<float>(half);
    std::size_t delta_position = 0;
    for (std::size_t token = 0; token < grouping.tokens; ++token) {
      const std::size_t group = token / grouping.group;
      const std::uint8_t* row = values.data() + token * channels * item_bytes;
      const bool is_anchor = token % grouping.group == 0;
      const float largest = magnitude_max<element>(row, channels, item_bytes);
      if (std::isinf(largest)) return false;
      if (is_anchor) {
        scales[group] = scale_bits(largest);
        const float factor = inverse(limit, scale_value(scales[group]));
        for (std::size_t c = 0; c < channels; ++c) {
          anchors[c * groups + group] = rounded(load<element>(row + c * item_bytes) * factor, limit);
        }
        continue;
      }
      const float unit = scale_value(scales[group]) / static_cast<float>(half);
      for (std::size_t c = 0; c < channels; ++c) {
        const float anchor = static_cast<float>(anchors[c * groups + group]) * unit;
        const float delta = load<element>(row + c * item_bytes) - anchor;
        deltas[c * delta_count + delta_position] = rounded(delta * inverse_step, delta_max);
      }
      ++delta_position;
    }
    return true;
  });
}

void restore(std::span<const std::int16_t> anchors, std::span<const std::uint16_t> scales, std::span<const std::int16_t> deltas,
             const Grouping& grouping, int half, float step, ElementType type, std::span<std::uint8_t> values) {
  with_type(type, [&]<ElementType element>() {
    const std::size_t item_bytes = element_bytes(element);
    const std::size_t channels = grouping.channels, groups = grouping.groups(), delta_count = grouping.deltas();
    std::size_t delta_position = 0;
    for (std::size_t token = 0; token < grouping.tokens; ++token) {
      const std::size_t group = token / grouping.group;
      const float unit = scale_value(scales[group]) / static_cast<float>(half);
      const bool is_anchor = token % grouping.group == 0;
      std::uint8_t* row = values.data() + token * channels * item_bytes;
      for (std::size_t c = 0; c < channels; ++c) {
        float value = static_cast<float>(anchors[c * groups + group]) * unit;
        if (!is_anchor) value += static_cast<float>(deltas[c * delta_count + delta_position]) * step;
        store<element>(value, row + c * item_bytes);
      }
      if (!is_anchor) ++delta_position;
    }
  });
}

}  // namespace kvtide
