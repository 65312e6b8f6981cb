// Splits floating-point elements into byte planes, exponent first, and joins them again.
//
// Every element is rotated left by one bit, so that the top byte holds the whole exponent of bf16 and fp32 (the
// exponent and three mantissa bits of fp16) and the sign joins the mantissa, which is noise. Plane 0 is the top
// byte of each element, the last plane the lowest. The map is a bijection on bit patterns: NaN payloads survive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtide {

// Both return false, touching nothing, unless item_bytes is 2 or 4 and both spans hold the same whole number of items.
bool split_planes(std::span<const std::uint8_t> elements, std::size_t item_bytes, std::span<std::uint8_t> planes);
bool join_planes(std::span<const std::uint8_t> planes, std::size_t item_bytes, std::span<std::uint8_t> elements);

}  // namespace kvtide
