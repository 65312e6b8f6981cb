#include "split.hpp"

#include <bit>
#include <cstring>

namespace kvtide {
namespace {

static_assert(std::endian::native == std::endian::little, "the stored formats are little-endian");

template <SplitFormat format, class Word>
void split_words(const std::uint8_t* __restrict elements, std::size_t count, std::uint8_t* __restrict planes) {
  for (std::size_t i = 0; i < count; ++i) {
    Word word;
    std::memcpy(&word, elements + i * sizeof(Word), sizeof(Word));
    word = std::rotl(word, 1);
    int shift = 8 * sizeof(Word);
    for (std::size_t plane = 0; plane < plane_count(format); ++plane) {
      shift -= plane_bits(format, plane);
      planes[plane * count + i] = static_cast<std::uint8_t>(word >> shift & ((1 << plane_bits(format, plane)) - 1));
    }
  }
}

template <SplitFormat format, class Word>
void join_words(const PlaneBytes& planes, std::size_t count, std::uint8_t* __restrict elements) {
  const std::uint8_t* __restrict from[plane_count(format)];
  for (std::size_t plane = 0; plane < plane_count(format); ++plane) from[plane] = planes[plane];
  for (std::size_t i = 0; i < count; ++i) {
    Word word = 0;
    for (std::size_t plane = 0; plane < plane_count(format); ++plane) {
      word = static_cast<Word>(static_cast<Word>(word << plane_bits(format, plane)) | from[plane][i]);
    }
    word = std::rotr(word, 1);
    std::memcpy(elements + i * sizeof(Word), &word, sizeof(Word));
  }
}

}  // namespace

void split_planes(std::span<const std::uint8_t> elements, SplitFormat format, std::uint8_t* planes) {
  const std::size_t count = elements.size() / item_bytes(format);
  const std::uint8_t* const from = elements.data();
  if (format == SplitFormat::bfloat16) split_words<SplitFormat::bfloat16, std::uint16_t>(from, count, planes);
  if (format == SplitFormat::float16) split_words<SplitFormat::float16, std::uint16_t>(from, count, planes);
  if (format == SplitFormat::float32) split_words<SplitFormat::float32, std::uint32_t>(from, count, planes);
}

void join_planes(const PlaneBytes& planes, SplitFormat format, std::span<std::uint8_t> elements) {
  const std::size_t count = elements.size() / item_bytes(format);
  std::uint8_t* const to = elements.data();
  if (format == SplitFormat::bfloat16) join_words<SplitFormat::bfloat16, std::uint16_t>(planes, count, to);
  if (format == SplitFormat::float16) join_words<SplitFormat::float16, std::uint16_t>(planes, count, to);
  if (format == SplitFormat::float32) join_words<SplitFormat::float32, std::uint32_t>(planes, count, to);
}

}  // namespace kvtide
