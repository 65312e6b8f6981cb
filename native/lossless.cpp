#include "lossless.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

namespace kvtide {
namespace {

constexpr std::uint8_t stored = 0, constant = 1, coded = 2;
// Keys and values: a stream and a table for each.
constexpr std::size_t halves = 2;
constexpr std::uint16_t run_tables[halves] = {0, 1};
constexpr std::size_t head_bytes = 8;

// Takes bytes from the front of what is left of a section.
class Reader {
 public:
  explicit Reader(std::span<const std::uint8_t> data) : left_(data) {}

  bool take(std::size_t size, std::span<const std::uint8_t>& out) {
    if (size > left_.size()) return false;
    out = left_.first(size);
    left_ = left_.subspan(size);
    return true;
  }

  std::span<const std::uint8_t> left() const { return left_; }

 private:
  std::span<const std::uint8_t> left_;
};

std::uint32_t word_at(std::span<const std::uint8_t> data, std::size_t offset) {
  std::uint32_t word;
  std::memcpy(&word, data.data() + offset, sizeof word);
  return word;
}

// Keys and values of a plane, `count` in all, each a stream under a table of its own.
std::string decode_coded(const RansPath& path, std::span<const std::uint8_t> body, int width, std::size_t count, std::uint8_t* plane) {
  Reader reader(body);
  std::span<const std::uint8_t> head, form, streams[halves], escapes[halves];
  if (!reader.take(24, head) || head[2] != 0 || head[3] != 0 || !reader.take(word_at(head, 4), form)) return "a coded plane is cut";
  const bool has_escapes = width == 8;
  for (std::size_t half = 0; half < halves; ++half) {
    if (!reader.take(word_at(head, 16 + 4 * half), streams[half])) return "a coded plane is cut";
  }
  for (std::size_t half = 0; half < halves; ++half) {
    if (!reader.take(word_at(head, 8 + 4 * half), escapes[half])) return "a coded plane is cut";
    if (!has_escapes && (head[half] != 0 || !escapes[half].empty())) return "a plane of fewer than 8 bits has bases or escapes";
  }
  if (!reader.left().empty()) return "a coded plane has bytes too many";
  std::array<std::uint16_t, halves * rans_symbols> frequencies;
  if (!rans_read_tables(form, frequencies)) return "a coded plane has no two tables";
  std::array<RansTable, halves> tables;
  std::array<std::uint8_t, halves * rans_symbols> values;
  std::array<RansDecodeJob, halves> jobs;
  for (std::size_t half = 0; half < halves; ++half) {
    Frequencies row;
    std::copy_n(frequencies.begin() + static_cast<std::ptrdiff_t>(half * rans_symbols), rans_symbols, row.begin());
    const auto first_wide = row.begin() + std::min<std::ptrdiff_t>(rans_symbols, std::ptrdiff_t{1} << width);
    if (std::any_of(first_wide, row.end(), [](std::uint16_t each) { return each != 0; })) return "a plane's table has values of more bits";
    if (!rans_build(row, tables[half])) return "a coded plane has no two tables";
    for (std::size_t symbol = 0; symbol < rans_symbols; ++symbol) {
      values[half * rans_symbols + symbol] = static_cast<std::uint8_t>(head[half] + symbol);
    }
    jobs[half] = {tables, {run_tables + half, 1}, streams[half], values.data(), escapes[half].data(), plane + half * (count / halves),
                  count / halves, count / halves, escapes[half].size(), has_escapes};
  }
  return rans_decode(path, jobs, 1) ? "" : "a coded plane's streams hold other than its values";
}

void put_word(std::vector<std::uint8_t>& out, std::size_t word) {
  for (int shift = 0; shift < 32; shift += 8) out.push_back(static_cast<std::uint8_t>(word >> shift));
}

// A plane of noise can't shrink; a sample's bits tell without counting the plane.
bool is_noise(std::span<const std::uint8_t> plane) {
  constexpr std::size_t sampled = 16384;
  constexpr double noise_bits = 8 * 0.99;
  const std::size_t stride = std::max<std::size_t>(1, plane.size() / sampled), count = (plane.size() + stride - 1) / stride;
  double bits = 0.0;
  for (const std::uint64_t each : byte_counts(plane, stride)) {
    const double share = static_cast<double>(each) / static_cast<double>(count);
    if (each != 0) bits -= share * std::log2(share);
  }
  return bits > noise_bits;
}

// The first of the 31 neighbouring values, modulo 256, that hold most counts; the lowest of equals.
std::uint8_t best_base(const std::array<std::uint64_t, 256>& counts) {
  std::uint64_t sum = 0, most = 0;
  for (std::size_t value = 0; value < rans_escape; ++value) sum += counts[value];
  std::size_t best = 0;
  for (std::size_t base = 0; base < 256; ++base) {
    if (sum > most) best = base, most = sum;
    sum += counts[(base + rans_escape) % 256] - counts[base];
  }
  return static_cast<std::uint8_t>(best);
}

// Appends the coded form of a plane, which may be longer than the plane. `room`: as many bytes, for its symbols. False if it has none.
bool encode_coded(const RansPath& path, std::span<const std::uint8_t> plane, int width, std::uint8_t* room,
                  std::vector<std::uint8_t>& out) {
  const std::size_t count = plane.size() / halves, stream_max = rans_stream_bytes_max(count);
  const auto streams = std::make_unique_for_overwrite<std::uint8_t[]>(halves * stream_max);
  std::array<std::uint16_t, halves * rans_symbols> frequencies;
  std::array<RansTable, halves> tables;
  std::array<RansEncodeJob, halves> jobs;
  std::array<std::uint8_t, halves> bases{};
  std::array<std::vector<std::uint8_t>, halves> escapes;
  for (std::size_t half = 0; half < halves; ++half) {
    const std::uint8_t* const values = plane.data() + half * count;
    std::uint8_t* const symbols = room + half * count;
    const auto counts = byte_counts({values, count});
    const std::uint8_t base = bases[half] = width == 8 ? best_base(counts) : 0;
    std::array<std::uint64_t, rans_symbols> by_symbol{};
    for (std::size_t each = 0; each < 256; ++each) by_symbol[std::min<std::size_t>(each, rans_escape)] += counts[(base + each) % 256];
    for (std::size_t i = 0; i < count; ++i) symbols[i] = std::min(static_cast<std::uint8_t>(values[i] - base), rans_escape);
    for (std::size_t i = 0; width == 8 && escapes[half].size() < by_symbol[rans_escape]; ++i) {
      if (symbols[i] == rans_escape) escapes[half].push_back(values[i]);
    }
    Frequencies row;
    if (!rans_quantise(by_symbol, row) || !rans_build(row, tables[half])) return false;
    std::ranges::copy(row, frequencies.begin() + static_cast<std::ptrdiff_t>(half * rans_symbols));
    jobs[half] = {tables, {run_tables + half, 1}, {streams.get() + half * stream_max, stream_max}, symbols, count, count, 0};
  }
  if (!rans_encode(path, jobs)) return false;
  const std::vector<std::uint8_t> form = rans_write_tables(frequencies);
  out.insert(out.end(), {bases[0], bases[1], 0, 0});
  put_word(out, form.size());
  for (const auto& each : escapes) put_word(out, each.size());
  for (const auto& job : jobs) put_word(out, job.stream_bytes);
  out.insert(out.end(), form.begin(), form.end());
  for (const auto& job : jobs) out.insert(out.end(), job.stream.end() - static_cast<std::ptrdiff_t>(job.stream_bytes), job.stream.end());
  for (const auto& each : escapes) out.insert(out.end(), each.begin(), each.end());
  return true;
}

}  // namespace

std::vector<std::uint8_t> lossless_encode(const RansPath& path, std::span<const std::uint8_t> elements, SplitFormat format) {
  const std::size_t planes = plane_count(format), count = elements.size() / item_bytes(format);
  if (count == 0 || count % halves != 0 || elements.size() != count * item_bytes(format)) return {};
  if (count > std::numeric_limits<std::uint32_t>::max()) return {};
  // The planes, and room for the symbols of one.
  const auto room = std::make_unique_for_overwrite<std::uint8_t[]>((planes + 1) * count);
  split_planes(elements, format, room.get());
  std::vector<std::uint8_t> section(head_bytes * planes);
  section.reserve(section.size() + planes * count);
  for (std::size_t number = 0; number < planes; ++number) {
    const std::span<const std::uint8_t> plane(room.get() + number * count, count);
    const std::size_t start = section.size();
    const int width = plane_bits(format, number);
    std::uint8_t method = stored;
    if (std::memcmp(plane.data(), plane.data() + 1, count - 1) == 0) {
      method = constant;
      section.push_back(plane[0]);
    } else if (width < 8 || !is_noise(plane)) {
      const bool is_coded = encode_coded(path, plane, width, room.get() + planes * count, section);
      method = is_coded && section.size() - start < count ? coded : stored;
    }
    if (method == stored) section.resize(start);
    if (method == stored) section.insert(section.end(), plane.begin(), plane.end());
    std::uint8_t* const head = section.data() + head_bytes * number;
    head[0] = method;
    const auto size = static_cast<std::uint32_t>(section.size() - start);
    std::memcpy(head + 4, &size, sizeof size);
  }
  return section;
}

std::string lossless_decode(const RansPath& path, std::span<const std::uint8_t> section, SplitFormat format,
                            std::span<std::uint8_t> elements) {
  const std::size_t planes = plane_count(format), count = elements.size() / item_bytes(format);
  if (count == 0 || count % halves != 0 || elements.size() != count * item_bytes(format)) return "a layer is keys and as many values";
  Reader reader(section);
  std::span<const std::uint8_t> heads;
  if (!reader.take(head_bytes * planes, heads)) return "a section is cut";
  const auto room = std::make_unique_for_overwrite<std::uint8_t[]>(planes * count);
  PlaneBytes bytes;
  for (std::size_t plane = 0; plane < planes; ++plane) {
    const auto head = heads.subspan(head_bytes * plane, head_bytes);
    const int width = plane_bits(format, plane);
    std::uint8_t* const own = room.get() + plane * count;
    std::span<const std::uint8_t> body;
    if (head[1] != 0 || head[2] != 0 || head[3] != 0) return "a plane has fields that are not zero";
    if (!reader.take(word_at(head, 4), body)) return "a section is cut";
    bytes[plane] = own;
    if (head[0] == stored && body.size() == count) {
      bytes[plane] = body.data();
    } else if (head[0] == constant && body.size() == 1) {
      std::memset(own, body[0], count);
    } else if (head[0] == coded) {
      std::string wrong = decode_coded(path, body, width, count, own);
      if (!wrong.empty()) return wrong;
      continue;
    } else {
      return "a plane has an unknown method, or bytes that are not its values";
    }
    if (width < 8 && std::any_of(body.begin(), body.end(), [&](std::uint8_t each) { return each >> width != 0; })) {
      return "a plane holds a value of more bits";
    }
  }
  if (!reader.left().empty()) return "a section has bytes too many";
  join_planes(bytes, format, elements);
  return "";
}

}  // namespace kvtide
