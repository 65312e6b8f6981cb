// The tide kernels for AVX-512 with VBMI2 and VNNI: a row of its own, and all of the AMX row but products.
#pragma once

#ifdef KVTIDE_SIMDE
#include "simde_avx512.hpp"
#else
#include <immintrin.h>
#endif

#include "tide_kernels.hpp"
#include "tide_sse2.hpp"

namespace kvtide {
namespace {

using Vector = __m512i;

inline Vector load64(const std::int16_t* from) { return _mm512_loadu_si512(from); }
inline int count_ones(__mmask32 mask) { return __builtin_popcount(mask); }

// Lanes whose values have a digit in each of the three lists.
inline std::array<__mmask32, tide_contexts> context_lanes(Vector value) {
  const Vector magnitude = _mm512_abs_epi16(value);
  const __mmask32 is_zero = _mm512_testn_epi16_mask(value, value);
  const __mmask32 is_one = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(1));
  return {is_zero, is_one, ~(is_zero | is_one)};
}

// Digits, negated where the value is below zero.
inline Vector negated_below(Vector digits, Vector values) {
  return _mm512_mask_sub_epi16(digits, _mm512_cmpgt_epi16_mask(_mm512_setzero_si512(), values), _mm512_setzero_si512(), digits);
}

inline Vector thrice(Vector values) { return _mm512_add_epi16(_mm512_add_epi16(values, values), values); }

// Which of four pulls a value's lowest five bits take, and with which sign.
alignas(64) constexpr std::array<std::int16_t, 32> pull_of = {0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                                              0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 2, 1};
alignas(64) constexpr std::array<std::int16_t, 32> sign_of = {0, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                                              0, 0,  0,  0,  0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1};

struct Avx512 {
  static constexpr std::size_t panels_max = 4;
  static constexpr std::size_t block_tokens = vector_block_tokens;

  static void take_contexts(std::int16_t* values, std::size_t count, ContextLists<const std::int16_t>& lists) {
    std::size_t i = 0;
    for (; i + 32 <= count; i += 32) {
      const Vector value = load64(values + i);
      const auto lanes = context_lanes(value);
      Vector digits = _mm512_mask_expand_epi16(_mm512_setzero_si512(), lanes[0], load64(lists[0]));
      digits = _mm512_mask_expand_epi16(digits, lanes[1], load64(lists[1]));
      digits = _mm512_mask_expand_epi16(digits, lanes[2], load64(lists[2]));
      for (std::size_t each = 0; each < tide_contexts; ++each) lists[each] += count_ones(lanes[each]);
      _mm512_storeu_si512(values + i, _mm512_add_epi16(thrice(value), negated_below(digits, value)));
    }
    kvtide::take_contexts(values + i, count - i, lists);
  }

  static void put_contexts(const std::int16_t* values, const std::int16_t* parents, std::size_t count,
                           ContextLists<std::int16_t>& lists) {
    std::size_t i = 0;
    for (; i + 32 <= count; i += 32) {
      const Vector parent = load64(parents + i);
      const Vector digits = negated_below(_mm512_sub_epi16(load64(values + i), thrice(parent)), parent);
      const auto lanes = context_lanes(parent);
      for (std::size_t each = 0; each < tide_contexts; ++each) {
        const int taken = count_ones(lanes[each]);
        // Compressing to memory is a hundred times slower than to a register on Zen 4.
        const auto leading = static_cast<__mmask32>((std::uint64_t{1} << taken) - 1);
        _mm512_mask_storeu_epi16(lists[each], leading, _mm512_maskz_compress_epi16(lanes[each], digits));
        lists[each] += taken;
      }
    }
    kvtide::put_contexts(values + i, parents + i, count - i, lists);
  }

  // A lane's index is the lowest five bits of its value, cut to -3 to 3. The least value has no magnitude, and no pull.
  static void pull_part(const std::int16_t* from, std::size_t count, const std::int8_t* pulls, std::int16_t* out) {
    std::uint64_t four = 0;
    for (std::size_t i = 4; i-- > 1;) four = four << 16 | static_cast<std::uint16_t>(pulls[i]);
    const Vector each = _mm512_set1_epi64(static_cast<std::int64_t>(four << 16));
    const Vector table = _mm512_mullo_epi16(_mm512_permutexvar_epi16(load64(pull_of.data()), each), load64(sign_of.data()));
    const Vector least = _mm512_set1_epi16(-32768), low = _mm512_set1_epi16(-3), high = _mm512_set1_epi16(3);
    std::size_t i = 0;
    for (; i + 32 <= count; i += 32) {
      const Vector value = load64(from + i);
      const Vector index = _mm512_min_epi16(_mm512_max_epi16(value, low), high);
      const Vector pull = _mm512_permutexvar_epi16(index, table);
      const __mmask32 has_magnitude = _mm512_cmpneq_epi16_mask(value, least);
      _mm512_storeu_si512(out + i, _mm512_maskz_add_epi16(has_magnitude, _mm512_slli_epi16(value, tide_step_bits), pull));
    }
    kvtide::pull_part(from + i, count - i, pulls, out + i);
  }

