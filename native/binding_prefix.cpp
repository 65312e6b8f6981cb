// Binds the prefix coder.
#include "binding_streams.hpp"
#include "prefix.hpp"

namespace kvtide {
namespace {

struct PrefixCoder {
  using Table = PrefixTable;
  static constexpr const char* no_code = "prefix: a symbol has no code in its table";
  static constexpr auto stream_bytes_max = prefix_stream_bytes_max;
  static constexpr auto encode = prefix_encode;
  static constexpr auto decode = prefix_decode;
};

using PrefixTables = TableSet<PrefixCoder>;
constexpr const char* no_table = "prefix: want lengths up to 10 of a complete code";

void find_lengths(const Array<const std::uint64_t, 2>& counts, const Array<std::uint8_t, 2>& lengths) {
  want(counts.shape(1) == coded_symbols && lengths.shape(1) == coded_symbols && counts.shape(0) == lengths.shape(0),
       "prefix_lengths: want two arrays of (tables, 32)");
  for (std::size_t i = 0; i < counts.shape(0); ++i) {
    Lengths row;
    want(prefix_lengths(row_of(counts, i).first<coded_symbols>(), row),
         "prefix_lengths: want counts with a sum from 1 to 2^48 - 1");
    std::ranges::copy(row, row_of(lengths, i).begin());
  }
}

OwnedBytes write_tables(const Array<const std::uint8_t, 2>& lengths) {
  make_tables<PrefixCoder>(lengths, prefix_build, no_table);
  return own(std::make_unique<std::vector<std::uint8_t>>(prefix_write_tables({lengths.data(), lengths.size()})));
}

bool read_tables(const ConstBytes& data, const Array<std::uint8_t, 2>& lengths) {
  want(lengths.shape(1) == coded_symbols, "prefix_read_tables: want lengths of (tables, 32)");
  return unlocked([&] { return prefix_read_tables(span_of(data), {lengths.data(), lengths.size()}); });
}

void build(PrefixTables* self, const Array<const std::uint8_t, 2>& lengths) {
  new (self) PrefixTables(make_tables<PrefixCoder>(lengths, prefix_build, no_table));
}

}  // namespace

void bind_prefix(nb::module_& module) {
  module.def("prefix_lengths", &find_lengths, nb::arg("counts").noconvert(), nb::arg("lengths").noconvert());
  module.def("prefix_write_tables", &write_tables, nb::arg("lengths").noconvert());
  module.def("prefix_read_tables", &read_tables, nb::arg("data").noconvert(), nb::arg("lengths").noconvert());
  nb::class_<PrefixTables> tables(module, "PrefixTables");
  tables.def("__init__", &build, nb::arg("lengths").noconvert());
  bind_streams(tables);
}

}  // namespace kvtide
