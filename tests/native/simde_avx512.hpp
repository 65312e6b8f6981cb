// Stands in for AVX-512 where the CPU has none: SIMDe's portable intrinsics, and the few that it lacks, lane by lane.
// For tests only: proves that the AVX-512 kernels compute the right bytes, says nothing about their speed.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <cstdint>
#include <cstring>

namespace shim {

template <class Lane, class Vector>
struct Lanes {
  static constexpr int count = sizeof(Vector) / sizeof(Lane);
  Lane at[count];

  explicit Lanes(Vector vector) { std::memcpy(at, &vector, sizeof at); }
  Lanes() : at{} {}
  Vector vector() const {
    Vector result;
    std::memcpy(&result, at, sizeof result);
    return result;
  }
};

using U16 = Lanes<std::uint16_t, simde__m512i>;
using S16 = Lanes<std::int16_t, simde__m512i>;
using U32 = Lanes<std::uint32_t, simde__m512i>;
using Half16 = Lanes<std::uint16_t, simde__m256i>;
using Half8 = Lanes<std::uint8_t, simde__m256i>;

template <class Row, class Compare>
std::uint32_t mask_of(const Row& a, const Row& b, Compare compare) {
  std::uint32_t mask = 0;
  for (int i = 0; i < Row::count; ++i) mask |= static_cast<std::uint32_t>(compare(a.at[i], b.at[i])) << i;
  return mask;
}

// Leading items of `from` into the lanes of `mask`; the others keep what `row` holds.
template <class Row>
Row expand(Row row, std::uint32_t mask, const Row& from) {
  int next = 0;
  for (int i = 0; i < Row::count; ++i) {
    if (mask >> i & 1) row.at[i] = from.at[next++];
  }
  return row;
}

inline void store_masked(void* to, std::uint32_t mask, const std::uint16_t* lanes, int count) {
  for (int i = 0; i < count; ++i) {
    if (mask >> i & 1) std::memcpy(static_cast<char*>(to) + 2 * i, lanes + i, 2);
  }
}

}  // namespace shim

#define KVTIDE_SHIM_COMPARE(name, Row, operation)                             \
  inline std::uint32_t name(simde__m512i a, simde__m512i b) {                 \
    return shim::mask_of(Row(a), Row(b), [](auto x, auto y) { return operation; }); \
  }
KVTIDE_SHIM_COMPARE(shim_cmpeq_epi16, shim::U16, x == y)
KVTIDE_SHIM_COMPARE(shim_cmpneq_epi16, shim::U16, x != y)
KVTIDE_SHIM_COMPARE(shim_cmpgt_epi16, shim::S16, x > y)
KVTIDE_SHIM_COMPARE(shim_cmpgt_epu16, shim::U16, x > y)
KVTIDE_SHIM_COMPARE(shim_cmplt_epu16, shim::U16, x < y)
KVTIDE_SHIM_COMPARE(shim_cmpge_epu16, shim::U16, x >= y)
KVTIDE_SHIM_COMPARE(shim_test_epi16, shim::U16, (x & y) != 0)
KVTIDE_SHIM_COMPARE(shim_testn_epi16, shim::U16, (x & y) == 0)
#undef KVTIDE_SHIM_COMPARE

