// What both entropy coders work on: rows of 32, streams, and the runs that say which table codes what.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtide {

inline constexpr std::size_t coded_symbols = 32;
inline constexpr std::uint8_t escape_symbol = coded_symbols - 1;
inline constexpr std::uint64_t counts_max = std::uint64_t{1} << 48;  // the sum of counts stays below

using Row16 = std::array<std::uint16_t, coded_symbols>;
using Row8 = std::array<std::uint8_t, coded_symbols>;
using Counts = std::span<const std::uint64_t, coded_symbols>;

// One stream and where its symbols go: `count` elements at `out`. Runs of `run_symbols` take the tables that `run_tables`
// names, the last run what is left. `values` holds coded_symbols elements for each table. If `has_escapes`, escape_symbol
// takes the next element of `escapes` instead of its value, and all of them must be taken.
template <class Table>
struct DecodeJob {
  std::span<const Table> tables;
  std::span<const std::uint16_t> run_tables;
  std::span<const std::uint8_t> stream;
  const std::uint8_t* values;
  const std::uint8_t* escapes;
  std::uint8_t* out;
  std::size_t count;
  std::size_t run_symbols;
  std::size_t escape_count;
  bool has_escapes;
};

// The other way: `stream` is room for the largest stream; the stream is what stands at its end.
template <class Table>
struct EncodeJob {
  std::span<const Table> tables;
  std::span<const std::uint16_t> run_tables;
  std::span<std::uint8_t> stream;
  const std::uint8_t* symbols;
  std::size_t count;
  std::size_t run_symbols;
  std::size_t stream_bytes;  // set by the encoder
};

// Tells whether `run_tables` names a table below `table_count` for each run of `run_symbols` in `count` symbols.
inline bool are_runs_valid(std::size_t count, std::size_t run_symbols, std::span<const std::uint16_t> run_tables,
                           std::size_t table_count) {
  if (run_symbols == 0) return false;
  const std::size_t runs = count / run_symbols + (count % run_symbols != 0);
  return run_tables.size() == runs &&
         std::all_of(run_tables.begin(), run_tables.end(), [&](std::uint16_t table) { return table < table_count; });
}

// How often each value stands at every `stride`-th place.
inline std::array<std::uint64_t, 256> byte_counts(std::span<const std::uint8_t> values, std::size_t stride = 1) {
  // Four tallies: adding to one number twice in a row would wait for itself.
  std::array<std::array<std::uint64_t, 256>, 4> tallies{};
  for (std::size_t i = 0, turn = 0; i < values.size(); i += stride, ++turn) ++tallies[turn % 4][values[i]];
  for (std::size_t value = 0; value < 256; ++value) {
    tallies[0][value] += tallies[1][value] + tallies[2][value] + tallies[3][value];
  }
  return tallies[0];
}

// Tells whether counts have a sum from 1 to counts_max - 1.
inline bool are_counts_valid(Counts counts) {
  std::uint64_t total = 0;
  for (const std::uint64_t count : counts) {
    if (count >= counts_max) return false;
    total += count;
  }
  return total != 0 && total < counts_max;
}

}  // namespace kvtide
