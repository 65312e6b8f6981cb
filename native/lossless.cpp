#include "lossless.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

namespace kvtide {
namespace {

constexpr std::uint8_t stored = 0, constant = 1, coded = 2;

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
  constexpr std::size_t halves = 2;
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
  static constexpr std::uint16_t run_tables[halves] = {0, 1};
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

}  // namespace

std::string lossless_decode(const RansPath& path, std::span<const std::uint8_t> section, SplitFormat format,
                            std::span<std::uint8_t> elements) {
  const std::size_t planes = plane_count(format), count = elements.size() / item_bytes(format);
  if (count == 0 || count % 2 != 0 || elements.size() != count * item_bytes(format)) return "a layer is keys and as many values";
  Reader reader(section);
  std::span<const std::uint8_t> heads;
  if (!reader.take(8 * planes, heads)) return "a section is cut";
  const auto room = std::make_unique_for_overwrite<std::uint8_t[]>(planes * count);
  PlaneBytes bytes;
  for (std::size_t plane = 0; plane < planes; ++plane) {
    const auto head = heads.subspan(8 * plane, 8);
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
