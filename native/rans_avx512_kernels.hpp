// rANS kernels for AVX-512 (F, BW, VL), included by the files that compile them with and without VBMI2.
//
// A state is held as two 16-bit halves, so that one vector holds all 32 lanes in order and one word permutation looks up
// a whole table. `Packing` moves words between lanes of a mask and consecutive memory, the one thing that VBMI2 does better.
#pragma once

#include "rans_driver.hpp"

namespace kvtide {
namespace {

using Vector = __m512i;

Vector load64(const void* from) { return _mm512_loadu_si512(from); }
Vector load64(const Row16& row) { return _mm512_loadu_si512(row.data()); }
Vector words_of(int value) { return _mm512_set1_epi16(static_cast<short>(value)); }
Vector look_up(const Row16& row, Vector indices) { return _mm512_permutexvar_epi16(indices, load64(row)); }
Vector low_half(Vector value) { return _mm512_and_si512(value, _mm512_set1_epi32(0xffff)); }
unsigned count_ones(std::uint32_t mask) { return static_cast<unsigned>(__builtin_popcount(mask)); }

template <class Packing>
struct Avx512 {
  static constexpr std::size_t decode_streams = 3;
  static constexpr std::size_t encode_streams = 2;

  struct Lanes {
    Vector high;
    Vector low;
  };
  struct EncodeLanes : Lanes {
    __mmask32 bad;
  };
  using Symbols = Vector;  // bits above the lowest five of each word mean nothing

  template <class Element>
  struct Values {
    Vector at[sizeof(Element) == 4 ? 2 : 1];

    Values() = default;
    explicit Values(const std::uint8_t* from) {
      if constexpr (sizeof(Element) == 1) {
        at[0] = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
      } else if constexpr (sizeof(Element) == 2) {
        at[0] = load64(from);
      } else {
        at[0] = load64(from);
        at[1] = load64(from + 64);
      }
    }

    void store(Symbols symbols, std::uint8_t* out) const {
      const Vector bytes = _mm512_permutexvar_epi16(symbols, at[0]);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi16_epi8(bytes));
    }

    void store(Symbols symbols, std::uint16_t* out) const { _mm512_storeu_si512(out, _mm512_permutexvar_epi16(symbols, at[0])); }

