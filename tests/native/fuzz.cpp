// Feeds mutated and random bytes to a decoder. Built with sanitizers; buffers have exact sizes, so that a read or write
// beyond them is caught. Usage: fuzz TARGET SECONDS SEED, where TARGET is a row of `targets` below.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "fuzz_tide.hpp"
#include "lossless.hpp"
#include "prefix.hpp"
#include "rans_cases.hpp"

namespace {

using Rng = std::mt19937_64;
using Bytes = std::vector<std::uint8_t>;

Bytes random_bytes(Rng& rng, std::size_t size) {
  Bytes bytes(size);
  for (auto& byte : bytes) byte = static_cast<std::uint8_t>(rng());
  return bytes;
}

// Flips, overwrites, cuts, repeats; sometimes leaves nothing of what there was.
Bytes mutate(Rng& rng, Bytes bytes) {
  for (std::size_t change = rng() % 4 + 1; change-- > 0;) {
    const std::size_t at = bytes.empty() ? 0 : rng() % bytes.size();
    switch (rng() % 7) {
      case 0:
        if (!bytes.empty()) bytes[at] ^= static_cast<std::uint8_t>(1u << rng() % 8);
        break;
      case 1:
        if (!bytes.empty()) bytes[at] = static_cast<std::uint8_t>(rng());
        break;
      case 2:
        bytes.resize(at);
        break;
      case 3:
        for (std::size_t i = at; i < std::min(bytes.size(), at + rng() % 40); ++i) bytes[i] = rng() % 2 ? 0xff : 0;
        break;
      case 4: {
        const Bytes more = random_bytes(rng, rng() % 60);
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), more.begin(), more.end());
        break;
      }
      case 5:
        if (rng() % 8 == 0) bytes = random_bytes(rng, rng() % 400);
        break;
      default:
        break;
    }
  }
  return bytes;
}

// A copy in a block of its own, so that the first byte beyond it is poisoned.
struct Exact {
  explicit Exact(const Bytes& from) : bytes(new std::uint8_t[from.size()]), size(from.size()) {
    if (size != 0) std::memcpy(bytes.get(), from.data(), size);
  }
  std::span<const std::uint8_t> span() const { return {bytes.get(), size}; }

  std::unique_ptr<std::uint8_t[]> bytes;
  std::size_t size;
};

// Decodes some streams side by side, each perhaps mutated.
template <class Element, class Table, class Decode>
void decode_some(Rng& rng, const RansCase& made, const std::vector<Table>& tables, const Bytes& stream, Decode decode) {
  const std::size_t streams = 1 + rng() % 5, count = made.symbols.size(), escape_count = rng() % (count + 1);
  const bool has_escapes = rng() % 2;
  const std::vector<Element> values(tables.size() * kvtide::coded_symbols);
  const std::unique_ptr<Element[]> out(new Element[streams * count]), escapes(new Element[escape_count]());
  std::vector<std::unique_ptr<Exact>> inputs;
  std::vector<kvtide::DecodeJob<Table>> jobs;
  for (std::size_t s = 0; s < streams; ++s) {
    inputs.push_back(std::make_unique<Exact>(rng() % 3 == 0 ? stream : mutate(rng, stream)));
    jobs.push_back({tables, made.run_tables, inputs.back()->span(), reinterpret_cast<const std::uint8_t*>(values.data()),
                    reinterpret_cast<const std::uint8_t*>(escapes.get()), reinterpret_cast<std::uint8_t*>(out.get() + s * count),
                    count, made.run_symbols, escape_count, has_escapes});
  }
  decode(jobs, sizeof(Element));
}

template <class Table, class Decode>
void decode_all_widths(Rng& rng, const RansCase& made, const std::vector<Table>& tables, const Bytes& stream, Decode decode) {
  for (const kvtide::RansPath& path : kvtide::rans_paths()) {
    if (!path.is_supported()) continue;
    const auto with_path = [&](const auto& jobs, std::size_t element_bytes) { decode(path, jobs, element_bytes); };
    decode_some<std::uint8_t>(rng, made, tables, stream, with_path);
    decode_some<std::uint16_t>(rng, made, tables, stream, with_path);
    decode_some<std::uint32_t>(rng, made, tables, stream, with_path);
  }
}

