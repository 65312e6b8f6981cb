// rANS kernels for AVX2. States are held as 16-bit halves, symbols as bytes, so that one byte shuffle looks up 32 lanes.
//
// Vector 0 holds lanes 0-7 and 16-23, vector 1 lanes 8-15 and 24-31: packing two vectors of words to bytes works within
// 128-bit halves, and so yields all lanes in order.
#include <immintrin.h>

#include "rans_driver.hpp"
#include "rans_paths.hpp"

namespace kvtide {
namespace {

using Vector = __m256i;

struct WordShuffles {
  // Row m spreads leading words over the lanes of mask m, or gathers the words of mask m at the end.
  alignas(16) std::uint8_t spread[256][16];
  alignas(16) std::uint8_t gather[256][16];

  constexpr WordShuffles() : spread{}, gather{} {
    for (int mask = 0; mask < 256; ++mask) {
      int count = 0;
      for (int lane = 0; lane < 8; ++lane) count += mask >> lane & 1;
      int rank = 0;
      for (int lane = 0; lane < 8; ++lane) {
        const bool is_set = mask >> lane & 1;
        for (int byte = 0; byte < 2; ++byte) {
          spread[mask][2 * lane + byte] = static_cast<std::uint8_t>(is_set ? 2 * rank + byte : 0x80);
          if (is_set) gather[mask][2 * (8 - count + rank) + byte] = static_cast<std::uint8_t>(2 * lane + byte);
        }
        rank += is_set;
      }
    }
  }
};

constexpr WordShuffles word_shuffles;

Vector load32(const void* from) { return _mm256_loadu_si256(static_cast<const Vector*>(from)); }
__m128i load16(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
void store16(void* to, __m128i value) { _mm_storeu_si128(static_cast<__m128i*>(to), value); }
Vector load_twice(const void* from) { return _mm256_broadcastsi128_si256(load16(from)); }
Vector load_halves(const void* low, const void* high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(load16(low)), load16(high), 1);
}
Vector words_of(int value) { return _mm256_set1_epi16(static_cast<short>(value)); }
Vector bytes_of(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }

// Looks up 32 bytes below 32 in a row of 32 bytes; `choice` has its top bits where the upper half of the row is meant.
Vector look_up(const std::uint8_t* row, Vector indices, Vector choice) {
  const Vector low = _mm256_shuffle_epi8(load_twice(row), indices);
  const Vector high = _mm256_shuffle_epi8(load_twice(row + 16), indices);
  return _mm256_blendv_epi8(low, high, choice);
}
Vector look_up(const Row8& row, Vector indices, Vector choice) { return look_up(row.data(), indices, choice); }
Vector choice_of(Vector indices) { return _mm256_slli_epi16(indices, 3); }

// 32 words in lane order of the two vectors.
struct Words {
  Vector at[2];
};
Words join_bytes(Vector low, Vector high) { return {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)}; }
Words look_up_words(const Row8& low, const Row8& high, Vector indices, Vector choice) {
  return join_bytes(look_up(low, indices, choice), look_up(high, indices, choice));
}

std::uint32_t mask_of(Vector first, Vector second) {
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_packs_epi16(first, second)));
}
unsigned count_ones(std::uint32_t mask) { return static_cast<unsigned>(__builtin_popcount(mask)); }

// All ones in the lanes below `count`.
Words first_lanes(std::size_t count) {
  const Vector lane0 = _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
  const Vector limit = words_of(static_cast<int>(count));
  return {_mm256_cmpgt_epi16(limit, lane0), _mm256_cmpgt_epi16(limit, _mm256_add_epi16(lane0, words_of(8)))};
}

struct Avx2 {
  static constexpr std::size_t decode_streams = 2;
  static constexpr std::size_t encode_streams = 1;

  struct Lanes {
    Vector high[2];
    Vector low[2];
  };
  struct EncodeLanes : Lanes {
    Vector bad;
  };
  using Symbols = Vector;

  template <class Element>
  struct Values {
    alignas(32) std::uint8_t planes[sizeof(Element)][rans_symbols];

    Values() = default;
    explicit Values(const std::uint8_t* from) {
      for (std::size_t i = 0; i < rans_symbols; ++i) {
        for (std::size_t plane = 0; plane < sizeof(Element); ++plane) planes[plane][i] = from[i * sizeof(Element) + plane];
      }
    }