    void store(Symbols symbols, std::uint32_t* out) const {
      const Vector left = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(symbols));
      const Vector right = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(symbols, 1));
      _mm512_storeu_si512(out, _mm512_permutex2var_epi32(at[0], left, at[1]));
      _mm512_storeu_si512(out + 16, _mm512_permutex2var_epi32(at[0], right, at[1]));
    }
  };

  // Words of 32-bit lanes in order; packing works within 128-bit quarters, so the quarters are put right afterwards.
  static Vector join_quarters(Vector packed) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed);
  }

  static Lanes load(const std::uint8_t* from) {
    const Vector left = load64(from), right = load64(from + 64);
    return {join_quarters(_mm512_packus_epi32(_mm512_srli_epi32(left, 16), _mm512_srli_epi32(right, 16))),
            join_quarters(_mm512_packus_epi32(low_half(left), low_half(right)))};
  }

  static Symbols load_symbols(const std::uint8_t* from) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }

  static bool is_initial(const Lanes& lanes) {
    return (_mm512_cmpneq_epi16_mask(lanes.high, words_of(1)) | _mm512_test_epi16_mask(lanes.low, lanes.low)) == 0;
  }

  static std::uint32_t escapes(Symbols symbols) {
    return _mm512_cmpeq_epi16_mask(_mm512_and_si512(symbols, words_of(rans_escape)), words_of(rans_escape));
  }

  static Symbols step(Lanes& lanes, const RansDecodeTable& table, const std::uint8_t*& words) {
    return step_in<false>(lanes, table, words, 0);
  }

  static Symbols step_some(Lanes& lanes, const RansDecodeTable& table, const std::uint8_t*& words, std::size_t count) {
    return step_in<true>(lanes, table, words, (__mmask32{1} << count) - 1);
  }

  // If it is partial, lanes outside of `active` stay as they are.
  template <bool is_partial>
  [[gnu::always_inline]] static inline Symbols step_in(Lanes& lanes, const RansDecodeTable& table, const std::uint8_t*& words,
                                                       __mmask32 active) {
    const Vector buckets = _mm512_srli_epi16(lanes.low, 7);  // a word permutation takes the lowest five bits alone
    const Vector entries = look_up(table.bucket, buckets);
    // Bucket entries are split << 8 | alias: offset << 8 | 255 is no less just when the offset is at or past the split.
    const Vector probe = _mm512_or_si512(_mm512_and_si512(_mm512_slli_epi16(lanes.low, 8), words_of(0x7f00)), words_of(0xff));
    const __mmask32 is_alias = _mm512_cmpge_epu16_mask(probe, entries);
    const Vector symbols = _mm512_mask_mov_epi16(buckets, is_alias, entries);
    const Vector scaled = look_up(table.scaled, symbols);
    const Vector shift = _mm512_maskz_permutexvar_epi16(is_alias, buckets, load64(table.alias_offset));
    const Vector rank = _mm512_add_epi16(_mm512_and_si512(lanes.low, words_of(127)), shift);
    // frequency * (state >> 12) + rank in halves: scaled * high is the upper part, the four bits below it come from low.
    const Vector four_bits = _mm512_and_si512(lanes.low, words_of(0xf000));
    const Vector below = _mm512_add_epi16(_mm512_mulhi_epu16(scaled, four_bits), rank);
    const Vector low = _mm512_add_epi16(_mm512_mullo_epi16(scaled, lanes.high), below);
    const Vector upper = _mm512_mulhi_epu16(scaled, lanes.high);
    const Vector high = _mm512_mask_sub_epi16(upper, _mm512_cmplt_epu16_mask(low, below), upper, words_of(-1));
    __mmask32 is_short = _mm512_testn_epi16_mask(high, high);
    if constexpr (is_partial) is_short &= active;
    keep<is_partial>(lanes, active, _mm512_mask_mov_epi16(high, is_short, low), Packing::spread(low, is_short, words));
    words += 2 * count_ones(is_short);
    return symbols;
  }

  template <bool is_partial>
  static void keep(Lanes& lanes, __mmask32 active, Vector high, Vector low) {
    lanes.high = is_partial ? _mm512_mask_mov_epi16(lanes.high, active, high) : high;
    lanes.low = is_partial ? _mm512_mask_mov_epi16(lanes.low, active, low) : low;
  }

  static EncodeLanes initial() {
    EncodeLanes lanes;
    lanes.high = words_of(1);
    lanes.low = _mm512_setzero_si512();
    lanes.bad = 0;
    return lanes;
  }

  static void put(EncodeLanes& lanes, const RansEncodeTable& table, const std::uint8_t* from, std::uint8_t*& next) {
    put_in<false>(lanes, table, from, next, 0);
  }

  static void put(EncodeLanes& lanes, const RansEncodeTable& table, const std::uint8_t* from, std::uint8_t*& next,
                  std::size_t count) {
    put_in<true>(lanes, table, from, next, (__mmask32{1} << count) - 1);
  }

  // High halves of sixteen 32-bit products.
  static Vector multiply_high(Vector a, Vector b) {
    const Vector even = _mm512_srli_epi64(_mm512_mul_epu32(a, b), 32);
    const Vector odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
    return _mm512_mask_mov_epi32(even, 0xaaaa, odd);
  }

  // Slots of ranks beyond the symbol's own bucket: five-level search for the piece, in a heap.
  static Vector alias_slots(const RansEncodeTable& table, Vector positions) {
    Vector node = words_of(1);
    const Vector keys = load64(table.piece_key);
#pragma GCC unroll 5
    for (int level = 0; level < 5; ++level) {
      const __mmask32 is_beyond = _mm512_cmpgt_epi16_mask(_mm512_permutexvar_epi16(node, keys), positions);
      const Vector twice = _mm512_add_epi16(node, node);
      node = _mm512_mask_add_epi16(_mm512_sub_epi16(twice, words_of(-1)), is_beyond, twice, _mm512_setzero_si512());
    }
    return _mm512_add_epi16(positions, look_up(table.piece_offset, node));
  }

  template <bool is_partial>
  [[gnu::always_inline]] static inline void put_in(EncodeLanes& lanes, const RansEncodeTable& table, const std::uint8_t* from,
                                                   std::uint8_t*& next, __mmask32 active) {
    const Vector symbols = load_symbols(from);
    const Vector scaled = look_up(table.scaled, symbols);
    lanes.bad |= _mm512_cmpgt_epu16_mask(symbols, words_of(31)) | _mm512_testn_epi16_mask(scaled, scaled);
    __mmask32 is_full = _mm512_cmpge_epu16_mask(lanes.high, scaled);
    if constexpr (is_partial) is_full &= active;
    next -= 2 * count_ones(is_full);
    Packing::gather(lanes.low, is_full, next);
    const Vector low = _mm512_mask_mov_epi16(lanes.low, is_full, lanes.high);
    const Vector high = _mm512_mask_mov_epi16(lanes.high, is_full, _mm512_setzero_si512());
    const Vector reciprocal_low = look_up(table.reciprocal_low, symbols);
    const Vector reciprocal_high = look_up(table.reciprocal_high, symbols);
    const Vector left = multiply_high(_mm512_unpacklo_epi16(low, high), _mm512_unpacklo_epi16(reciprocal_low, reciprocal_high));
    const Vector right = multiply_high(_mm512_unpackhi_epi16(low, high), _mm512_unpackhi_epi16(reciprocal_low, reciprocal_high));
    Vector quotient_low = _mm512_packus_epi32(low_half(left), low_half(right));
    Vector quotient_high = _mm512_packus_epi32(_mm512_srli_epi32(left, 16), _mm512_srli_epi32(right, 16));
    const Vector frequency = _mm512_srli_epi16(scaled, 4);
    Vector rank = _mm512_sub_epi16(low, _mm512_mullo_epi16(quotient_low, frequency));
    // The estimate is the quotient or one less.
    const __mmask32 is_less = _mm512_cmpge_epu16_mask(rank, frequency);
    rank = _mm512_mask_sub_epi16(rank, is_less, rank, frequency);
    quotient_low = _mm512_mask_sub_epi16(quotient_low, is_less, quotient_low, words_of(-1));
    const __mmask32 carry = _mm512_mask_testn_epi16_mask(is_less, quotient_low, quotient_low);
    quotient_high = _mm512_mask_sub_epi16(quotient_high, carry, quotient_high, words_of(-1));
    const Vector slots = alias_slots(table, _mm512_add_epi16(rank, look_up(table.alias_base, symbols)));
    const Vector own = _mm512_add_epi16(_mm512_slli_epi16(symbols, 7), rank);
    const __mmask32 is_alias = _mm512_cmpge_epu16_mask(rank, look_up(table.split, symbols));
    const Vector slot = _mm512_mask_mov_epi16(own, is_alias, slots);
    const Vector upper = _mm512_or_si512(_mm512_srli_epi16(quotient_low, 4), _mm512_slli_epi16(quotient_high, 12));
    keep<is_partial>(lanes, active, upper, _mm512_or_si512(_mm512_slli_epi16(quotient_low, 12), slot));
  }

  static bool finish(const EncodeLanes& lanes, std::uint8_t* to) {
    for (int half = 0; half < 2; ++half) {
      const Vector low = half == 0 ? _mm512_cvtepu16_epi32(_mm512_castsi512_si256(lanes.low))
                                   : _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(lanes.low, 1));
      const Vector high = half == 0 ? _mm512_cvtepu16_epi32(_mm512_castsi512_si256(lanes.high))
                                    : _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(lanes.high, 1));
      _mm512_storeu_si512(to + 64 * half, _mm512_or_si512(_mm512_slli_epi32(high, 16), low));
    }
    return lanes.bad == 0;
  }
};

}  // namespace
}  // namespace kvtide
