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

INLINE u16 to_half(float value) {
  const u32 bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  const u32 denormal = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u;
  const u32 normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
  u32 half = magnitude < 0x38800000u ? denormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  return static_cast<u16>((bits >> 16 & 0x8000u) | half);
}

INLINE u16 to_bfloat(float value) {
  const u32 bits = __float_as_uint(value);
  const u32 rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return static_cast<u16>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16 | 0x40u) : rounded);
}

// `at` counts elements.
INLINE void put_element(u64 base, i64 at, u32 type, float value) {
  if (type == element_float32) {
    reinterpret_cast<float*>(base)[at] = value;
  } else {
    reinterpret_cast<u16*>(base)[at] = type == element_float16 ? to_half(value) : to_bfloat(value);
  }
}

INLINE float take_element(u64 base, i64 at, u32 type) {
  if (type == element_float32) return reinterpret_cast<const float*>(base)[at];
  const u16 bits = reinterpret_cast<const u16*>(base)[at];
  return type == element_float16 ? from_half(bits) : from_bfloat(bits);
}
