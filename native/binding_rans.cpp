// Binds the rANS coder: a table set as a class, streams as one buffer and their sizes.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "binding.hpp"
#include "rans.hpp"

namespace kvtide {
namespace {

// Streams encoded per call of the kernel; bounds the scratch memory.
constexpr std::size_t encode_batch = 2;

struct RansTables {
  std::vector<RansTable> at;
};

const RansPath& path_named(const std::string& name) {
  for (const RansPath& path : rans_paths()) {
    if (name == path.name && path.is_supported()) return path;
  }
  throw nb::value_error("rans: this CPU has no such path");
}

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
  want(frequencies.shape(1) == rans_symbols, "rans_write_tables: want frequencies of (tables, 32)");
  for (std::size_t i = 0; i < frequencies.shape(0); ++i) {
    RansTable table;
    Frequencies row;
    std::ranges::copy(row_of(frequencies, i), row.begin());
    want(rans_build(row, table), "rans_write_tables: want frequencies that sum to 4096, none of them 4096");
  }
  return own(std::make_unique<std::vector<std::uint8_t>>(rans_write_tables({frequencies.data(), frequencies.size()})));
}

bool read_tables(const ConstBytes& data, const Array<std::uint16_t, 2>& frequencies) {
  want(frequencies.shape(1) == rans_symbols, "rans_read_tables: want frequencies of (tables, 32)");
  return unlocked([&] { return rans_read_tables(span_of(data), {frequencies.data(), frequencies.size()}); });
}

void build(RansTables* self, const Array<const std::uint16_t, 2>& frequencies) {
  want(frequencies.shape(1) == rans_symbols, "RansTables: want frequencies of (tables, 32)");
  want(frequencies.shape(0) <= 65536, "RansTables: want at most 65536 tables");
  new (self) RansTables{std::vector<RansTable>(frequencies.shape(0))};
  for (std::size_t i = 0; i < frequencies.shape(0); ++i) {
    Frequencies row;
    std::ranges::copy(row_of(frequencies, i), row.begin());
    if (rans_build(row, self->at[i])) continue;
    self->~RansTables();
    throw nb::value_error("RansTables: want frequencies that sum to 4096, none of them 4096");
  }
}

void check_runs(const RansTables& tables, std::size_t streams, std::size_t count, std::size_t run_symbols,
                const Array<const std::uint16_t, 2>& run_tables) {
  want(run_tables.shape(0) == streams, "rans: want a row of run tables for each stream");
  for (std::size_t i = 0; i < streams; ++i) {
    want(are_runs_valid(count, run_symbols, row_of(run_tables, i), tables.at.size()), "rans: want one table of the set for each run");
  }
}

EncodedStreams encode(const RansTables& tables, const std::string& path_name,
                                                       const Array<const std::uint8_t, 2>& symbols, std::size_t run_symbols,
                                                       const Array<const std::uint16_t, 2>& run_tables) {
  const RansPath& path = path_named(path_name);
  const std::size_t streams = symbols.shape(0), count = symbols.shape(1);
  check_runs(tables, streams, count, run_symbols, run_tables);
  auto data = std::make_unique<std::vector<std::uint8_t>>();
  std::vector<std::size_t> sizes;
  const bool ok = unlocked([&] {
    const std::size_t batch_max = std::min(streams, encode_batch), stream_max = rans_stream_bytes_max(count);
    const auto scratch = std::make_unique_for_overwrite<std::uint8_t[]>(batch_max * stream_max);
    for (std::size_t first = 0; first < streams; first += encode_batch) {
      std::vector<RansEncodeJob> jobs;
      for (std::size_t i = first; i < std::min(streams, first + encode_batch); ++i) {
        const std::span<std::uint8_t> room(scratch.get() + (i - first) * stream_max, stream_max);
        jobs.push_back({tables.at, row_of(run_tables, i), room, row_of(symbols, i).data(), count, run_symbols, 0});
      }
      if (!rans_encode(path, jobs)) return false;
      for (const RansEncodeJob& job : jobs) {
        const auto stream = job.stream.last(job.stream_bytes);
        data->insert(data->end(), stream.begin(), stream.end());
        sizes.push_back(stream.size());
      }
      // The others will be about as large; growing step by step costs a page fault for every page of every step.
      if (first == 0) data->reserve(data->size() * div_ceil(streams, encode_batch) * 9 / 8);
    }
    return true;
  });
  want(ok, "rans: a symbol has no probability in its table");
  return {own(std::move(data)), std::move(sizes)};
}

// Cuts `data` into pieces of the given numbers of items; they must cover it exactly.
std::vector<std::span<const std::uint8_t>> cut(const ConstBytes& data, std::span<const std::uint64_t> sizes, std::size_t item_bytes) {
  std::vector<std::span<const std::uint8_t>> pieces;
  std::span<const std::uint8_t> left = span_of(data);
  for (const std::uint64_t size : sizes) {
    want(size <= left.size() / item_bytes, "rans: sizes do not cover the data");
    pieces.push_back(left.first(size * item_bytes));
    left = left.subspan(size * item_bytes);
  }
  want(left.empty(), "rans: sizes do not cover the data");
  return pieces;
}

bool decode(const RansTables& tables, const std::string& path_name, const ConstBytes& data, const Array<const std::uint64_t, 1>& sizes,
            std::size_t run_symbols, const Array<const std::uint16_t, 2>& run_tables, const Array<const std::uint8_t, 2>& values,
            bool has_escapes, const ConstBytes& escapes, const Array<const std::uint64_t, 1>& escape_counts,
            const Array<std::uint8_t, 2>& out) {
  const RansPath& path = path_named(path_name);
  want(values.shape(0) == tables.at.size() && values.shape(1) % rans_symbols == 0, "rans: want 32 values for each table");
  const std::size_t element_bytes = values.shape(1) / rans_symbols;
  want(element_bytes == 1 || element_bytes == 2 || element_bytes == 4, "rans: want elements of 1, 2 or 4 bytes");
  want(out.shape(1) % element_bytes == 0 && reinterpret_cast<std::uintptr_t>(out.data()) % element_bytes == 0,
       "rans: want an aligned output of whole elements");
  const std::size_t streams = out.shape(0), count = out.shape(1) / element_bytes;
  want(sizes.shape(0) == streams && escape_counts.shape(0) == streams, "rans: want one size and one escape count for each stream");
  check_runs(tables, streams, count, run_symbols, run_tables);
  const auto stream_pieces = cut(data, span_of(sizes), 1);
  const auto escape_pieces = cut(escapes, span_of(escape_counts), element_bytes);
  std::vector<RansDecodeJob> jobs;
  for (std::size_t i = 0; i < streams; ++i) {
    jobs.push_back({tables.at, row_of(run_tables, i), stream_pieces[i], values.data(), escape_pieces[i].data(), row_of(out, i).data(),
                    count, run_symbols, escape_pieces[i].size() / element_bytes, has_escapes});
  }
  return unlocked([&] { return rans_decode(path, jobs, element_bytes); });
}

void map_bytes(const Array<const std::uint8_t, 2>& values, std::size_t run_symbols, const Array<const std::uint16_t, 2>& run_tables,
               const Array<const std::uint8_t, 2>& maps, const Array<std::uint8_t, 2>& out) {
  const std::size_t rows = values.shape(0), count = values.shape(1);
  want(maps.shape(1) == 256 && out.shape(0) == rows && out.shape(1) == count && run_tables.shape(0) == rows,
       "map_bytes: want maps of 256 bytes and rows that match");
  for (std::size_t row = 0; row < rows; ++row) {
    want(are_runs_valid(count, run_symbols, row_of(run_tables, row), maps.shape(0)), "map_bytes: want one map for each run");
  }
  unlocked([&] {
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t start = 0, run = 0; start < count; start += run_symbols, ++run) {
        const std::uint8_t* map = maps.data() + std::size_t{256} * run_tables.data()[row * run_tables.shape(1) + run];
        const std::size_t stop = std::min(count, start + run_symbols);
        for (std::size_t i = row * count + start; i < row * count + stop; ++i) out.data()[i] = map[values.data()[i]];
      }
    }
    return true;
  });
}

}  // namespace

