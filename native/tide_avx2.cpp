// The tide kernels for AVX2.
#include <immintrin.h>

#include "tide_kernels.hpp"
#include "tide_sse2.hpp"

namespace kvtide {
namespace {

using Vector = __m256i;

Vector load32(const void* from) { return _mm256_loadu_si256(static_cast<const Vector*>(from)); }

Vector spread32(const std::int16_t* pair) {
  std::int32_t both;
  std::memcpy(&both, pair, sizeof both);
  return _mm256_set1_epi32(both);
}

// Row m of `spread` moves leading words to the lanes of mask m, row m of `gather` the other way.
struct WordMoves {
  alignas(16) std::uint8_t spread[256][16], gather[256][16];

  constexpr WordMoves() : spread{}, gather{} {
    for (int mask = 0; mask < 256; ++mask) {
      int rank = 0;
      for (int lane = 0; lane < 8; ++lane) {
        const bool is_set = mask >> lane & 1;
        for (int byte = 0; byte < 2; ++byte) {
          spread[mask][2 * lane + byte] = static_cast<std::uint8_t>(is_set ? 2 * rank + byte : 0x80);
          if (is_set) gather[mask][2 * rank + byte] = static_cast<std::uint8_t>(2 * lane + byte);
        }
        rank += is_set;
      }
    }
  }
};

constexpr WordMoves moves;

__m128i load8(const std::int16_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
void store8(std::int16_t* to, __m128i words) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), words); }

unsigned mask_of(__m128i lanes) {
  return static_cast<unsigned>(_mm_movemask_epi8(_mm_packs_epi16(lanes, _mm_setzero_si128()))) & 255u;
}

// Lanes whose values have a digit in each of the three lists.
struct ContextLanes {
  __m128i is_zero, is_one, is_more;
};

ContextLanes context_lanes(__m128i value) {
  const __m128i zero = _mm_setzero_si128();
  const __m128i is_zero = _mm_cmpeq_epi16(value, zero), is_one = _mm_cmpeq_epi16(_mm_abs_epi16(value), _mm_set1_epi16(1));
  return {is_zero, is_one, _mm_cmpeq_epi16(_mm_or_si128(is_zero, is_one), zero)};  // -32768 has no magnitude of 16 bits
}

// Takes the next words of a list into the lanes of a comparison's result.
__m128i take_lanes(__m128i lanes, const std::int16_t*& list) {
  const unsigned mask = mask_of(lanes);
  const __m128i words = load8(list);
  list += __builtin_popcount(mask);
  return _mm_shuffle_epi8(words, _mm_load_si128(reinterpret_cast<const __m128i*>(moves.spread[mask])));
}

// Appends the words in the lanes of a comparison's result; eight are written.
void put_lanes(__m128i words, __m128i lanes, std::int16_t*& list) {
  const unsigned mask = mask_of(lanes);
  store8(list, _mm_shuffle_epi8(words, _mm_load_si128(reinterpret_cast<const __m128i*>(moves.gather[mask]))));
  list += __builtin_popcount(mask);
}

struct Avx2 : LaneByLane {
  static constexpr std::size_t panels_max = 1;
  static constexpr std::size_t block_tokens = vector_block_tokens;

  static void take_contexts(std::int16_t* values, std::size_t count, ContextLists<const std::int16_t>& lists) {
    std::size_t i = 0;
    for (; i + 8 <= count; i += 8) {
      const __m128i value = load8(values + i);
      const ContextLanes lanes = context_lanes(value);
      const __m128i still = take_lanes(lanes.is_zero, lists[0]);
      const __m128i folded = _mm_or_si128(take_lanes(lanes.is_one, lists[1]), take_lanes(lanes.is_more, lists[2]));
      const __m128i digit = _mm_or_si128(still, _mm_sign_epi16(folded, value));
      store8(values + i, _mm_add_epi16(_mm_add_epi16(_mm_add_epi16(value, value), value), digit));
    }
    kvtide::take_contexts(values + i, count - i, lists);
  }

