// Sections of `lossless-2` (docs/format.md): a layer's planes, stored, constant or coded by rANS.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "rans.hpp"
#include "split.hpp"

namespace kvtide {

// Returns the section of a layer, whose keys come first. Empty unless `elements` are whole and of an even number, one of each at least.
std::vector<std::uint8_t> lossless_encode(const RansPath& path, std::span<const std::uint8_t> elements, SplitFormat format);

// Writes the layer that a section holds. Returns what is wrong with the section, empty if nothing is; else `elements` hold anything.
std::string lossless_decode(const RansPath& path, std::span<const std::uint8_t> section, SplitFormat format,
                            std::span<std::uint8_t> elements);

}  // namespace kvtide
