// A tile of a transposition in SSE2, which every x86-64 has: for the files of the wider instruction sets.
#pragma once

#include <emmintrin.h>

#include <cstddef>
#include <cstdint>

namespace kvtide {
namespace {

// to[i][row + j] = from[j][column + i], 8 by 8.
[[gnu::always_inline]] inline void transpose_by_8(const std::int16_t* const* from, std::size_t column, std::int16_t* const* to,
                                                  std::size_t row) {
  __m128i a[8], b[8];
#pragma GCC unroll 8
  for (std::size_t i = 0; i < 8; ++i) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from[i] + column));
#pragma GCC unroll 4
  for (std::size_t i = 0; i < 4; ++i) {
    b[2 * i] = _mm_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (std::size_t half = 0; half < 2; ++half) {
#pragma GCC unroll 2
    for (std::size_t side = 0; side < 2; ++side) {
      const __m128i left = b[4 * half + side], right = b[4 * half + side + 2];
      a[4 * half + 2 * side] = _mm_unpacklo_epi32(left, right);
      a[4 * half + 2 * side + 1] = _mm_unpackhi_epi32(left, right);
    }
  }
#pragma GCC unroll 4
  for (std::size_t i = 0; i < 4; ++i) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to[2 * i] + row), _mm_unpacklo_epi64(a[i], a[i + 4]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to[2 * i + 1] + row), _mm_unpackhi_epi64(a[i], a[i + 4]));
  }
}

}  // namespace
}  // namespace kvtide