void fuzz_rans(Rng& rng) {
  const RansCase made = random_case(rng, 1 + rng() % 600, 1 + rng() % 128);
  const Bytes stream = encode_case(made, kvtide::rans_paths().back());
  decode_all_widths(rng, made, made.tables, stream, [](auto& path, auto& jobs, std::size_t element_bytes) {
    kvtide::rans_decode(path, jobs, element_bytes);
  });
}

// The same symbols under prefix tables of the same frequencies.
struct PrefixCase {
  std::vector<std::uint8_t> lengths;
  std::vector<kvtide::PrefixTable> tables;
};

PrefixCase prefix_case(const RansCase& made) {
  PrefixCase prefix;
  for (const kvtide::Frequencies& row : made.frequencies) {
    std::array<std::uint64_t, kvtide::coded_symbols> counts;
    std::copy(row.begin(), row.end(), counts.begin());
    kvtide::Lengths lengths;
    prefix.tables.emplace_back();
    if (!kvtide::prefix_lengths(counts, lengths) || !kvtide::prefix_build(lengths, prefix.tables.back())) std::abort();
    prefix.lengths.insert(prefix.lengths.end(), lengths.begin(), lengths.end());
  }
  return prefix;
}

void fuzz_prefix(Rng& rng) {
  const RansCase made = random_case(rng, 1 + rng() % 600, 1 + rng() % 300);
  const PrefixCase prefix = prefix_case(made);
  Bytes room(kvtide::prefix_stream_bytes_max(made.symbols.size()));
  std::array jobs = {kvtide::PrefixEncodeJob{prefix.tables, made.run_tables, room, made.symbols.data(), made.symbols.size(),
                                             made.run_symbols, 0}};
  if (!kvtide::prefix_encode(kvtide::rans_paths().back(), jobs)) std::abort();
  const Bytes stream(room.end() - static_cast<std::ptrdiff_t>(jobs[0].stream_bytes), room.end());
  decode_all_widths(rng, made, prefix.tables, stream, [](auto& path, auto& decode_jobs, std::size_t element_bytes) {
    kvtide::prefix_decode(path, decode_jobs, element_bytes);
  });
}

void fuzz_prefix_tables(Rng& rng) {
  PrefixCase prefix = prefix_case(random_case(rng, 1, 1));
  const Exact data(mutate(rng, kvtide::prefix_write_tables(prefix.lengths)));
  if (!kvtide::prefix_read_tables(data.span(), prefix.lengths)) return;
  for (std::size_t start = 0; start < prefix.lengths.size(); start += kvtide::coded_symbols) {
    kvtide::Lengths row;
    std::copy_n(prefix.lengths.begin() + static_cast<std::ptrdiff_t>(start), row.size(), row.begin());
    if (!kvtide::prefix_build(row, prefix.tables[0])) std::abort();
  }
}

// Tables that are read must also be tables that build and that come back from their compact form.
void fuzz_rans_tables(Rng& rng) {
  const RansCase made = random_case(rng, 1, 1);
  std::vector<std::uint16_t> frequencies;
  for (const auto& row : made.frequencies) frequencies.insert(frequencies.end(), row.begin(), row.end());
  const Exact data(mutate(rng, kvtide::rans_write_tables(frequencies)));
  if (!kvtide::rans_read_tables(data.span(), frequencies)) return;
  for (std::size_t start = 0; start < frequencies.size(); start += kvtide::rans_symbols) {
    kvtide::Frequencies row;
    kvtide::RansTable table;
    std::copy_n(frequencies.begin() + static_cast<std::ptrdiff_t>(start), row.size(), row.begin());
    if (!kvtide::rans_build(row, table)) std::abort();
  }
}

void put_word(Bytes& bytes, std::size_t word) {
  for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<std::uint8_t>(word >> shift));
}

