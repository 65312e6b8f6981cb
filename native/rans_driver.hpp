// The loops that every instruction set shares: runs, rows of 32 symbols, streams side by side, the end of a stream.
//
// Everything is in an unnamed namespace on purpose: each instruction set compiles its own copy with its own flags. One copy
// merged by the linker could hold instructions that the CPU lacks.
#pragma once

#include <cstring>

#include "rans.hpp"

namespace kvtide {
namespace {

// A step reads at most one row of words and what a vector load takes beyond it.
constexpr std::ptrdiff_t step_bytes_max = 80;

// Walks the words of one stream. While ready() holds, step_bytes_max bytes may be read at `next`; towards the end of the
// stream that is true of a zero-padded copy.
class WordReader {
 public:
  void open(std::span<const std::uint8_t> words) {
    next = words.data();
    end_ = words.data() + words.size();
    if (!is_roomy()) move_to_tail();
  }

  bool ready() {
    if (next <= limit_) [[likely]] return true;
    if (is_tail_) return false;
    move_to_tail();
    return true;
  }

  bool is_at_end() const { return next == end_; }

  const std::uint8_t* next = nullptr;

 private:
  bool is_roomy() {
    if (end_ - next < step_bytes_max) return false;
    limit_ = end_ - step_bytes_max;
    return true;
  }

  void move_to_tail() {
    const auto left = static_cast<std::size_t>(end_ - next);
    std::memset(tail_, 0, sizeof tail_);
    if (left != 0) std::memcpy(tail_, next, left);
    next = tail_;
    end_ = limit_ = tail_ + left;
    is_tail_ = true;
  }

