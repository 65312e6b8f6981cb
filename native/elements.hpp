// Elements of a KV cache as float32 and back. Free of branches, so that loops over them become vector code.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvtide {

enum class ElementType : std::uint8_t { float32 = 1, float16 = 2, bfloat16 = 3 };

constexpr std::size_t element_bytes(ElementType type) { return type == ElementType::float32 ? 4 : 2; }

inline float from_bfloat(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

inline float from_half(std::uint16_t bits) {
  const std::uint32_t magnitude = bits & 0x7fffu;
  // The exponent's bias is 112 less; the product makes denormals normal, infinity and NaN get back their exponent.
  const auto scaled = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f);
  const std::uint32_t exponent = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits & 0x8000u) << 16 | scaled | exponent);
}

// The largest value of each type.
inline constexpr float float_max = 0x1.fffffep127f, half_max = 65504.0f, bfloat_max = 0x1.fep127f;

// The nearest value from -largest to largest; NaN becomes `largest`. Decoders store nothing else, whatever their payload says. Each
// line is one instruction of vector code.
inline float clamped(float value, float largest) {
  value = value < largest ? value : largest;
  return value > -largest ? value : -largest;
}

// Both round to nearest even, as all conversions here, and take what `clamped` returned.
inline std::uint16_t to_half(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  // Denormal: adding 0.5 leaves the mantissa in steps of 2^-24, rounded to even by the addition itself.
  const std::uint32_t denormal = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const std::uint32_t normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
  const std::uint32_t half = magnitude < 0x38800000u ? denormal : normal;
  return static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | half);
}

inline std::uint16_t to_bfloat(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// One load and store for each element type, chosen outside the loops, which are vector code only if these are in them.
template <ElementType type>
[[gnu::always_inline]] inline float load(const std::uint8_t* source) {
  if constexpr (type == ElementType::float32) {
    float value;
    std::memcpy(&value, source, sizeof value);
    return value;
  } else {
    std::uint16_t bits;
    std::memcpy(&bits, source, sizeof bits);
    return type == ElementType::float16 ? from_half(bits) : from_bfloat(bits);
  }
}

template <ElementType type>
[[gnu::always_inline]] inline void store(float value, std::uint8_t* target) {
  if constexpr (type == ElementType::float32) {
    value = clamped(value, float_max);
    std::memcpy(target, &value, sizeof value);
  } else {
    const bool is_half = type == ElementType::float16;
    const std::uint16_t bits = is_half ? to_half(clamped(value, half_max)) : to_bfloat(clamped(value, bfloat_max));
    std::memcpy(target, &bits, sizeof bits);
  }
}

template <class Work>
auto with_type(ElementType type, Work work) {
  switch (type) {
    case ElementType::float16: return work.template operator()<ElementType::float16>();
    case ElementType::bfloat16: return work.template operator()<ElementType::bfloat16>();
    default: return work.template operator()<ElementType::float32>();
  }
}

}  // namespace kvtide
