// The quantisers of the published codecs, each one pass over a layer's K or V: no copy in another type or order is made.
//
// Input is token-major, (tokens, channels), in any element type; symbols come out channel-major, since a distribution
// belongs to a channel. All arithmetic is in float32, one operation at a time (no contraction), rounding half to even, so
// that the twin in the tests gives the same numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "elements.hpp"

namespace kvtide {

// The smallest bfloat16 that is not below a finite `value` >= 0: a scale that no value exceeds.
std::uint16_t scale_bits(float value);
float scale_value(std::uint16_t bits);

// Tokens in groups of `group`; the first of each is the anchor.
struct Grouping {
  std::size_t tokens, channels, group;
  std::size_t groups() const { return (tokens + group - 1) / group; }
  std::size_t deltas() const { return tokens - groups(); }
};

// Sum of squares of all deltas to their group's anchor, for the step; not finite if a value is not.
double delta_energy(std::span<const std::uint8_t> values, ElementType type, const Grouping& grouping);

// anchors: (channels, groups), each value as a share of its token's scale, from -half to half; a token of zeros has scale 0. deltas:
// (channels, deltas), in steps, against the anchor as it will be decoded. False, with the outputs unspecified, if a value is not
// finite. Spans have exactly these sizes. Groups of one token have no deltas: that is chunkwise quantising.
bool quantise(std::span<const std::uint8_t> values, ElementType type, const Grouping& grouping, int half, float step,
              std::span<std::int16_t> anchors, std::span<std::uint16_t> scales, std::span<std::int16_t> deltas);
void restore(std::span<const std::int16_t> anchors, std::span<const std::uint16_t> scales, std::span<const std::int16_t> deltas,
             const Grouping& grouping, int half, float step, ElementType type, std::span<std::uint8_t> values);

}  // namespace kvtide