  const std::uint8_t* limit_ = nullptr;
  const std::uint8_t* end_ = nullptr;
  bool is_tail_ = false;
  std::uint8_t tail_[2 * step_bytes_max];
};

// Takes the side list's elements, in order of position, in place of the escapes of one row.
template <class Element>
bool patch_escapes(std::uint32_t mask, Element* row, const std::uint8_t*& escapes, std::size_t& left) {
  for (; mask != 0; mask &= mask - 1) {
    if (left == 0) return false;
    std::memcpy(row + __builtin_ctz(mask), escapes, sizeof(Element));
    escapes += sizeof(Element);
    --left;
  }
  return true;
}

template <class Isa, std::size_t streams, class Element, bool has_escapes>
bool decode_streams(const RansDecodeJob* jobs) {
  using Values = typename Isa::template Values<Element>;
  typename Isa::Lanes lanes[streams];
  Values values[streams];
  WordReader words[streams];
  Element* out[streams];
  const std::uint8_t* escapes[streams];
  std::size_t escapes_left[streams];
  for (std::size_t s = 0; s < streams; ++s) {
    lanes[s] = Isa::load(jobs[s].stream.data());
    words[s].open(jobs[s].stream.subspan(rans_states_bytes));
    out[s] = reinterpret_cast<Element*>(jobs[s].out);
    escapes[s] = jobs[s].escapes;
    escapes_left[s] = jobs[s].escape_count;
  }
  std::size_t left = jobs[0].count;
  for (std::size_t run = 0; left != 0; ++run) {
    const std::size_t run_count = left < jobs[0].run_symbols ? left : jobs[0].run_symbols;
    const RansDecodeTable* tables[streams];
    for (std::size_t s = 0; s < streams; ++s) {
      const std::size_t table = jobs[s].run_tables[run];
      tables[s] = &jobs[s].tables[table].decode;
      values[s] = Values(jobs[s].values + table * rans_symbols * sizeof(Element));
    }
    for (std::size_t row = 0; row + rans_lanes <= run_count; row += rans_lanes) {
#pragma GCC unroll 4
      for (std::size_t s = 0; s < streams; ++s) {
        if (!words[s].ready()) return false;
        const auto symbols = Isa::step(lanes[s], *tables[s], words[s].next);
        values[s].store(symbols, out[s]);
        if constexpr (has_escapes) {
          if (!patch_escapes(Isa::escapes(symbols), out[s], escapes[s], escapes_left[s])) return false;
        }
        out[s] += rans_lanes;
      }
    }
    const std::size_t rest = run_count % rans_lanes;
    for (std::size_t s = 0; rest != 0 && s < streams; ++s) {
      if (!words[s].ready()) return false;
      Element row[rans_lanes];
      const auto symbols = Isa::step_some(lanes[s], *tables[s], words[s].next, rest);
      values[s].store(symbols, row);
      if constexpr (has_escapes) {
        const std::uint32_t mask = Isa::escapes(symbols) & ((std::uint32_t{1} << rest) - 1);
        if (!patch_escapes(mask, row, escapes[s], escapes_left[s])) return false;
      }
      std::memcpy(out[s], row, rest * sizeof(Element));
      out[s] += rest;
    }
    left -= run_count;
  }
  bool ok = true;
  for (std::size_t s = 0; s < streams; ++s) {
    ok = ok && words[s].is_at_end() && Isa::is_initial(lanes[s]) && (!has_escapes || escapes_left[s] == 0);
  }
  return ok;
}

template <class Isa, std::size_t streams, class Element>
bool decode_streams(const RansDecodeJob* jobs) {
  return jobs[0].has_escapes ? decode_streams<Isa, streams, Element, true>(jobs)
                             : decode_streams<Isa, streams, Element, false>(jobs);
}

template <class Isa, class Element>
bool decode_jobs(std::span<const RansDecodeJob> jobs) {
  std::size_t done = 0;
  for (; done + Isa::decode_streams <= jobs.size(); done += Isa::decode_streams) {
    if (!decode_streams<Isa, Isa::decode_streams, Element>(jobs.data() + done)) return false;
  }
  if constexpr (Isa::decode_streams > 2) {
    for (; done + 2 <= jobs.size(); done += 2) {
      if (!decode_streams<Isa, 2, Element>(jobs.data() + done)) return false;
    }
  }
  for (; done < jobs.size(); ++done) {
    if (!decode_streams<Isa, 1, Element>(jobs.data() + done)) return false;
  }
  return true;
}

template <class Isa>
bool decode_with(std::span<const RansDecodeJob> jobs, std::size_t element_bytes) {
  if (element_bytes == 1) return decode_jobs<Isa, std::uint8_t>(jobs);
  if (element_bytes == 2) return decode_jobs<Isa, std::uint16_t>(jobs);
  return decode_jobs<Isa, std::uint32_t>(jobs);
}

// Rows go in from the last to the first, words come out from the last to the first.
template <class Isa, std::size_t streams>
bool encode_streams(RansEncodeJob* jobs) {
  typename Isa::EncodeLanes lanes[streams];
  std::uint8_t* next[streams];
  for (std::size_t s = 0; s < streams; ++s) {
    lanes[s] = Isa::initial();
    next[s] = jobs[s].stream.data() + jobs[s].stream.size();
  }
  const std::size_t run_symbols = jobs[0].run_symbols;
  std::size_t stop = jobs[0].count;
  while (stop != 0) {
    const std::size_t run = (stop - 1) / run_symbols;
    const std::size_t start = run * run_symbols;
    const RansEncodeTable* tables[streams];
    for (std::size_t s = 0; s < streams; ++s) tables[s] = &jobs[s].tables[jobs[s].run_tables[run]].encode;
    const std::size_t rest = (stop - start) % rans_lanes;
    for (std::size_t s = 0; rest != 0 && s < streams; ++s) {
      std::uint8_t row[rans_lanes] = {};
      std::memcpy(row, jobs[s].symbols + stop - rest, rest);
      std::memset(row + rest, row[0], rans_lanes - rest);
      Isa::put(lanes[s], *tables[s], row, next[s], rest);
    }
    for (std::size_t row = stop - rest; row != start; row -= rans_lanes) {
#pragma GCC unroll 4
      for (std::size_t s = 0; s < streams; ++s) Isa::put(lanes[s], *tables[s], jobs[s].symbols + row - rans_lanes, next[s]);
    }
    stop = start;
  }
  bool ok = true;
  for (std::size_t s = 0; s < streams; ++s) {
    next[s] -= rans_states_bytes;
    ok = Isa::finish(lanes[s], next[s]) && ok;
    jobs[s].stream_bytes = static_cast<std::size_t>(jobs[s].stream.data() + jobs[s].stream.size() - next[s]);
  }
  return ok;
}

template <class Isa>
bool encode_with(std::span<RansEncodeJob> jobs) {
  std::size_t done = 0;
  for (; done + Isa::encode_streams <= jobs.size(); done += Isa::encode_streams) {
    if (!encode_streams<Isa, Isa::encode_streams>(jobs.data() + done)) return false;
  }
  for (; done < jobs.size(); ++done) {
    if (!encode_streams<Isa, 1>(jobs.data() + done)) return false;
  }
  return true;
}

template <class Isa, class Element>
void map_elements(const std::uint8_t* symbols, std::size_t count, const std::uint8_t* from, std::uint8_t* to) {
  const typename Isa::template Values<Element> values(from);
  auto* out = reinterpret_cast<Element*>(to);
  for (; count >= rans_lanes; count -= rans_lanes, symbols += rans_lanes, out += rans_lanes) {
    values.store(Isa::load_symbols(symbols), out);
  }
  if (count == 0) return;
  std::uint8_t padded[rans_lanes] = {};
  Element row[rans_lanes];
  std::memcpy(padded, symbols, count);
  values.store(Isa::load_symbols(padded), row);
  std::memcpy(out, row, count * sizeof(Element));
}

template <class Isa>
void map_with(const std::uint8_t* symbols, std::size_t count, const std::uint8_t* values, std::size_t element_bytes,
              std::uint8_t* out) {
  if (element_bytes == 1) return map_elements<Isa, std::uint8_t>(symbols, count, values, out);
  if (element_bytes == 2) return map_elements<Isa, std::uint16_t>(symbols, count, values, out);
  return map_elements<Isa, std::uint32_t>(symbols, count, values, out);
}

}  // namespace
}  // namespace kvtide
