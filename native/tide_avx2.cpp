// The tide kernels for AVX2.
#include <immintrin.h>

#include "tide_lists.hpp"
#include "tide_transform.hpp"

namespace kvtide {
namespace {

using Vector = __m256i;

Vector load32(const void* from) { return _mm256_loadu_si256(static_cast<const Vector*>(from)); }

Vector spread32(const std::int16_t* pair) {
  std::int32_t both;
  std::memcpy(&both, pair, sizeof both);
  return _mm256_set1_epi32(both);
}

// Row m spreads leading words over the lanes of mask m.
struct WordSpread {
  alignas(16) std::uint8_t row[256][16];

  constexpr WordSpread() : row{} {
    for (int mask = 0; mask < 256; ++mask) {
      int rank = 0;
      for (int lane = 0; lane < 8; ++lane) {
        const bool is_set = mask >> lane & 1;
        for (int byte = 0; byte < 2; ++byte) {
          row[mask][2 * lane + byte] = static_cast<std::uint8_t>(is_set ? 2 * rank + byte : 0x80);
        }
        rank += is_set;
      }
    }
  }
};

constexpr WordSpread word_spread;

// Takes the next words of a list into the lanes of a comparison's result.
__m128i take_lanes(__m128i lanes, const std::int16_t*& list) {
  const auto mask = static_cast<unsigned>(_mm_movemask_epi8(_mm_packs_epi16(lanes, _mm_setzero_si128()))) & 255u;
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(list));
  list += __builtin_popcount(mask);
  return _mm_shuffle_epi8(words, _mm_load_si128(reinterpret_cast<const __m128i*>(word_spread.row[mask])));
}

void take_contexts_by_8(std::int16_t* values, std::size_t count, ContextLists& lists) {
  const __m128i zero = _mm_setzero_si128(), one = _mm_set1_epi16(1);
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values + i));
    const __m128i magnitude = _mm_abs_epi16(value);
    const __m128i is_zero = _mm_cmpeq_epi16(magnitude, zero), is_one = _mm_cmpeq_epi16(magnitude, one);
    const __m128i is_more = _mm_cmpgt_epi16(magnitude, one);
    const __m128i still = take_lanes(is_zero, lists[0]);
    const __m128i folded = _mm_or_si128(take_lanes(is_one, lists[1]), take_lanes(is_more, lists[2]));
    const __m128i digit = _mm_or_si128(still, _mm_sign_epi16(folded, value));
    const __m128i thrice = _mm_add_epi16(_mm_add_epi16(value, value), value);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values + i), _mm_add_epi16(thrice, digit));
  }
  take_contexts(values + i, count - i, lists);
}

bool take(const TideRows& rows, const TideLists<const std::int16_t>& lists) {
  return take_rows(rows, lists, take_contexts_by_8);
}

// Eight sums, two columns, a token and a product fit the sixteen registers; wider panels spill, as do sums within another
// function.
[[gnu::noinline]] void multiply(const std::int16_t* tokens, const std::int16_t* columns, std::span<const std::uint32_t> pairs,
                                std::int32_t* sums) {
  Vector sum[tide_panel_tokens][2];
#pragma GCC unroll 4
  for (std::size_t t = 0; t < tide_panel_tokens; ++t) sum[t][0] = sum[t][1] = _mm256_setzero_si256();
  for (const std::size_t pair : pairs) {
    const std::int16_t* from = columns + pair * 2 * tide_panel_columns;
    const Vector left = load32(from), right = load32(from + 16);
#pragma GCC unroll 4
    for (std::size_t t = 0; t < tide_panel_tokens; ++t) {
      const Vector token = spread32(tokens + 2 * (pair * tide_panel_tokens + t));
      sum[t][0] = _mm256_add_epi32(sum[t][0], _mm256_madd_epi16(token, left));
      sum[t][1] = _mm256_add_epi32(sum[t][1], _mm256_madd_epi16(token, right));
    }
  }
#pragma GCC unroll 4
  for (std::size_t t = 0; t < tide_panel_tokens; ++t) {
    _mm256_storeu_si256(reinterpret_cast<Vector*>(sums + t * tide_panel_columns), sum[t][0]);
    _mm256_storeu_si256(reinterpret_cast<Vector*>(sums + t * tide_panel_columns + 8), sum[t][1]);
  }
}

}  // namespace

const TidePath tide_avx2 = {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt"); }, take,
                            put_rows, project_block<multiply>, restore_block<multiply>};

}  // namespace kvtide
