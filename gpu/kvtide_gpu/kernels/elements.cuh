// Elements of a KV cache as float32 and back: what native/elements.hpp computes, bit for bit.
#pragma once

#include "base.cuh"

constexpr u32 element_float32 = 1, element_float16 = 2, element_bfloat16 = 3;

INLINE float from_bfloat(u16 bits) { return __uint_as_float(u32{bits} << 16); }

INLINE float from_half(u16 bits) {
  const u32 magnitude = bits & 0x7fffu;
  // The exponent's bias is 112 less; the product makes denormals normal, infinity and NaN get back their exponent.
  const u32 scaled = __float_as_uint(__uint_as_float(magnitude << 13) * __uint_as_float((127u + 112u) << 23));
  const u32 exponent = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  return __uint_as_float((bits & 0x8000u) << 16 | scaled | exponent);
}

// 0x1.fffffep127, 65504 and 0x1.fep127: the largest value of each type.
constexpr u32 float_max = 0x7f7fffffu, half_max = 0x477fe000u, bfloat_max = 0x7f7f0000u;

INLINE float clamped(float value, u32 largest_bits) {
  const float largest = __uint_as_float(largest_bits);
  value = value < largest ? value : largest;
  return value > -largest ? value : -largest;
}

INLINE u16 to_half(float value) {
  const u32 bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  const u32 denormal = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u;
  const u32 normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
  const u32 half = magnitude < 0x38800000u ? denormal : normal;
  return static_cast<u16>((bits >> 16 & 0x8000u) | half);
}

INLINE u16 to_bfloat(float value) {
  const u32 bits = __float_as_uint(value);
  return static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// `at` counts elements.
INLINE void put_element(u64 base, i64 at, u32 type, float value) {
  if (type == element_float32) {
    reinterpret_cast<float*>(base)[at] = clamped(value, float_max);
  } else {
    const bool is_half = type == element_float16;
    reinterpret_cast<u16*>(base)[at] = is_half ? to_half(clamped(value, half_max)) : to_bfloat(clamped(value, bfloat_max));
  }
}

INLINE float take_element(u64 base, i64 at, u32 type) {
  if (type == element_float32) return reinterpret_cast<const float*>(base)[at];
  const u16 bits = reinterpret_cast<const u16*>(base)[at];
  return type == element_float16 ? from_half(bits) : from_bfloat(bits);
}
