// Prefix streams: four are decoded side by side, each look-up yields up to six symbols, which a path's map turns to elements.
#include "prefix.hpp"

#include <cstring>
#include <memory>

namespace kvtide {
namespace {

constexpr std::size_t decode_streams = 4;
constexpr std::size_t lookups = 4;           // of one load of 57 bits or more
constexpr std::size_t symbols_max = 6 * lookups;
constexpr std::size_t slack_bytes = 16;      // what loads and stores of 8 bytes may touch beyond an end
constexpr std::size_t piece_symbols = 4096;  // symbols decoded before they are mapped; a multiple of nothing but memory

std::uint64_t load64(const std::uint8_t* from) {
  std::uint64_t value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// A stream under way: its padded copy, the next bit, and where symbols go.
struct Cursor {
  const std::uint8_t* bytes;
  std::size_t bit;
  std::size_t bit_stop;
  std::uint8_t* symbols;
  std::size_t left;

  bool is_inside() const { return bit <= bit_stop; }
  std::uint64_t ahead() const { return load64(bytes + bit / 8) >> bit % 8; }
};

// Takes up to symbols_max symbols; there must be room for them.
void take_many(Cursor& cursor, const PrefixTable& table) {
  std::uint64_t ahead = cursor.ahead();
  std::size_t taken = 0, bits = 0;
  for (std::size_t i = 0; i < lookups; ++i) {
    const std::uint64_t entry = table.entries[ahead % prefix_entries];
    std::memcpy(cursor.symbols + taken, &entry, sizeof entry);
    taken += entry >> 48 & 0xff;
    bits += entry >> 56;
    ahead >>= entry >> 56;
  }
  cursor.symbols += taken;
  cursor.left -= taken;
  cursor.bit += bits;
}

void take_one(Cursor& cursor, const PrefixTable& table) {
  const auto symbol = static_cast<std::uint8_t>(table.entries[cursor.ahead() % prefix_entries]);
  *cursor.symbols++ = symbol;
  cursor.bit += table.lengths[symbol];
  --cursor.left;
}

// Takes all that is left of one piece of each cursor.
bool take_pieces(Cursor* cursors, const PrefixTable* const* tables, std::size_t streams) {
  const auto all = [&](auto holds) { return std::all_of(cursors, cursors + streams, holds); };
  const auto is_far = [](const Cursor& cursor) { return cursor.left >= symbols_max && cursor.is_inside(); };
  if (streams == decode_streams) {
    while (all(is_far)) {
      for (std::size_t s = 0; s < decode_streams; ++s) take_many(cursors[s], *tables[s]);
    }
  }
  for (std::size_t s = 0; s < streams; ++s) {
    while (is_far(cursors[s])) take_many(cursors[s], *tables[s]);
    while (cursors[s].left != 0 && cursors[s].is_inside()) take_one(cursors[s], *tables[s]);
  }
  return all([](const Cursor& cursor) { return cursor.is_inside(); });
}

bool patch(const std::uint8_t* symbols, std::size_t count, std::uint8_t* out, std::size_t element_bytes,
           const std::uint8_t*& escapes, std::size_t& left) {
  for (std::size_t i = 0; i < count; ++i) {
    if (symbols[i] != escape_symbol) continue;
    if (left == 0) return false;
    std::memcpy(out + i * element_bytes, escapes, element_bytes);
    escapes += element_bytes;
    --left;
  }
  return true;
}

// The last byte is begun, and its unused bits are zero.
bool is_at_end(const Cursor& cursor) {
  if ((cursor.bit + 7) / 8 * 8 != cursor.bit_stop) return false;
  return cursor.bit % 8 == 0 || cursor.bytes[cursor.bit / 8] >> cursor.bit % 8 == 0;
}

// What a job needs while it is decoded.
struct Work {
  std::unique_ptr<std::uint8_t[]> padded;
  std::uint8_t symbols[piece_symbols + slack_bytes];
  const std::uint8_t* escapes;
  std::size_t escapes_left;
};

bool decode_group(const RansPath& path, std::span<const PrefixDecodeJob> jobs, std::size_t element_bytes, Work* works) {
  Cursor cursors[decode_streams];
  const PrefixTable* tables[decode_streams];
  const std::size_t streams = jobs.size(), count = jobs[0].count, run_symbols = jobs[0].run_symbols;
  for (std::size_t s = 0; s < streams; ++s) {
    const std::size_t size = jobs[s].stream.size();
    works[s].padded = std::make_unique<std::uint8_t[]>(size + slack_bytes);
    std::memcpy(works[s].padded.get(), jobs[s].stream.data(), size);
    works[s].escapes = jobs[s].escapes;
    works[s].escapes_left = jobs[s].escape_count;
    cursors[s] = {works[s].padded.get(), 0, 8 * size, nullptr, 0};
  }
  for (std::size_t start = 0; start < count;) {
    const std::size_t run = start / run_symbols;
    const std::size_t stop = std::min({count, start - start % run_symbols + run_symbols, start + piece_symbols});
    for (std::size_t s = 0; s < streams; ++s) {
      tables[s] = &jobs[s].tables[jobs[s].run_tables[run]];
      cursors[s].symbols = works[s].symbols;
      cursors[s].left = stop - start;
    }
    if (!take_pieces(cursors, tables, streams)) return false;
    for (std::size_t s = 0; s < streams; ++s) {
      const std::uint8_t* values = jobs[s].values + jobs[s].run_tables[run] * coded_symbols * element_bytes;
      std::uint8_t* out = jobs[s].out + start * element_bytes;
      path.map(works[s].symbols, stop - start, values, element_bytes, out);
      if (!jobs[s].has_escapes) continue;
      if (!patch(works[s].symbols, stop - start, out, element_bytes, works[s].escapes, works[s].escapes_left)) return false;
    }
    start = stop;
  }
  for (std::size_t s = 0; s < streams; ++s) {
    if (!is_at_end(cursors[s]) || (jobs[s].has_escapes && works[s].escapes_left != 0)) return false;
  }
  return true;
}

// Writes codes from the first bit on.
bool encode_one(const PrefixEncodeJob& job, std::uint8_t* to, std::size_t& size) {
  std::uint64_t held = 0;
  unsigned bits = 0;
  const std::uint8_t* const from = to;
  bool is_bad = false;
  for (std::size_t start = 0, run = 0; start < job.count; start += job.run_symbols, ++run) {
    const PrefixTable& table = job.tables[job.run_tables[run]];
    const std::size_t stop = std::min(job.count, start + job.run_symbols);
    for (std::size_t i = start; i < stop; ++i) {
      const std::uint8_t symbol = job.symbols[i] % coded_symbols;
      is_bad |= job.symbols[i] >= coded_symbols || table.lengths[symbol] == 0;
      held |= std::uint64_t{table.codes[symbol]} << bits;
      bits += table.lengths[symbol];
      if (bits < 32) continue;
      const auto word = static_cast<std::uint32_t>(held);
      std::memcpy(to, &word, sizeof word);
      to += sizeof word;
      held >>= 32;
      bits -= 32;
    }
  }
  const std::size_t rest = (bits + 7) / 8;
  std::memcpy(to, &held, rest);
  size = static_cast<std::size_t>(to - from) + rest;
  return !is_bad;
}

}  // namespace

bool prefix_decode(const RansPath& path, std::span<const PrefixDecodeJob> jobs, std::size_t element_bytes) {
  const auto is_plausible = [](const PrefixDecodeJob& job) {
    if (job.count == 0) return job.stream.empty() && job.escape_count == 0;
    return job.stream.size() <= (job.count * prefix_length_max + 7) / 8;
  };
  if (!std::all_of(jobs.begin(), jobs.end(), is_plausible)) return false;
  const auto works = std::make_unique<Work[]>(decode_streams);
  for (; !jobs.empty(); jobs = jobs.subspan(std::min(jobs.size(), decode_streams))) {
    if (!decode_group(path, jobs.first(std::min(jobs.size(), decode_streams)), element_bytes, works.get())) return false;
  }
  return true;
}

bool prefix_encode(const RansPath&, std::span<PrefixEncodeJob> jobs) {
  for (PrefixEncodeJob& job : jobs) {
    if (!encode_one(job, job.stream.data(), job.stream_bytes)) return false;
    std::memmove(job.stream.data() + job.stream.size() - job.stream_bytes, job.stream.data(), job.stream_bytes);
  }
  return true;
}

}  // namespace kvtide
