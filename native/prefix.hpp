// Prefix codes (docs/codec.md, "Entropy coders: prefix"): a symbol always has the same bits, 10 at most; decoding is look-up.
#pragma once

#include <vector>

#include "rans.hpp"
#include "streams.hpp"

namespace kvtide {

inline constexpr unsigned prefix_length_max = 10;
inline constexpr std::size_t prefix_entries = std::size_t{1} << prefix_length_max;

using Lengths = Row8;

struct PrefixTable {
  Lengths lengths;  // 0: no code
  Row16 codes;      // first bit lowest
  // For the next 10 bits of a stream: up to six symbols that they hold whole, a byte each, then how many << 48 and of how
  // many bits << 56.
  std::array<std::uint64_t, prefix_entries> entries;
};

using PrefixDecodeJob = DecodeJob<PrefixTable>;
using PrefixEncodeJob = EncodeJob<PrefixTable>;

// Optimal lengths for the limit. False, touching nothing, on counts that have no sum or one of counts_max or more.
bool prefix_lengths(Counts counts, Lengths& lengths);
// False unless the lengths make a complete code of two symbols or more.
bool prefix_build(const Lengths& lengths, PrefixTable& table);

std::vector<std::uint8_t> prefix_write_tables(std::span<const std::uint8_t> lengths);
bool prefix_read_tables(std::span<const std::uint8_t> data, std::span<std::uint8_t> lengths);

constexpr std::size_t prefix_stream_bytes_max(std::size_t count) { return (count * prefix_length_max + 7) / 8 + 8; }

// As rans_decode and rans_encode; of the path only `map` is used.
bool prefix_decode(const RansPath& path, std::span<const PrefixDecodeJob> jobs, std::size_t element_bytes);
bool prefix_encode(const RansPath& path, std::span<PrefixEncodeJob> jobs);

}  // namespace kvtide
