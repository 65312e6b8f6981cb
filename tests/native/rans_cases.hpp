// Random tables, runs and symbols for the native test programs.
#pragma once

#include <random>
#include <vector>

#include "rans.hpp"

struct RansCase {
  std::vector<kvtide::RansTable> tables;
  std::vector<kvtide::Frequencies> frequencies;
  std::vector<std::uint16_t> run_tables;
  std::vector<std::uint8_t> symbols;
  std::size_t run_symbols;
};

// Tables from flat to one symbol alone, with zeros among them; symbols drawn as the table says.
inline RansCase random_case(std::mt19937_64& rng, std::size_t count, std::size_t run_symbols) {
  RansCase made;
  made.run_symbols = run_symbols;
  const std::size_t table_count = 1 + rng() % 4;
  for (std::size_t t = 0; t < table_count; ++t) {
    std::array<std::uint64_t, kvtide::rans_symbols> counts{};
    const auto steepness = rng() % 34;
    for (auto& n : counts) n = rng() % 3 == 0 ? 0 : std::uint64_t{1} << (steepness == 0 ? 0 : rng() % steepness);
    counts[rng() % counts.size()] += 1;
    made.frequencies.emplace_back();
    kvtide::rans_quantise(counts, made.frequencies.back());
    made.tables.emplace_back();
    kvtide::rans_build(made.frequencies.back(), made.tables.back());
  }
  for (std::size_t start = 0; start < count; start += run_symbols) {
    const std::size_t t = rng() % table_count;
    made.run_tables.push_back(static_cast<std::uint16_t>(t));
    const kvtide::Frequencies& row = made.frequencies[t];
    std::discrete_distribution<int> draw(row.begin(), row.end());
    for (std::size_t i = start; i < count && i < start + run_symbols; ++i) {
      made.symbols.push_back(static_cast<std::uint8_t>(draw(rng)));
    }
  }
  return made;
}

inline std::vector<std::uint8_t> encode_case(const RansCase& made, const kvtide::RansPath& path) {
  std::vector<std::uint8_t> room(kvtide::rans_stream_bytes_max(made.symbols.size()));
  std::array jobs = {kvtide::RansEncodeJob{made.tables, made.run_tables, room, made.symbols.data(), made.symbols.size(),
                                           made.run_symbols, 0}};
  if (!kvtide::rans_encode(path, jobs)) return {};
  return {room.end() - static_cast<std::ptrdiff_t>(jobs[0].stream_bytes), room.end()};
}