    void store(Symbols symbols, std::uint8_t* out) const {
      _mm256_storeu_si256(reinterpret_cast<Vector*>(out), look_up(planes[0], symbols, choice_of(symbols)));
    }

    void store(Symbols symbols, std::uint16_t* out) const {
      const Vector choice = choice_of(symbols);
      const Words words = join_bytes(look_up(planes[0], symbols, choice), look_up(planes[1], symbols, choice));
      for (int i = 0; i < 2; ++i) {
        store16(out + 8 * i, _mm256_castsi256_si128(words.at[i]));
        store16(out + 8 * i + 16, _mm256_extracti128_si256(words.at[i], 1));
      }
    }

    void store(Symbols symbols, std::uint32_t* out) const {
      const Vector choice = choice_of(symbols);
      const Words low = join_bytes(look_up(planes[0], symbols, choice), look_up(planes[1], symbols, choice));
      const Words high = join_bytes(look_up(planes[2], symbols, choice), look_up(planes[3], symbols, choice));
      for (int i = 0; i < 2; ++i) {
        const Vector first = _mm256_unpacklo_epi16(low.at[i], high.at[i]);
        const Vector second = _mm256_unpackhi_epi16(low.at[i], high.at[i]);
        store16(out + 8 * i, _mm256_castsi256_si128(first));
        store16(out + 8 * i + 4, _mm256_castsi256_si128(second));
        store16(out + 8 * i + 16, _mm256_extracti128_si256(first, 1));
        store16(out + 8 * i + 20, _mm256_extracti128_si256(second, 1));
      }
    }
  };

  static Lanes load(const std::uint8_t* from) {
    Lanes lanes;
    for (int i = 0; i < 2; ++i) {
      const std::uint8_t* first = from + 32 * i;
      const Vector left = load_halves(first, first + 64), right = load_halves(first + 16, first + 80);
      const Vector low_bits = _mm256_set1_epi32(0xffff);
      lanes.low[i] = _mm256_packus_epi32(_mm256_and_si256(left, low_bits), _mm256_and_si256(right, low_bits));
      lanes.high[i] = _mm256_packus_epi32(_mm256_srli_epi32(left, 16), _mm256_srli_epi32(right, 16));
    }
    return lanes;
  }

  static Symbols load_symbols(const std::uint8_t* from) { return load32(from); }

  static bool is_initial(const Lanes& lanes) {
    const Vector off = _mm256_or_si256(_mm256_or_si256(_mm256_xor_si256(lanes.high[0], words_of(1)), lanes.low[0]),
                                       _mm256_or_si256(_mm256_xor_si256(lanes.high[1], words_of(1)), lanes.low[1]));
    return _mm256_testz_si256(off, off);
  }