inline std::uint32_t shim_mask_testn_epi16(std::uint32_t k, simde__m512i a, simde__m512i b) {
  return k & shim_testn_epi16(a, b);
}
inline simde__m512i shim_mulhi_epu16(simde__m512i a, simde__m512i b) {
  shim::U16 x(a);
  const shim::U16 y(b);
  for (int i = 0; i < 32; ++i) x.at[i] = static_cast<std::uint16_t>(std::uint32_t{x.at[i]} * y.at[i] >> 16);
  return x.vector();
}
inline simde__m512i shim_mask_sub_epi16(simde__m512i kept, std::uint32_t k, simde__m512i a, simde__m512i b) {
  shim::U16 row(kept);
  const shim::U16 x(a), y(b);
  for (int i = 0; i < 32; ++i) {
    if (k >> i & 1) row.at[i] = static_cast<std::uint16_t>(x.at[i] - y.at[i]);
  }
  return row.vector();
}
inline simde__m512i shim_dpwssd_epi32(simde__m512i sums, simde__m512i a, simde__m512i b) {
  shim::U32 row(sums);
  const shim::S16 x(a), y(b);
  for (int i = 0; i < 32; ++i) row.at[i / 2] += static_cast<std::uint32_t>(x.at[i] * y.at[i]);
  return row.vector();
}
inline simde__m512i shim_mask_expand_epi16(simde__m512i kept, std::uint32_t k, simde__m512i a) {
  return shim::expand(shim::U16(kept), k, shim::U16(a)).vector();
}
inline simde__m512i shim_maskz_expand_epi32(std::uint32_t k, simde__m512i a) {
  return shim::expand(shim::U32(), k, shim::U32(a)).vector();
}
inline simde__m512i shim_maskz_compress_epi16(std::uint32_t k, simde__m512i a) {
  shim::U16 packed;
  const shim::U16 row(a);
  int next = 0;
  for (int i = 0; i < 32; ++i) {
    if (k >> i & 1) packed.at[next++] = row.at[i];
  }
  return packed.vector();
}
inline simde__m512i shim_cvtepu16_epi32(simde__m256i a) {
  const shim::Half16 row(a);
  shim::U32 wide;
  for (int i = 0; i < 16; ++i) wide.at[i] = row.at[i];
  return wide.vector();
}
inline simde__m512i shim_cvtepu8_epi16(simde__m256i a) {
  const shim::Half8 row(a);
  shim::U16 wide;
  for (int i = 0; i < 32; ++i) wide.at[i] = row.at[i];
  return wide.vector();
}
inline simde__m256i shim_cvtepi32_epi16(simde__m512i a) {
  const shim::U32 row(a);
  shim::Half16 narrow;
  for (int i = 0; i < 16; ++i) narrow.at[i] = static_cast<std::uint16_t>(row.at[i]);
  return narrow.vector();
}
inline void shim_mask_storeu512_epi16(void* to, std::uint32_t k, simde__m512i a) {
  shim::store_masked(to, k, shim::U16(a).at, 32);
}
inline void shim_mask_storeu256_epi16(void* to, std::uint32_t k, simde__m256i a) {
  shim::store_masked(to, k, shim::Half16(a).at, 16);
}

#define __mmask16 std::uint16_t
#define __mmask32 std::uint32_t
#undef _mm512_cmpge_epu16_mask
#undef _mm512_test_epi16_mask
#define _mm512_cmpeq_epi16_mask shim_cmpeq_epi16
#define _mm512_cmpneq_epi16_mask shim_cmpneq_epi16
#define _mm512_cmpgt_epi16_mask shim_cmpgt_epi16
#define _mm512_cmpgt_epu16_mask shim_cmpgt_epu16
#define _mm512_cmplt_epu16_mask shim_cmplt_epu16
#define _mm512_cmpge_epu16_mask shim_cmpge_epu16
#define _mm512_test_epi16_mask shim_test_epi16
#define _mm512_testn_epi16_mask shim_testn_epi16
#define _mm512_mask_testn_epi16_mask shim_mask_testn_epi16
#define _mm512_mulhi_epu16 shim_mulhi_epu16
#define _mm512_mask_sub_epi16 shim_mask_sub_epi16
#undef _mm512_dpwssd_epi32
#define _mm512_dpwssd_epi32 shim_dpwssd_epi32
#define _mm512_mask_expand_epi16 shim_mask_expand_epi16
#define _mm512_maskz_expand_epi32 shim_maskz_expand_epi32
#define _mm512_maskz_compress_epi16 shim_maskz_compress_epi16
#define _mm512_cvtepu16_epi32 shim_cvtepu16_epi32
#define _mm512_cvtepu8_epi16 shim_cvtepu8_epi16
#define _mm512_cvtepi32_epi16 shim_cvtepi32_epi16
#define _mm512_mask_storeu_epi16 shim_mask_storeu512_epi16
#define _mm256_mask_storeu_epi16 shim_mask_storeu256_epi16
