// Bit fields, lowest bit first: bit i of a buffer is bit i % 8 of byte i / 8. The last byte's unused bits are zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvtide {

class BitWriter {
 public:
  // Appends the lowest `width` bits, at most 32.
  void put(std::uint32_t value, unsigned width) {
    for (unsigned bit = 0; bit < width; ++bit, ++bits_) {
      if (bits_ % 8 == 0) bytes_.push_back(0);
      bytes_.back() = static_cast<std::uint8_t>(bytes_.back() | (value >> bit & 1u) << bits_ % 8);
    }
  }

  std::vector<std::uint8_t>& bytes() { return bytes_; }

 private:
  std::vector<std::uint8_t> bytes_;
  std::size_t bits_ = 0;
};

class BitReader {
 public:
  explicit BitReader(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

  // Takes `width` bits, at most 32; bits beyond the end are zero and make is_whole() false.
  std::uint32_t take(unsigned width) {
    std::uint32_t value = 0;
    for (unsigned bit = 0; bit < width; ++bit, ++at_) {
      if (at_ / 8 < bytes_.size()) value |= (static_cast<std::uint32_t>(bytes_[at_ / 8]) >> at_ % 8 & 1u) << bit;
    }
    return value;
  }

  // Tells whether exactly the buffer was read, but for less than a byte of zeros.
  bool is_whole() const {
    if ((at_ + 7) / 8 != bytes_.size()) return false;
    return at_ % 8 == 0 || bytes_.back() >> at_ % 8 == 0;
  }

 private:
  std::span<const std::uint8_t> bytes_;
  std::size_t at_ = 0;
};

}  // namespace kvtide