  static std::uint32_t escapes(Symbols symbols) {
    return static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(symbols, bytes_of(rans_escape))));
  }

  static Symbols step(Lanes& lanes, const RansDecodeTable& table, const std::uint8_t*& words) {
    return step_in<false>(lanes, table, words, {});
  }

  static Symbols step_some(Lanes& lanes, const RansDecodeTable& table, const std::uint8_t*& words, std::size_t count) {
    return step_in<true>(lanes, table, words, first_lanes(count));
  }

  // Lanes outside of `active` stay as they are.
  template <bool is_partial>
  [[gnu::always_inline]] static inline Symbols step_in(Lanes& lanes, const RansDecodeTable& table, const std::uint8_t*& words,
                                                       Words active) {
    const Vector buckets = _mm256_packus_epi16(_mm256_and_si256(_mm256_srli_epi16(lanes.low[0], 7), words_of(31)),
                                               _mm256_and_si256(_mm256_srli_epi16(lanes.low[1], 7), words_of(31)));
    const Vector offsets = _mm256_packus_epi16(_mm256_and_si256(lanes.low[0], words_of(127)),
                                               _mm256_and_si256(lanes.low[1], words_of(127)));
    const Vector bucket_choice = choice_of(buckets);
    const Vector is_alias = _mm256_cmpgt_epi8(offsets, look_up(table.split_less_one, buckets, bucket_choice));
    const Vector symbols = _mm256_blendv_epi8(buckets, look_up(table.alias, buckets, bucket_choice), is_alias);
    const Words scaled = look_up_words(table.scaled_low, table.scaled_high, symbols, choice_of(symbols));
    const Words shift = join_bytes(_mm256_and_si256(is_alias, look_up(table.alias_offset_low, buckets, bucket_choice)),
                                   _mm256_and_si256(is_alias, look_up(table.alias_offset_high, buckets, bucket_choice)));
    Vector is_short[2];
    Lanes moved;
    for (int i = 0; i < 2; ++i) {
      const Vector rank = _mm256_add_epi16(_mm256_and_si256(lanes.low[i], words_of(127)), shift.at[i]);
      // frequency * (state >> 12) + rank in halves: scaled * high is the upper part, the four bits below it come from low.
      const Vector four_bits = _mm256_and_si256(lanes.low[i], words_of(0xf000));
      const Vector below = _mm256_add_epi16(_mm256_mulhi_epu16(scaled.at[i], four_bits), rank);
      moved.low[i] = _mm256_add_epi16(_mm256_mullo_epi16(scaled.at[i], lanes.high[i]), below);
      const Vector no_carry = _mm256_cmpeq_epi16(_mm256_min_epu16(moved.low[i], below), below);
      const Vector upper = _mm256_add_epi16(_mm256_mulhi_epu16(scaled.at[i], lanes.high[i]), words_of(1));
      moved.high[i] = _mm256_add_epi16(upper, no_carry);
      is_short[i] = _mm256_cmpeq_epi16(moved.high[i], _mm256_setzero_si256());
      if constexpr (is_partial) is_short[i] = _mm256_and_si256(is_short[i], active.at[i]);
    }
    const std::uint32_t mask = mask_of(is_short[0], is_short[1]);
    const std::uint8_t* second = words + 2 * count_ones(mask & 0xff);
    const std::uint8_t* third = words + 2 * count_ones(mask & 0xffff);
    const std::uint8_t* fourth = words + 2 * count_ones(mask & 0xffffff);
    const auto& spread = word_shuffles.spread;
    const Vector taken[2] = {
        _mm256_shuffle_epi8(load_halves(words, third), load_halves(spread[mask & 0xff], spread[mask >> 16 & 0xff])),
        _mm256_shuffle_epi8(load_halves(second, fourth), load_halves(spread[mask >> 8 & 0xff], spread[mask >> 24]))};
    words += 2 * count_ones(mask);
    for (int i = 0; i < 2; ++i) {
      const Vector high = _mm256_blendv_epi8(moved.high[i], moved.low[i], is_short[i]);
      const Vector low = _mm256_blendv_epi8(moved.low[i], taken[i], is_short[i]);
      lanes.high[i] = is_partial ? _mm256_blendv_epi8(lanes.high[i], high, active.at[i]) : high;
      lanes.low[i] = is_partial ? _mm256_blendv_epi8(lanes.low[i], low, active.at[i]) : low;
    }
    return symbols;
  }

  static EncodeLanes initial() {
    EncodeLanes lanes;
    lanes.high[0] = lanes.high[1] = words_of(1);
    lanes.low[0] = lanes.low[1] = lanes.bad = _mm256_setzero_si256();
    return lanes;
  }

  static void put(EncodeLanes& lanes, const RansEncodeTable& table, const std::uint8_t* from, std::uint8_t*& next) {
    put_in<false>(lanes, table, from, next, {});
  }

  static void put(EncodeLanes& lanes, const RansEncodeTable& table, const std::uint8_t* from, std::uint8_t*& next,
                  std::size_t count) {
    put_in<true>(lanes, table, from, next, first_lanes(count));
  }

  // Drops the low words of lanes in `is_full` in front of `next`, in lane order.
  [[gnu::always_inline]] static inline void drop_words(Lanes& lanes, const Vector* is_full, std::uint8_t*& next) {
    const std::uint32_t mask = mask_of(is_full[0], is_full[1]);
    const auto& gather = word_shuffles.gather;
    const Vector packed[2] = {
        _mm256_shuffle_epi8(lanes.low[0], load_halves(gather[mask & 0xff], gather[mask >> 16 & 0xff])),
        _mm256_shuffle_epi8(lanes.low[1], load_halves(gather[mask >> 8 & 0xff], gather[mask >> 24]))};
    // Each store ends where the later lanes' words begin; what it writes before its own words is written over next.
    store16(next - 16, _mm256_extracti128_si256(packed[1], 1));
    store16(next - 2 * count_ones(mask >> 24) - 16, _mm256_extracti128_si256(packed[0], 1));
    store16(next - 2 * count_ones(mask >> 16) - 16, _mm256_castsi256_si128(packed[1]));
    store16(next - 2 * count_ones(mask >> 8) - 16, _mm256_castsi256_si128(packed[0]));
    next -= 2 * count_ones(mask);
    for (int i = 0; i < 2; ++i) {
      lanes.low[i] = _mm256_blendv_epi8(lanes.low[i], lanes.high[i], is_full[i]);
      lanes.high[i] = _mm256_andnot_si256(is_full[i], lanes.high[i]);
    }
  }

  // High halves of eight 32-bit products.
  static Vector multiply_high(Vector a, Vector b) {
    const Vector even = _mm256_srli_epi64(_mm256_mul_epu32(a, b), 32);
    const Vector odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
    return _mm256_blend_epi32(even, odd, 0xaa);
  }

  // Piece that holds each position, by five-level search in a heap; lanes as bytes.
  [[gnu::always_inline]] static inline Vector find_pieces(const RansEncodeTable& table, const Words& positions) {
    const Vector root = words_of(table.piece_key[1]);
    // 2 * node + 1, less one where the key lies beyond the position.
    Vector node = _mm256_add_epi8(bytes_of(3), _mm256_packs_epi16(_mm256_cmpgt_epi16(root, positions.at[0]),
                                                                  _mm256_cmpgt_epi16(root, positions.at[1])));
#pragma GCC unroll 4
    for (int level = 1; level < 5; ++level) {
      const int half = level == 4 ? 16 : 0;
      const Words keys = join_bytes(_mm256_shuffle_epi8(load_twice(table.piece_key_low.data() + half), node),
                                    _mm256_shuffle_epi8(load_twice(table.piece_key_high.data() + half), node));
      const Vector beyond = _mm256_packs_epi16(_mm256_cmpgt_epi16(keys.at[0], positions.at[0]),
                                               _mm256_cmpgt_epi16(keys.at[1], positions.at[1]));
      node = _mm256_add_epi8(_mm256_sub_epi8(_mm256_add_epi8(node, node), bytes_of(-1)), beyond);
    }
    return _mm256_and_si256(node, bytes_of(31));
  }

  // States divided by the frequencies of their symbols.
  struct Division {
    Words rank, quotient_low, quotient_high;
  };

  [[gnu::always_inline]] static inline Division divide(const Lanes& lanes, const RansEncodeTable& table,
      Vector symbols, Vector choice,
                                                       const Words& scaled) {
    const Words reciprocal_low = look_up_words(table.reciprocal_0, table.reciprocal_1, symbols, choice);
    const Words reciprocal_high = look_up_words(table.reciprocal_2, table.reciprocal_3, symbols, choice);
    Division made;
    for (int i = 0; i < 2; ++i) {
      const Vector left = multiply_high(_mm256_unpacklo_epi16(lanes.low[i], lanes.high[i]),
                                        _mm256_unpacklo_epi16(reciprocal_low.at[i], reciprocal_high.at[i]));
      const Vector right = multiply_high(_mm256_unpackhi_epi16(lanes.low[i], lanes.high[i]),
                                         _mm256_unpackhi_epi16(reciprocal_low.at[i], reciprocal_high.at[i]));
      const Vector low_bits = _mm256_set1_epi32(0xffff);
      const Vector low = _mm256_packus_epi32(_mm256_and_si256(left, low_bits), _mm256_and_si256(right, low_bits));
      const Vector high = _mm256_packus_epi32(_mm256_srli_epi32(left, 16), _mm256_srli_epi32(right, 16));
      const Vector frequency = _mm256_srli_epi16(scaled.at[i], 4);
      const Vector remainder = _mm256_sub_epi16(lanes.low[i], _mm256_mullo_epi16(low, frequency));
      // The estimate is the quotient or one less.
      const Vector is_right = _mm256_cmpgt_epi16(frequency, remainder);
      made.rank.at[i] = _mm256_sub_epi16(remainder, _mm256_andnot_si256(is_right, frequency));
      made.quotient_low.at[i] = _mm256_add_epi16(_mm256_add_epi16(low, words_of(1)), is_right);
      const Vector carry = _mm256_andnot_si256(is_right, _mm256_cmpeq_epi16(made.quotient_low.at[i], _mm256_setzero_si256()));
      made.quotient_high.at[i] = _mm256_sub_epi16(high, carry);
    }
    return made;
  }

  template <bool is_partial>
  [[gnu::always_inline]] static inline void put_in(EncodeLanes& kept, const RansEncodeTable& table, const std::uint8_t* from,
                                                   std::uint8_t*& next, Words active) {
    EncodeLanes lanes = kept;
    const Vector symbols = load32(from);
    const Vector choice = choice_of(symbols);
    const Words scaled = look_up_words(table.scaled_low, table.scaled_high, symbols, choice);
    lanes.bad = _mm256_or_si256(lanes.bad, _mm256_andnot_si256(bytes_of(31), symbols));
    Vector is_full[2];
    for (int i = 0; i < 2; ++i) {
      lanes.bad = _mm256_or_si256(lanes.bad, _mm256_cmpeq_epi16(scaled.at[i], _mm256_setzero_si256()));
      const Vector most = _mm256_max_epu16(lanes.high[i], scaled.at[i]);
      is_full[i] = _mm256_cmpeq_epi16(most, lanes.high[i]);
      if constexpr (is_partial) is_full[i] = _mm256_and_si256(is_full[i], active.at[i]);
    }
    drop_words(lanes, is_full, next);
    const Words alias_base = look_up_words(table.alias_base_low, table.alias_base_high, symbols, choice);
    const Words split_less_one = [&] {
      const Vector split = look_up(table.split_less_one, symbols, choice);
      return Words{_mm256_srai_epi16(_mm256_unpacklo_epi8(split, split), 8),
          _mm256_srai_epi16(_mm256_unpackhi_epi8(split, split), 8)};
    }();
    const Division made = divide(lanes, table, symbols, choice, scaled);
    const Words& rank = made.rank;
    const Words position = {_mm256_add_epi16(rank.at[0], alias_base.at[0]), _mm256_add_epi16(rank.at[1], alias_base.at[1])};
    const Vector pieces = find_pieces(table, position);
    const Words piece_offset = look_up_words(table.piece_offset_low, table.piece_offset_high, pieces, choice_of(pieces));
    const Words bucket = join_bytes(_mm256_setzero_si256(), symbols);
    for (int i = 0; i < 2; ++i) {
      const Vector is_alias = _mm256_cmpgt_epi16(rank.at[i], split_less_one.at[i]);
      const Vector own = _mm256_add_epi16(_mm256_srli_epi16(bucket.at[i], 1), rank.at[i]);
      const Vector slot = _mm256_blendv_epi8(own, _mm256_add_epi16(position.at[i], piece_offset.at[i]), is_alias);
      const Vector low = _mm256_or_si256(_mm256_slli_epi16(made.quotient_low.at[i], 12), slot);
      const Vector high = _mm256_or_si256(_mm256_srli_epi16(made.quotient_low.at[i], 4),
          _mm256_slli_epi16(made.quotient_high.at[i], 12));
      kept.low[i] = is_partial ? _mm256_blendv_epi8(kept.low[i], low, active.at[i]) : low;
      kept.high[i] = is_partial ? _mm256_blendv_epi8(kept.high[i], high, active.at[i]) : high;
    }
    kept.bad = lanes.bad;
  }

  static bool finish(const EncodeLanes& lanes, std::uint8_t* to) {
    for (int i = 0; i < 2; ++i) {
      const Vector left = _mm256_unpacklo_epi16(lanes.low[i], lanes.high[i]);
      const Vector right = _mm256_unpackhi_epi16(lanes.low[i], lanes.high[i]);
      store16(to + 32 * i, _mm256_castsi256_si128(left));
      store16(to + 32 * i + 16, _mm256_castsi256_si128(right));
      store16(to + 32 * i + 64, _mm256_extracti128_si256(left, 1));
      store16(to + 32 * i + 80, _mm256_extracti128_si256(right, 1));
    }
    return _mm256_testz_si256(lanes.bad, lanes.bad);
  }
};

}  // namespace

const RansPath rans_avx2 = {
    "avx2", [] { return static_cast<bool>(__builtin_cpu_supports("avx2")) && __builtin_cpu_supports("popcnt"); },
        decode_with<Avx2>,
    encode_with<Avx2>, map_with<Avx2>};

}  // namespace kvtide
