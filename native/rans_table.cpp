// Builds rANS tables from counts with integers alone; docs/codec.md states the rules so that anybody can do the same.
#include <algorithm>
#include <numeric>

#include "rans.hpp"

namespace kvtide {
namespace {

constexpr std::size_t none = rans_symbols;
// Beyond every position in alias order, and positive as a signed number.
constexpr std::uint16_t position_end = 0x7fff;

std::uint16_t to_u16(std::uint64_t value) { return static_cast<std::uint16_t>(value); }
std::uint8_t to_u8(std::uint64_t value) { return static_cast<std::uint8_t>(value); }

// Index of the symbol whose count per next half step is largest: Sainte-Lague's divisors 2f + 1.
std::size_t most_wanting(Counts counts, const Frequencies& frequencies) {
  std::size_t best = none;
  for (std::size_t i = 0; i < rans_symbols; ++i) {
    if (counts[i] == 0) continue;
    if (best == none || counts[i] * (2u * frequencies[best] + 1u) > counts[best] * (2u * frequencies[i] + 1u)) best = i;
  }
  return best;
}

std::size_t least_losing(Counts counts, const Frequencies& frequencies) {
  std::size_t best = none;
  for (std::size_t i = 0; i < rans_symbols; ++i) {
    if (frequencies[i] < 2) continue;
    if (best == none || counts[i] * (2u * frequencies[best] - 1u) < counts[best] * (2u * frequencies[i] - 1u)) best = i;
  }
  return best;
}

// Buckets of rans_bucket_slots slots: bucket i begins with split[i] slots of symbol i, the others are alias[i]'s.
struct Buckets {
  Row16 split;
  Row8 alias;
};

Buckets fill_buckets(const Frequencies& frequencies) {
  Buckets buckets;
  buckets.split = frequencies;
  for (std::size_t i = 0; i < rans_symbols; ++i) buckets.alias[i] = to_u8(i);
  Row16& left = buckets.split;
  const auto next_donor = [&](std::size_t from) {
    while (from < rans_symbols && frequencies[from] <= rans_bucket_slots) ++from;
    return from;
  };
  std::size_t donor = next_donor(0);
  const auto fill = [&](std::size_t bucket) {
    buckets.alias[bucket] = to_u8(donor);
    left[donor] = to_u16(left[donor] - (rans_bucket_slots - left[bucket]));
  };
  for (std::size_t i = 0; i < rans_symbols; ++i) {
    if (frequencies[i] >= rans_bucket_slots) continue;
    while (left[donor] == rans_bucket_slots) donor = next_donor(donor + 1);
    fill(i);
    while (left[donor] < rans_bucket_slots) {
      const std::size_t short_donor = donor;
      donor = next_donor(donor + 1);
      fill(short_donor);
    }
  }
  return buckets;
}

// Node k of a heap over 32 pieces holds the first position of the piece at which the search turns right.
void lay_heap(const Row16& piece_starts, Row16& keys) {
  keys[0] = 0;
  for (std::size_t level_nodes = 1; level_nodes < rans_symbols; level_nodes *= 2) {
    const std::size_t stride = rans_symbols / level_nodes;
    for (std::size_t k = 0; k < level_nodes; ++k) keys[level_nodes + k] = piece_starts[k * stride + stride / 2];
  }
}

void lay_alias_order(const Buckets& buckets, RansTable& table) {
  Row16 piece_starts;
  piece_starts.fill(position_end);
  table.encode.piece_offset.fill(0);
  std::size_t pieces = 0;
  std::uint32_t position = 0;
  for (std::size_t symbol = 0; symbol < rans_symbols; ++symbol) {
    std::uint32_t rank = buckets.split[symbol];
    table.encode.alias_base[symbol] = to_u16(position - rank);
    for (std::size_t bucket = 0; bucket < rans_symbols; ++bucket) {
      const std::uint32_t split = buckets.split[bucket];
      if (buckets.alias[bucket] != symbol || split == rans_bucket_slots) continue;
      piece_starts[pieces] = to_u16(position);
      table.encode.piece_offset[pieces] = to_u16(bucket * rans_bucket_slots + split - position);
      table.decode.alias_offset[bucket] = to_u16(rank - split);
      ++pieces;
      rank += rans_bucket_slots - split;
      position += rans_bucket_slots - split;
    }
  }
  lay_heap(piece_starts, table.encode.piece_key);
}

void split_bytes(const Row16& row, Row8& low, Row8& high) {
  for (std::size_t i = 0; i < rans_symbols; ++i) {
    low[i] = to_u8(row[i]);
    high[i] = to_u8(row[i] >> 8);
  }
}

void lay_packed(const Frequencies& frequencies, RansDecodeTable& decode) {
  const auto pack = [&](std::uint32_t symbol, std::uint32_t bias) {
    return static_cast<std::uint32_t>(frequencies[symbol]) << 20 | bias % rans_total << 8 | symbol;
  };
  for (std::uint32_t i = 0; i < rans_symbols; ++i) {
    const std::uint32_t own_bias = 0u - i * rans_bucket_slots;
    decode.packed[2 * i] = pack(i, own_bias);
    decode.packed[2 * i + 1] = pack(decode.bucket[i] & 0xff, own_bias + decode.alias_offset[i]);
  }
}

void lay_byte_planes(RansTable& table) {
  RansDecodeTable& decode = table.decode;
  RansEncodeTable& encode = table.encode;
  for (std::size_t i = 0; i < rans_symbols; ++i) {
    decode.split_less_one[i] = to_u8((decode.bucket[i] >> 8) - 1);
    decode.alias[i] = to_u8(decode.bucket[i]);
  }
  encode.split_less_one = decode.split_less_one;
  split_bytes(decode.alias_offset, decode.alias_offset_low, decode.alias_offset_high);
  split_bytes(decode.scaled, decode.scaled_low, decode.scaled_high);
  split_bytes(encode.scaled, encode.scaled_low, encode.scaled_high);
  split_bytes(encode.alias_base, encode.alias_base_low, encode.alias_base_high);
  split_bytes(encode.piece_key, encode.piece_key_low, encode.piece_key_high);
  split_bytes(encode.piece_offset, encode.piece_offset_low, encode.piece_offset_high);
  split_bytes(encode.reciprocal_low, encode.reciprocal_0, encode.reciprocal_1);
  split_bytes(encode.reciprocal_high, encode.reciprocal_2, encode.reciprocal_3);
}

}  // namespace

bool rans_quantise(Counts counts, Frequencies& frequencies) {
  std::uint64_t total = 0;
  std::size_t used = 0, last = 0;
  for (std::size_t i = 0; i < rans_symbols; ++i) {
    if (counts[i] >= counts_max) return false;
    total += counts[i];
    if (counts[i] == 0) continue;
    ++used;
    last = i;
  }
  if (total == 0 || total >= counts_max) return false;
  frequencies.fill(0);
  if (used == 1) {
    frequencies[last] = rans_total - 1;
    frequencies[last == 0 ? 1 : 0] = 1;
    return true;
  }
  std::uint32_t sum = 0;
  for (std::size_t i = 0; i < rans_symbols; ++i) {
    if (counts[i] == 0) continue;
    frequencies[i] = to_u16(std::max<std::uint64_t>(1, counts[i] * rans_total / total));
    sum += frequencies[i];
  }
  for (; sum < rans_total; ++sum) ++frequencies[most_wanting(counts, frequencies)];
  for (; sum > rans_total; --sum) --frequencies[least_losing(counts, frequencies)];
  return true;
}

bool rans_build(const Frequencies& frequencies, RansTable& table) {
  const auto sum = std::accumulate(frequencies.begin(), frequencies.end(), std::uint32_t{0});
  if (sum != rans_total || *std::max_element(frequencies.begin(), frequencies.end()) == rans_total) return false;
  const Buckets buckets = fill_buckets(frequencies);
  table.decode.alias_offset.fill(0);
  for (std::size_t i = 0; i < rans_symbols; ++i) {
    const std::uint32_t frequency = frequencies[i];
    table.decode.bucket[i] = to_u16(buckets.split[i] << 8 | buckets.alias[i]);
    table.decode.scaled[i] = table.encode.scaled[i] = to_u16(frequency << 4);
    table.encode.split[i] = buckets.split[i];
    const std::uint64_t reciprocal =
        frequency == 0 ? 0 : std::min<std::uint64_t>((std::uint64_t{1} << 32) / frequency, 0xffffffff);
    table.encode.reciprocal_low[i] = to_u16(reciprocal);
    table.encode.reciprocal_high[i] = to_u16(reciprocal >> 16);
  }
  lay_alias_order(buckets, table);
  lay_packed(frequencies, table.decode);
  lay_byte_planes(table);
  return true;
}

}  // namespace kvtide
