// Interleaved alias rANS (docs/codec.md, "Entropy coders: rans"): 32 lanes, u32 states, 16-bit words, 12-bit probabilities.
//
// Tables are built here from frequencies and never read from foreign bytes as they are, so every index that a decoder
// takes out of a table is in range, whatever the stream holds. Streams are foreign: every read is bounded.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "streams.hpp"

namespace kvtide {

inline constexpr std::size_t rans_lanes = 32;
inline constexpr std::size_t rans_symbols = coded_symbols;
inline constexpr std::uint32_t rans_total = 4096;
inline constexpr std::uint32_t rans_bucket_slots = rans_total / rans_symbols;
inline constexpr std::uint32_t rans_state_min = 1u << 16;
inline constexpr std::size_t rans_states_bytes = rans_lanes * sizeof(std::uint32_t);
inline constexpr std::uint8_t rans_escape = escape_symbol;

using Frequencies = Row16;

// What a decoder looks up. The byte planes hold the same numbers for instruction sets that look up bytes only.
struct alignas(64) RansDecodeTable {
  // For code without vectors: [2 * bucket] for the bucket's own symbol, [2 * bucket + 1] for the other one, each
  // frequency << 20 | bias << 8 | symbol, where bias added to the slot, modulo 2^12, gives the rank.
  std::array<std::uint32_t, 2 * rans_symbols> packed;
  Row16 bucket;        // slots of the bucket that are its own symbol's << 8 | the symbol of the others
  Row16 alias_offset;  // added to the offset in the bucket, modulo 2^16, gives the rank in the alias symbol
  Row16 scaled;        // frequency << 4
  Row8 split_less_one, alias, alias_offset_low, alias_offset_high, scaled_low, scaled_high;
};

// What an encoder looks up. "Alias order" lists all slots that are not their bucket's own, by (symbol, bucket).
struct alignas(64) RansEncodeTable {
  Row16 scaled;
  Row16 split;              // ranks below this lie in the symbol's own bucket
  Row16 alias_base;         // added to a rank, modulo 2^16, gives its position in alias order
  Row16 piece_key;          // first positions of the pieces, as a heap for five-level search; [0] is unused
  Row16 piece_offset;       // added to a position, modulo 2^16, gives the slot
  Row16 reciprocal_low;     // floor(2^32 / frequency), at most 2^32 - 1, low and high half
  Row16 reciprocal_high;
  Row8 split_less_one, scaled_low, scaled_high, alias_base_low, alias_base_high, piece_key_low, piece_key_high,
      piece_offset_low, piece_offset_high, reciprocal_0, reciprocal_1, reciprocal_2, reciprocal_3;
};

static_assert(sizeof(RansDecodeTable) == 640);
static_assert(sizeof(RansEncodeTable) == 896);

struct RansTable {
  RansDecodeTable decode;
  RansEncodeTable encode;
};

// Both return false, touching nothing, on counts that are all zero or sum to counts_max or more, and on
// frequencies that do not sum to rans_total or that name one symbol alone.
bool rans_quantise(Counts counts, Frequencies& frequencies);
bool rans_build(const Frequencies& frequencies, RansTable& table);

// The compact form of tables, each rans_symbols frequencies that rans_build takes. Reading fails unless `data` is exactly the form
// of as many tables as there is room for; each of them then sums to rans_total and names more than one symbol.
std::vector<std::uint8_t> rans_write_tables(std::span<const std::uint16_t> frequencies);
bool rans_read_tables(std::span<const std::uint8_t> data, std::span<std::uint16_t> frequencies);

using RansDecodeJob = DecodeJob<RansTable>;
using RansEncodeJob = EncodeJob<RansTable>;  // `stream` has room for rans_stream_bytes_max(count)

// Words are stored in vectors of up to 64 bytes that begin before the last word: room for one vector more.
constexpr std::size_t rans_stream_bytes_max(std::size_t count) { return 2 * count + rans_states_bytes + 64; }

// Kernels: called through rans_decode and rans_encode below, which check first.
using RansDecode = bool (*)(std::span<const RansDecodeJob> jobs, std::size_t element_bytes);
using RansEncode = bool (*)(std::span<RansEncodeJob> jobs);
// Maps `count` symbols below rans_symbols through a row of values of `element_bytes`.
using RansMap = void (*)(const std::uint8_t* symbols, std::size_t count, const std::uint8_t* values, std::size_t element_bytes,
                         std::uint8_t* out);

// One row of the dispatch table: an instruction set and its kernels. All rows give and take the same bytes.
struct RansPath {
  const char* name;
  bool (*is_supported)();
  RansDecode decode;
  RansEncode encode;
  RansMap map;
};

// Fastest first; the last one runs everywhere.
std::span<const RansPath> rans_paths();

// Jobs of one call share `count`, `run_symbols` and `has_escapes`, have valid runs, and decode side by side. False if a stream
// or its escapes do not hold exactly `count` symbols; what was written to `out` then means nothing. No symbols: no bytes.
bool rans_decode(const RansPath& path, std::span<const RansDecodeJob> jobs, std::size_t element_bytes);

// Jobs of one call share `count` and `run_symbols`. False if a symbol has no probability in its table.
bool rans_encode(const RansPath& path, std::span<RansEncodeJob> jobs);

}  // namespace kvtide