  static Words look_up(const Lookup& table, Words index) {
    return reinterpret_cast<Words>(_mm512_permutexvar_epi16(reinterpret_cast<Vector>(index), load64(table.data())));
  }

  template <std::size_t lists_count>
  static Words take_words(std::array<const std::int16_t*, lists_count>& lists, Words which) {
    Vector found = _mm512_setzero_si512();
    for (std::size_t i = 0; i < lists_count; ++i) {
      const __mmask32 lanes = _mm512_cmpeq_epi16_mask(reinterpret_cast<Vector>(which), _mm512_set1_epi16(static_cast<std::int16_t>(i)));
      found = _mm512_mask_expand_epi16(found, lanes, load64(lists[i]));
      lists[i] += count_ones(lanes);
    }
    return reinterpret_cast<Words>(found);
  }

  template <std::size_t lists_count>
  static void put_words(Words items, std::array<std::int16_t*, lists_count>& lists, Words which) {
    for (std::size_t i = 0; i < lists_count; ++i) {
      const __mmask32 lanes = _mm512_cmpeq_epi16_mask(reinterpret_cast<Vector>(which), _mm512_set1_epi16(static_cast<std::int16_t>(i)));
      const int taken = count_ones(lanes);
      const auto leading = static_cast<__mmask32>((std::uint64_t{1} << taken) - 1);
      _mm512_mask_storeu_epi16(lists[i], leading, _mm512_maskz_compress_epi16(lanes, reinterpret_cast<Vector>(items)));
      lists[i] += taken;
    }
  }

  static std::size_t count_words(Words which, std::size_t list) {
    const Vector number = _mm512_set1_epi16(static_cast<std::int16_t>(list));
    return static_cast<std::size_t>(count_ones(_mm512_cmpeq_epi16_mask(reinterpret_cast<Vector>(which), number)));
  }

  // Four tokens by up to 64 columns: sixteen sums hide the latency of a product.
  template <std::size_t panels>
  [[gnu::noinline]] static void multiply(const Tile& tile) {
    Vector sum[tide_panel_tokens][panels];
#pragma GCC unroll 4
    for (std::size_t t = 0; t < tide_panel_tokens; ++t) {
#pragma GCC unroll 4
      for (std::size_t p = 0; p < panels; ++p) sum[t][p] = _mm512_setzero_si512();
    }
    for (const std::size_t pair : tile.pairs) {
      Vector columns[panels];
#pragma GCC unroll 4
      for (std::size_t p = 0; p < panels; ++p) {
        columns[p] = load64(tile.columns + p * tile.panel_stride + pair * 2 * tide_panel_columns);
      }
#pragma GCC unroll 4
      for (std::size_t t = 0; t < tide_panel_tokens; ++t) {
        std::int32_t both;
        std::memcpy(&both, tile.tokens + 2 * (pair * tide_panel_tokens + t), sizeof both);
        const Vector token = _mm512_set1_epi32(both);
#pragma GCC unroll 4
        for (std::size_t p = 0; p < panels; ++p) sum[t][p] = _mm512_dpwssd_epi32(sum[t][p], token, columns[p]);
      }
    }
#pragma GCC unroll 4
    for (std::size_t t = 0; t < tide_panel_tokens; ++t) {
#pragma GCC unroll 4
      for (std::size_t p = 0; p < panels; ++p) {
        _mm512_storeu_si512(tile.sums + t * tile.sums_stride + p * tide_panel_columns, sum[t][p]);
      }
    }
  }

  static void transpose(const std::int16_t* const* from, std::size_t column, std::int16_t* const* to, std::size_t row) {
    transpose_by_8(from, column, to, row);
  }
};

inline bool has_avx512() {
#ifdef KVTIDE_SIMDE
  return true;
#else
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("popcnt");
#endif
}

}  // namespace
}  // namespace kvtide