void bind_rans(nb::module_& module) {
  module.def("rans_paths", &supported_paths);
  module.def("rans_quantise", &quantise, nb::arg("counts").noconvert(), nb::arg("frequencies").noconvert());
  module.def("rans_write_tables", &write_tables, nb::arg("frequencies").noconvert());
  module.def("rans_read_tables", &read_tables, nb::arg("data").noconvert(), nb::arg("frequencies").noconvert());
  module.def("map_bytes", &map_bytes, nb::arg("values").noconvert(), nb::arg("run_symbols"), nb::arg("run_tables").noconvert(),
             nb::arg("maps").noconvert(), nb::arg("out").noconvert());
  nb::class_<RansTables>(module, "RansTables")
      .def("__init__", &build, nb::arg("frequencies").noconvert())
      .def("encode", &encode, nb::arg("path"), nb::arg("symbols").noconvert(), nb::arg("run_symbols"), nb::arg("run_tables").noconvert())
      .def("decode", &decode, nb::arg("path"), nb::arg("data").noconvert(), nb::arg("sizes").noconvert(), nb::arg("run_symbols"),
           nb::arg("run_tables").noconvert(), nb::arg("values").noconvert(), nb::arg("has_escapes"), nb::arg("escapes").noconvert(),
           nb::arg("escape_counts").noconvert(), nb::arg("out").noconvert());
}

}  // namespace kvtide
