#include "split.hpp"

#include <bit>
#include <cstring>

namespace kvtide {
namespace {

static_assert(std::endian::native == std::endian::little, "the stored formats are little-endian");

template <typename Word>
void split_words(const std::uint8_t* elements, std::size_t count, std::uint8_t* planes) {
  constexpr std::size_t item_bytes = sizeof(Word);
  for (std::size_t i = 0; i < count; ++i) {
    Word word;
    std::memcpy(&word, elements + i * item_bytes, item_bytes);
    word = std::rotl(word, 1);
    for (std::size_t plane = 0; plane < item_bytes; ++plane) {
      planes[plane * count + i] = static_cast<std::uint8_t>(word >> (8 * (item_bytes - 1 - plane)));
    }
  }
}

template <typename Word>
void join_words(const std::uint8_t* planes, std::size_t count, std::uint8_t* elements) {
  constexpr std::size_t item_bytes = sizeof(Word);
  for (std::size_t i = 0; i < count; ++i) {
    Word word = 0;
    for (std::size_t plane = 0; plane < item_bytes; ++plane) {
      word = static_cast<Word>(static_cast<Word>(word << 8) | planes[plane * count + i]);
    }
    word = std::rotr(word, 1);
    std::memcpy(elements + i * item_bytes, &word, item_bytes);
  }
}

bool are_sizes_valid(std::size_t source_bytes, std::size_t target_bytes, std::size_t item_bytes) {
  return (item_bytes == 2 || item_bytes == 4) && source_bytes == target_bytes && source_bytes % item_bytes == 0;
}

}  // namespace

bool split_planes(std::span<const std::uint8_t> elements, std::size_t item_bytes, std::span<std::uint8_t> planes) {
  if (!are_sizes_valid(elements.size(), planes.size(), item_bytes)) return false;
  const std::size_t count = elements.size() / item_bytes;
  if (item_bytes == 2) {
    split_words<std::uint16_t>(elements.data(), count, planes.data());
  } else {
    split_words<std::uint32_t>(elements.data(), count, planes.data());
  }
  return true;
}

bool join_planes(std::span<const std::uint8_t> planes, std::size_t item_bytes, std::span<std::uint8_t> elements) {
  if (!are_sizes_valid(planes.size(), elements.size(), item_bytes)) return false;
  const std::size_t count = planes.size() / item_bytes;
  if (item_bytes == 2) {
    join_words<std::uint16_t>(planes.data(), count, elements.data());
  } else {
    join_words<std::uint32_t>(planes.data(), count, elements.data());
  }
  return true;
}

}  // namespace kvtide
