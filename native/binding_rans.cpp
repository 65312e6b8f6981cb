// Binds the rANS coder: a table set as a class, streams as one buffer and their sizes.
#include <functional>

#include "binding_streams.hpp"

namespace kvtide {
namespace {

struct RansCoder {
  using Table = RansTable;
  static constexpr const char* no_code = "rans: a symbol has no probability in its table";
  static constexpr auto stream_bytes_max = rans_stream_bytes_max;
  static constexpr auto encode = rans_encode;
  static constexpr auto decode = rans_decode;
};

using RansTables = TableSet<RansCoder>;
constexpr const char* no_table = "rans: want frequencies that sum to 4096, none of them 4096";

std::vector<std::string> supported_paths() {
  std::vector<std::string> names;
  for (const RansPath& path : rans_paths()) {
    if (path.is_supported()) names.emplace_back(path.name);
  }
  return names;
}

void quantise(const Array<const std::uint64_t, 2>& counts, const Array<std::uint16_t, 2>& frequencies) {
  want(counts.shape(1) == rans_symbols && frequencies.shape(1) == rans_symbols && counts.shape(0) == frequencies.shape(0),
       "rans_quantise: want two arrays of (tables, 32)");
  for (std::size_t i = 0; i < counts.shape(0); ++i) {
    Frequencies row;
    want(rans_quantise(row_of(counts, i).first<rans_symbols>(), row), "rans_quantise: want counts with a sum from 1 to 2^48 - 1");
    std::ranges::copy(row, row_of(frequencies, i).begin());
  }
}

OwnedBytes write_tables(const Array<const std::uint16_t, 2>& frequencies) {
  make_tables<RansCoder>(frequencies, rans_build, no_table);
  return own(std::make_unique<std::vector<std::uint8_t>>(rans_write_tables({frequencies.data(), frequencies.size()})));
}

bool read_tables(const ConstBytes& data, const Array<std::uint16_t, 2>& frequencies) {
  want(frequencies.shape(1) == rans_symbols, "rans_read_tables: want frequencies of (tables, 32)");
  return unlocked([&] { return rans_read_tables(span_of(data), {frequencies.data(), frequencies.size()}); });
}

void build(RansTables* self, const Array<const std::uint16_t, 2>& frequencies) {
  new (self) RansTables(make_tables<RansCoder>(frequencies, rans_build, no_table));
}

void count_bytes(const Array<const std::uint8_t, 2>& values, std::size_t run_symbols,
                 const Array<const std::uint16_t, 2>& run_tables, const Array<std::uint64_t, 2>& counts) {
  want(counts.shape(1) == 256, "count_bytes: want counts of (tables, 256)");
  want(run_tables.shape(0) == values.shape(0), "want a row of run tables for each row of bytes");
  const std::size_t count = values.shape(1);
  for (std::size_t row = 0; row < values.shape(0); ++row) {
    want(are_runs_valid(count, run_symbols, row_of(run_tables, row), counts.shape(0)), "want one table for each run");
  }
  nb::gil_scoped_release release;
  for (std::size_t row = 0; row < values.shape(0); ++row) {
    for (std::size_t start = 0, run = 0; start < count; start += run_symbols, ++run) {
      const auto found = byte_counts(row_of(values, row).subspan(start, std::min(run_symbols, count - start)));
      const auto sums = row_of(counts, row_of(run_tables, row)[run]);
      std::ranges::transform(found, sums, sums.begin(), std::plus());
    }
  }
}

}  // namespace

void bind_rans(nb::module_& module) {
  module.def("rans_paths", &supported_paths);
  module.def("rans_quantise", &quantise, nb::arg("counts").noconvert(), nb::arg("frequencies").noconvert());
  module.def("rans_write_tables", &write_tables, nb::arg("frequencies").noconvert());
  module.def("rans_read_tables", &read_tables, nb::arg("data").noconvert(), nb::arg("frequencies").noconvert());
  module.def("count_bytes", &count_bytes, nb::arg("values").noconvert(), nb::arg("run_symbols"),
      nb::arg("run_tables").noconvert(),
             nb::arg("counts").noconvert());
  nb::class_<RansTables> tables(module, "RansTables");
  tables.def("__init__", &build, nb::arg("frequencies").noconvert());
  bind_streams(tables);
}

}  // namespace kvtide
