// The compact form of frequency tables (docs/codec.md): for each symbol but the last the length of its frequency, then the bits.
#include <bit>

#include "bits.hpp"
#include "rans.hpp"

namespace kvtide {
namespace {

constexpr unsigned symbol_width = 5;
constexpr unsigned length_width = 4;
constexpr unsigned length_max = 12;

bool read_table(BitReader& reader, std::uint16_t* frequencies) {
  const std::uint32_t first = reader.take(symbol_width), last = reader.take(symbol_width);
  std::uint32_t sum = 0;
  for (std::uint32_t symbol = 0; symbol < rans_symbols; ++symbol) frequencies[symbol] = 0;
  for (std::uint32_t symbol = first; symbol < last; ++symbol) {
    const unsigned length = reader.take(length_width);
    if (length > length_max) return false;
    const std::uint32_t frequency = length == 0 ? 0u : (1u << (length - 1)) + reader.take(length - 1);
    frequencies[symbol] = static_cast<std::uint16_t>(frequency);
    sum += frequency;
  }
  if (first >= last || frequencies[first] == 0 || sum >= rans_total) return false;
  frequencies[last] = static_cast<std::uint16_t>(rans_total - sum);
  return true;
}

}  // namespace

std::vector<std::uint8_t> rans_write_tables(std::span<const std::uint16_t> frequencies) {
  BitWriter writer;
  for (; !frequencies.empty(); frequencies = frequencies.subspan(rans_symbols)) {
    std::uint32_t first = 0, last = rans_symbols - 1;
    while (frequencies[first] == 0) ++first;
    while (frequencies[last] == 0) --last;
    writer.put(first, symbol_width);
    writer.put(last, symbol_width);
    for (std::uint32_t symbol = first; symbol < last; ++symbol) {
      const auto length = static_cast<unsigned>(std::bit_width(frequencies[symbol]));
      writer.put(length, length_width);
      if (length > 1) writer.put(frequencies[symbol], length - 1);
    }
  }
  return std::move(writer.bytes());
}

bool rans_read_tables(std::span<const std::uint8_t> data, std::span<std::uint16_t> frequencies) {
  BitReader reader(data);
  for (; !frequencies.empty(); frequencies = frequencies.subspan(rans_symbols)) {
    if (!read_table(reader, frequencies.data())) return false;
  }
  return reader.is_whole();
}

}  // namespace kvtide