  // Lists stand one behind the other: what is behind a list's end here must not be touched, so a part's digits are put together
  // aside.
  static void put_contexts(const std::int16_t* values, const std::int16_t* parents, std::size_t count,
                           ContextLists<std::int16_t>& lists) {
    constexpr std::size_t chunk = 256;
    std::int16_t aside[tide_contexts][chunk + 8];
    for (std::size_t first = 0; first < count; first += chunk) {
      const std::size_t stop = std::min(count, first + chunk);
      ContextLists<std::int16_t> next = {aside[0], aside[1], aside[2]};
      std::size_t i = first;
      for (; i + 8 <= stop; i += 8) {
        const __m128i parent = load8(parents + i);
        const __m128i thrice = _mm_add_epi16(_mm_add_epi16(parent, parent), parent);
        const __m128i digit = _mm_sub_epi16(load8(values + i), thrice);
        const ContextLanes lanes = context_lanes(parent);
        const __m128i folded = _mm_sign_epi16(digit, parent);
        put_lanes(digit, lanes.is_zero, next[0]);
        put_lanes(folded, lanes.is_one, next[1]);
        put_lanes(folded, lanes.is_more, next[2]);
      }
      kvtide::put_contexts(values + i, parents + i, stop - i, next);
      for (std::size_t each = 0; each < tide_contexts; ++each) lists[each] = std::copy(aside[each], next[each], lists[each]);
    }
  }

  static void pull_part(const std::int16_t* from, std::size_t count, const std::int8_t* pulls, std::int16_t* out) {
    kvtide::pull_part(from, count, pulls, out);
  }

  // Bytes are looked up in tables of 16: low and high halves of the first 16 entries, then of the others.
  static Words look_up(const Lookup& table, Words index) {
    const __m128i byte = _mm_set1_epi16(255);
    Vector halves[2][2];
    for (std::size_t which = 0; which < 2; ++which) {
      const __m128i left = load8(table.data() + 16 * which), right = load8(table.data() + 16 * which + 8);
      const __m128i low = _mm_packus_epi16(_mm_and_si128(left, byte), _mm_and_si128(right, byte));
      const __m128i high = _mm_packus_epi16(_mm_srli_epi16(left, 8), _mm_srli_epi16(right, 8));
      halves[which][0] = _mm256_broadcastsi128_si256(low);
      halves[which][1] = _mm256_broadcastsi128_si256(high);
    }
    const Vector at = reinterpret_cast<Vector>(index), low_bytes = _mm256_set1_epi16(255);
    const Vector within = _mm256_and_si256(at, _mm256_set1_epi16(15));
    const Vector both = _mm256_or_si256(within, _mm256_slli_epi16(within, 8));
    const auto found = [&](std::size_t which) {
      return _mm256_blendv_epi8(_mm256_shuffle_epi8(halves[which][1], both), _mm256_shuffle_epi8(halves[which][0], both), low_bytes);
    };
    return reinterpret_cast<Words>(_mm256_blendv_epi8(found(0), found(1), _mm256_cmpgt_epi16(at, _mm256_set1_epi16(15))));
  }

  // Eight sums, two columns, a token and a product fit the sixteen registers; wider panels spill, as do sums within another
  // function.
  template <std::size_t panels>
  [[gnu::noinline]] static void multiply(const Tile& tile) {
    static_assert(panels == 1);
    Vector sum[tide_panel_tokens][2];
#pragma GCC unroll 4
    for (std::size_t t = 0; t < tide_panel_tokens; ++t) sum[t][0] = sum[t][1] = _mm256_setzero_si256();
    for (const std::size_t pair : tile.pairs) {
      const std::int16_t* from = tile.columns + pair * 2 * tide_panel_columns;
      const Vector left = load32(from), right = load32(from + 16);
#pragma GCC unroll 4
      for (std::size_t t = 0; t < tide_panel_tokens; ++t) {
        const Vector token = spread32(tile.tokens + 2 * (pair * tide_panel_tokens + t));
        sum[t][0] = _mm256_add_epi32(sum[t][0], _mm256_madd_epi16(token, left));
        sum[t][1] = _mm256_add_epi32(sum[t][1], _mm256_madd_epi16(token, right));
      }
    }
#pragma GCC unroll 4
    for (std::size_t t = 0; t < tide_panel_tokens; ++t) {
      _mm256_storeu_si256(reinterpret_cast<Vector*>(tile.sums + t * tile.sums_stride), sum[t][0]);
      _mm256_storeu_si256(reinterpret_cast<Vector*>(tile.sums + t * tile.sums_stride + 8), sum[t][1]);
    }
  }

  static void transpose(const std::int16_t* const* from, std::size_t column, std::int16_t* const* to, std::size_t row) {
    transpose_by_8(from, column, to, row);
  }
};

}  // namespace

const TidePath tide_avx2 =
    tide_path<Avx2>("avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt"); });

}  // namespace kvtide
