// Splits floating-point elements into planes of bytes, exponent first, and joins them again.
//
// Every element is rotated left by one bit, so that the exponent is on top and the sign joins the mantissa, which is
// noise. Plane 0 holds the exponent alone; an exponent of 5 bits is followed by a plane of the 3 bits below it; then
// come whole bytes, down to the lowest. The map is a bijection on bit patterns: NaN payloads survive.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtide {

enum class SplitFormat { bfloat16, float16, float32 };

constexpr std::size_t item_bytes(SplitFormat format) { return format == SplitFormat::float32 ? 4 : 2; }
constexpr std::size_t plane_count(SplitFormat format) {
  return format == SplitFormat::bfloat16 ? 2 : format == SplitFormat::float16 ? 3 : 4;
}

// Bits of a plane, exponent first.
constexpr int plane_bits(SplitFormat format, std::size_t plane) {
  if (format != SplitFormat::float16) return 8;
  return std::array{5, 3, 8}[plane];
}

// Writes the planes one after another, each of as many bytes as there are whole items in `elements`.
void split_planes(std::span<const std::uint8_t> elements, SplitFormat format, std::uint8_t* planes);

// Where each plane's bytes are.
using PlaneBytes = std::array<const std::uint8_t*, 4>;
void join_planes(const PlaneBytes& planes, SplitFormat format, std::span<std::uint8_t> elements);

}  // namespace kvtide
