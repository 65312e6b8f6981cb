// CacheGen's and chunkwise quantising (docs/codec.md): what native/quantise.cpp computes, bit for bit.
#pragma once

#include "elements.cuh"
#include "integers.cuh"

// K or V of a layer, and its numbers: of each position in a group, a number a group for each channel.
struct GroupedHalf {
  u64 base;                     // address of the values
  const i64* token_starts;      // elements behind `base`, -1 for a token that is not wanted
  u16* scales;                  // (groups)
  const IntegerRuns* positions; // (group_tokens), runs are channels; the first has the anchors
  u32* status;                  // of the block
  u64 head_stride;              // elements
  u32 tokens, group_tokens, channels, head_dim, element;
  float half, step;
  u32 zero;
};
static_assert(sizeof(GroupedHalf) == 80);

struct GroupsArgs {
  const GroupedHalf* halves;
  u64 half_count;
  u64 jobs_max;  // of a half
};

constexpr u32 not_finite = 2;
constexpr float delta_max = 32767.0f;

INLINE i64 element_at(const GroupedHalf& h, u32 token, u32 channel) {
  return h.token_starts[token] + static_cast<i64>(channel / h.head_dim * h.head_stride) + channel % h.head_dim;
}

// Bits of the largest magnitude of a token: those of floats are ordered as they are, and NaN's are the largest.
INLINE u32 largest_of(const GroupedHalf& h, u32 token, u32 lane) {
  u32 largest = 0;
  for (u32 c = lane; c < h.channels; c += warp_lanes) {
    const u32 bits = __float_as_uint(take_element(h.base, element_at(h, token, c), h.element)) & 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  for (u32 step = warp_lanes / 2; step != 0; step /= 2) {
    const u32 other = shuffle(largest, lane ^ step);
    largest = other > largest ? other : largest;
  }
  return largest;
}

// To the nearest whole number, half to even, by an addition.
INLINE i16 rounded(float value, float limit) {
  value = value < -limit ? -limit : value > limit ? limit : value;
  return static_cast<i16>((value + 12582912.0f) - 12582912.0f);
}

// Makes numbers of values: a warp for each group.
KERNEL groups_quantise(GroupsArgs args) {
  const u32 lane = lane_of_warp();
  for (u64 i = first_job(); i < args.half_count * args.jobs_max; i += job_stride()) {
    const GroupedHalf h = args.halves[i / args.jobs_max];
    const u32 group = static_cast<u32>(i % args.jobs_max), first = group * h.group_tokens;
    const IntegerRuns anchors = h.positions[0];
    const float inverse_step = 1.0f / h.step;
    float factor = 0.0f, unit = 0.0f;
    for (u32 token = first; token < smaller(first + h.group_tokens, h.tokens); ++token) {
      const u32 largest = largest_of(h, token, lane);
      if (largest > float_max) {
        if (lane == 0) *h.status = not_finite;
        break;
      }
      const IntegerRuns to = h.positions[token - first];
      if (token == first) {
        // The smallest bfloat16 that is not below; above the largest there is only infinity.
        const u16 bits = static_cast<u16>(smaller((largest + 0xffffu) >> 16, 0x7f7fu));
        const float scale = from_bfloat(bits), found = h.half / scale;
        factor = found <= __uint_as_float(float_max) ? found : 0.0f;
        unit = scale / h.half;
        if (lane == 0) h.scales[group] = bits;
      }
      for (u32 c = lane; c < h.channels; c += warp_lanes) {
        const float value = take_element(h.base, element_at(h, token, c), h.element);
        const u64 at = u64{c} * to.symbols + group;
        if (token == first) {
          to.numbers[at] = rounded(value * factor, h.half);
        } else {
          const float anchor = static_cast<float>(anchors.numbers[u64{c} * anchors.symbols + group]) * unit;
          to.numbers[at] = rounded((value - anchor) * inverse_step, delta_max);
        }
      }
    }
  }
}

constexpr u32 restored_tokens = 32;

// Makes values of numbers: a warp for each 32 channels by 32 tokens.
KERNEL groups_restore(GroupsArgs args) {
  const u32 lane = lane_of_warp();
  for (u64 i = first_job(); i < args.half_count * args.jobs_max; i += job_stride()) {
    const GroupedHalf& h = args.halves[i / args.jobs_max];
    const u32 job = static_cast<u32>(i % args.jobs_max), across = static_cast<u32>(div_ceil(h.channels, warp_lanes));
    const u32 channel = job % across * warp_lanes + lane, first = job / across * restored_tokens;
    if (channel >= h.channels || *h.status != 0) continue;
    for (u32 token = first; token < smaller(first + restored_tokens, h.tokens); ++token) {
      if (h.token_starts[token] < 0) continue;
      const u32 group = token / h.group_tokens, position = token % h.group_tokens;
      const float unit = from_bfloat(h.scales[group]) / h.half;
      float value = static_cast<float>(number_of(h.positions[0], channel, group)) * unit;
      if (position != 0) {
        const IntegerRuns& deltas = h.positions[position];
        value += static_cast<float>(deltas.numbers == nullptr ? 0 : number_of(deltas, channel, group)) * h.step;
      }
      put_element(h.base, element_at(h, token, channel), h.element, value);
    }
  }
}