// A layer whose planes are stored, constant or coded, by chance.
void fuzz_lossless(Rng& rng) {
  constexpr std::array formats = {kvtide::SplitFormat::bfloat16, kvtide::SplitFormat::float16, kvtide::SplitFormat::float32};
  const kvtide::SplitFormat format = formats[rng() % formats.size()];
  const std::size_t half = 1 + rng() % 200;
  Bytes section, bodies;
  for (std::size_t plane = 0; plane < kvtide::plane_count(format); ++plane) {
    const std::size_t method = rng() % 3, start = bodies.size();
    if (method == 0) bodies.resize(start + 2 * half, static_cast<std::uint8_t>(rng() % 4));
    if (method == 1) bodies.push_back(static_cast<std::uint8_t>(rng() % 16));
    if (method == 2) {
      const RansCase made = random_case(rng, half, half);
      const std::vector<std::uint16_t> row(made.frequencies[made.run_tables[0]].begin(), made.frequencies[made.run_tables[0]].end());
      std::vector<std::uint16_t> rows(row);
      rows.insert(rows.end(), row.begin(), row.end());
      const Bytes tables = kvtide::rans_write_tables(rows), stream = encode_case(made, kvtide::rans_paths().back());
      const auto escapes = static_cast<std::size_t>(std::count(made.symbols.begin(), made.symbols.end(), kvtide::rans_escape));
      bodies.insert(bodies.end(), {static_cast<std::uint8_t>(rng() % 2), 0, 0, 0});
      for (const std::size_t word : {tables.size(), escapes, escapes, stream.size(), stream.size()}) put_word(bodies, word);
      bodies.insert(bodies.end(), tables.begin(), tables.end());
      for (int each = 0; each < 2; ++each) bodies.insert(bodies.end(), stream.begin(), stream.end());
      bodies.resize(bodies.size() + 2 * escapes);
    }
    section.insert(section.end(), {static_cast<std::uint8_t>(method), 0, 0, 0});
    put_word(section, bodies.size() - start);
  }
  section.insert(section.end(), bodies.begin(), bodies.end());
  const std::size_t size = 2 * half * kvtide::item_bytes(format);
  const std::unique_ptr<std::uint8_t[]> out(new std::uint8_t[size]);
  const Exact data(rng() % 4 == 0 ? section : mutate(rng, section));
  for (const kvtide::RansPath& path : kvtide::rans_paths()) {
    if (path.is_supported()) kvtide::lossless_decode(path, data.span(), format, {out.get(), size});
  }
  // Back again on every path: few values make coded planes and constant ones, many make noise.
  Bytes layer(size);
  const std::uint64_t values = 1 + rng() % 256;
  for (std::uint8_t& each : layer) each = static_cast<std::uint8_t>(rng() % values);
  const Bytes made = kvtide::lossless_encode(kvtide::rans_paths().back(), layer, format);
  for (const kvtide::RansPath& path : kvtide::rans_paths()) {
    if (!path.is_supported()) continue;
    if (kvtide::lossless_encode(path, layer, format) != made) std::abort();
    if (!kvtide::lossless_decode(path, made, format, {out.get(), size}).empty()) std::abort();
    if (!std::equal(layer.begin(), layer.end(), out.get())) std::abort();
  }
}

struct Target {
  const char* name;
  void (*run)(Rng&);
};
constexpr Target targets[] = {{"rans", fuzz_rans}, {"rans_tables", fuzz_rans_tables}, {"prefix", fuzz_prefix},
    {"prefix_tables", fuzz_prefix_tables}, {"lossless", fuzz_lossless}, {"tide", fuzz_tide::run}};

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) return 2;
  const auto* target = std::find_if(std::begin(targets), std::end(targets),
                                    [&](const Target& row) { return std::strcmp(row.name, arguments[1]) == 0; });
  if (target == std::end(targets)) return 2;
  const auto stop = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::atof(arguments[2]));
  Rng rng(std::strtoull(arguments[3], nullptr, 10));
  long rounds = 0;
  for (; std::chrono::steady_clock::now() < stop; ++rounds) target->run(rng);
  std::printf("%s: %ld rounds\n", target->name, rounds);
  return rounds == 0;
}
