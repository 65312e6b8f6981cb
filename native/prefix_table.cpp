// Builds prefix tables from counts: package-merge, then canonical codes.
#include <algorithm>

#include "bits.hpp"
#include "prefix.hpp"

namespace kvtide {
namespace {

constexpr unsigned symbol_width = 5;
constexpr unsigned length_width = 4;
constexpr std::size_t entry_symbols_max = 6;

// A set of leaves: its weight, and how often it holds each symbol.
struct Package {
  std::uint64_t weight = 0;
  Row8 held{};

  bool operator<(const Package& other) const { return weight < other.weight; }
};

std::vector<Package> leaves_by_weight(Counts counts) {
  std::vector<Package> leaves;
  for (std::size_t symbol = 0; symbol < coded_symbols; ++symbol) {
    if (counts[symbol] == 0) continue;
    leaves.push_back({counts[symbol], {}});
    leaves.back().held[symbol] = 1;
  }
  std::stable_sort(leaves.begin(), leaves.end());
  return leaves;
}

// Pairs of neighbours; one left over is dropped.
std::vector<Package> pair_up(const std::vector<Package>& from) {
  std::vector<Package> pairs(from.size() / 2);
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const Package &first = from[2 * i], &second = from[2 * i + 1];
    pairs[i].weight = first.weight + second.weight;
    for (std::size_t s = 0; s < coded_symbols; ++s) pairs[i].held[s] = static_cast<std::uint8_t>(first.held[s] + second.held[s]);
  }
  return pairs;
}

bool is_complete(const Lengths& lengths) {
  std::size_t sum = 0;
  for (const std::uint8_t length : lengths) {
    if (length > prefix_length_max) return false;
    if (length != 0) sum += prefix_entries >> length;
  }
  return sum == prefix_entries && std::count(lengths.begin(), lengths.end(), 0) <= static_cast<long>(coded_symbols) - 2;
}

void lay_codes(PrefixTable& table) {
  unsigned code = 0;
  for (unsigned length = 1; length <= prefix_length_max; ++length) {
    code <<= 1;
    for (std::size_t symbol = 0; symbol < coded_symbols; ++symbol) {
      if (table.lengths[symbol] != length) continue;
      unsigned reversed = 0;
      for (unsigned bit = 0; bit < length; ++bit) reversed |= (code >> bit & 1u) << (length - 1 - bit);
      table.codes[symbol] = static_cast<std::uint16_t>(reversed);
      ++code;
    }
  }
}

void lay_entries(PrefixTable& table) {
  std::array<std::uint8_t, prefix_entries> first{};
  for (std::size_t symbol = 0; symbol < coded_symbols; ++symbol) {
    if (table.lengths[symbol] == 0) continue;
    const std::size_t stride = std::size_t{1} << table.lengths[symbol];
    for (std::size_t bits = table.codes[symbol]; bits < prefix_entries; bits += stride) {
      first[bits] = static_cast<std::uint8_t>(symbol);
    }
  }
  for (std::size_t bits = 0; bits < prefix_entries; ++bits) {
    std::uint64_t entry = 0;
    std::uint64_t taken = 0, count = 0;
    while (count < entry_symbols_max) {
      const std::uint8_t symbol = first[bits >> taken];
      if (taken + table.lengths[symbol] > prefix_length_max) break;
      entry |= std::uint64_t{symbol} << 8 * count++;
      taken += table.lengths[symbol];
    }
    table.entries[bits] = entry | count << 48 | taken << 56;
  }
}

bool read_lengths(BitReader& reader, std::uint8_t* row) {
  Lengths lengths{};
  const std::uint32_t first = reader.take(symbol_width), last = reader.take(symbol_width);
  for (std::uint32_t symbol = first; symbol <= last; ++symbol) {
    lengths[symbol] = static_cast<std::uint8_t>(reader.take(length_width));
  }
  if (!is_complete(lengths) || lengths[first] == 0 || lengths[last] == 0) return false;
  std::copy(lengths.begin(), lengths.end(), row);
  return true;
}

}  // namespace

bool prefix_lengths(Counts counts, Lengths& lengths) {
  if (!are_counts_valid(counts)) return false;
  std::vector<Package> leaves = leaves_by_weight(counts);
  if (leaves.size() == 1) {
    // A second code makes it complete.
    leaves.emplace_back();
    leaves.back().held[leaves.front().held[0] != 0 ? 1 : 0] = 1;
  }
  std::vector<Package> merged = leaves;
  for (unsigned level = 1; level < prefix_length_max; ++level) {
    const std::vector<Package> pairs = pair_up(merged);
    merged.clear();
    // Of equal weights, leaves come first.
    std::merge(leaves.begin(), leaves.end(), pairs.begin(), pairs.end(), std::back_inserter(merged));
  }
  lengths.fill(0);
  for (std::size_t i = 0; i < 2 * leaves.size() - 2; ++i) {
    for (std::size_t s = 0; s < coded_symbols; ++s) lengths[s] = static_cast<std::uint8_t>(lengths[s] + merged[i].held[s]);
  }
  return true;
}

bool prefix_build(const Lengths& lengths, PrefixTable& table) {
  if (!is_complete(lengths)) return false;
  table.lengths = lengths;
  table.codes.fill(0);
  lay_codes(table);
  lay_entries(table);
  return true;
}

std::vector<std::uint8_t> prefix_write_tables(std::span<const std::uint8_t> lengths) {
  BitWriter writer;
  for (; !lengths.empty(); lengths = lengths.subspan(coded_symbols)) {
    std::uint32_t first = 0, last = coded_symbols - 1;
    while (lengths[first] == 0) ++first;
    while (lengths[last] == 0) --last;
    writer.put(first, symbol_width);
    writer.put(last, symbol_width);
    for (std::uint32_t symbol = first; symbol <= last; ++symbol) writer.put(lengths[symbol], length_width);
  }
  return std::move(writer.bytes());
}

bool prefix_read_tables(std::span<const std::uint8_t> data, std::span<std::uint8_t> lengths) {
  BitReader reader(data);
  for (; !lengths.empty(); lengths = lengths.subspan(coded_symbols)) {
    if (!read_lengths(reader, lengths.data())) return false;
  }
  return reader.is_whole();
}

}  // namespace kvtide
