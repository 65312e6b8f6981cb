// How both entropy coders' streams cross the border: arrays of (streams, count), one buffer of streams and their sizes.
#pragma once

#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>

#include "binding.hpp"
#include "rans.hpp"
#include "streams.hpp"

namespace kvtide {

// Streams encoded per call of the kernel; bounds the scratch memory.
constexpr std::size_t encode_batch = 2;

template <class Coder>
struct TableSet {
  std::vector<typename Coder::Table> at;
};

inline const RansPath& path_named(const std::string& name) {
  for (const RansPath& path : rans_paths()) {
    if (name == path.name && path.is_supported()) return path;
  }
  throw nb::value_error("rans: this CPU has no such path");
}

template <class Coder>
void check_runs(const TableSet<Coder>& tables, std::size_t streams, std::size_t count, std::size_t run_symbols,
                const Array<const std::uint16_t, 2>& run_tables) {
  want(run_tables.shape(0) == streams, "want a row of run tables for each stream");
  for (std::size_t i = 0; i < streams; ++i) {
    want(are_runs_valid(count, run_symbols, row_of(run_tables, i), tables.at.size()), "want one table of the set for each run");
  }
}

template <class Coder>
EncodedStreams encode(const TableSet<Coder>& tables, const std::string& path_name,
                                                       const Array<const std::uint8_t, 2>& symbols, std::size_t run_symbols,
                                                       const Array<const std::uint16_t, 2>& run_tables) {
  const RansPath& path = path_named(path_name);
  const std::size_t streams = symbols.shape(0), count = symbols.shape(1);
  check_runs(tables, streams, count, run_symbols, run_tables);
  auto data = std::make_unique<std::vector<std::uint8_t>>();
  std::vector<std::size_t> sizes;
  const bool ok = unlocked([&] {
    const std::size_t batch_max = std::min(streams, encode_batch), stream_max = Coder::stream_bytes_max(count);
    const auto scratch = std::make_unique_for_overwrite<std::uint8_t[]>(batch_max * stream_max);
    for (std::size_t first = 0; first < streams; first += encode_batch) {
      std::vector<EncodeJob<typename Coder::Table>> jobs;
      for (std::size_t i = first; i < std::min(streams, first + encode_batch); ++i) {
        const std::span<std::uint8_t> room(scratch.get() + (i - first) * stream_max, stream_max);
        jobs.push_back({tables.at, row_of(run_tables, i), room, row_of(symbols, i).data(), count, run_symbols, 0});
      }
      if (!Coder::encode(path, jobs)) return false;
      for (const auto& job : jobs) {
        const auto stream = job.stream.last(job.stream_bytes);
        data->insert(data->end(), stream.begin(), stream.end());
        sizes.push_back(stream.size());
      }
      // The others will be about as large; growing step by step costs a page fault for every page of every step.
      if (first == 0) data->reserve(data->size() * div_ceil(streams, encode_batch) * 9 / 8);
    }
    return true;
  });
  want(ok, Coder::no_code);
  return {own(std::move(data)), std::move(sizes)};
}

// Cuts `data` into pieces of the given numbers of items; they must cover it exactly.
inline std::vector<std::span<const std::uint8_t>> cut(const ConstBytes& data, std::span<const std::uint64_t> sizes,
    std::size_t item_bytes) {
  std::vector<std::span<const std::uint8_t>> pieces;
  std::span<const std::uint8_t> left = span_of(data);
  for (const std::uint64_t size : sizes) {
    want(size <= left.size() / item_bytes, "sizes do not cover the data");
    pieces.push_back(left.first(size * item_bytes));
    left = left.subspan(size * item_bytes);
  }
  want(left.empty(), "sizes do not cover the data");
  return pieces;
}

template <class Coder>
bool decode(const TableSet<Coder>& tables, const std::string& path_name, const ConstBytes& data,
    const Array<const std::uint64_t, 1>& sizes,
            std::size_t run_symbols, const Array<const std::uint16_t, 2>& run_tables, const Array<const std::uint8_t, 2>& values,
            bool has_escapes, const ConstBytes& escapes, const Array<const std::uint64_t, 1>& escape_counts,
            const Array<std::uint8_t, 2>& out) {
  const RansPath& path = path_named(path_name);
  want(values.shape(0) == tables.at.size() && values.shape(1) % coded_symbols == 0, "want 32 values for each table");
  const std::size_t element_bytes = values.shape(1) / coded_symbols;
  want(element_bytes == 1 || element_bytes == 2 || element_bytes == 4, "want elements of 1, 2 or 4 bytes");
  want(out.shape(1) % element_bytes == 0 && reinterpret_cast<std::uintptr_t>(out.data()) % element_bytes == 0,
       "want an aligned output of whole elements");
  const std::size_t streams = out.shape(0), count = out.shape(1) / element_bytes;
  want(sizes.shape(0) == streams && escape_counts.shape(0) == streams, "want one size and one escape count for each stream");
  check_runs(tables, streams, count, run_symbols, run_tables);
  const auto stream_pieces = cut(data, span_of(sizes), 1);
  const auto escape_pieces = cut(escapes, span_of(escape_counts), element_bytes);
  std::vector<DecodeJob<typename Coder::Table>> jobs;
  for (std::size_t i = 0; i < streams; ++i) {
    jobs.push_back({tables.at, row_of(run_tables, i), stream_pieces[i], values.data(), escape_pieces[i].data(),
        row_of(out, i).data(),
                    count, run_symbols, escape_pieces[i].size() / element_bytes, has_escapes});
  }
  return unlocked([&] { return Coder::decode(path, jobs, element_bytes); });
}

// Adds what both table sets offer.
template <class Coder>
void bind_streams(nb::class_<TableSet<Coder>>& tables) {
  tables
      .def("encode", &encode<Coder>, nb::arg("path"), nb::arg("symbols").noconvert(), nb::arg("run_symbols"),
           nb::arg("run_tables").noconvert())
      .def("decode", &decode<Coder>, nb::arg("path"), nb::arg("data").noconvert(), nb::arg("sizes").noconvert(),
          nb::arg("run_symbols"),
           nb::arg("run_tables").noconvert(), nb::arg("values").noconvert(), nb::arg("has_escapes"),
               nb::arg("escapes").noconvert(),
           nb::arg("escape_counts").noconvert(), nb::arg("out").noconvert());
}

// Builds a table from each row; `make` returns false for a row that is none.
template <class Coder, class Element, class Make>
TableSet<Coder> make_tables(const Array<const Element, 2>& rows, Make make, const char* refusal) {
  want(rows.shape(1) == coded_symbols, "tables: want rows of 32");
  want(rows.shape(0) <= 65536, "tables: want at most 65536");
  auto tables = std::vector<typename Coder::Table>(rows.shape(0));
  for (std::size_t i = 0; i < rows.shape(0); ++i) {
    std::array<Element, coded_symbols> row;
    std::ranges::copy(row_of(rows, i), row.begin());
    want(make(row, tables[i]), refusal);
  }
  return {std::move(tables)};
}

}  // namespace kvtide
