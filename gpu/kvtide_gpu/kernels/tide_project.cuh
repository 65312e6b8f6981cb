// Elements in an engine's pages to coefficients of the codec tide: gathered, turned back, scaled, transformed, rounded.
//
// Sums of squares go by sixteen places and then in order, as on the processor, so that tokens are halved alike.
#pragma once

#include "tide_restore.cuh"

// One group of a range of a block, to be encoded.
struct TideSource {
  const ColumnPair* pairs;   // (columns / 2), as for writing
  const float* mean;         // (columns)
  const float* scale;        // (columns): a value times it is in 16ths of a step
  const i64* token_starts;   // (tokens)
  const u64* bases;          // (streams)
  const u64* turns;          // (streams): of the angles that turn keys back
  const u8* matrix_high;     // (components padded, depth); none if `order` is used
  const u8* matrix_low;
  const u16* order;          // (components): the value that each is
  float* scaled;             // (tokens, depth): scratch
  u8* high;                  // (tokens padded, depth): scratch
  u8* low;
  i32* halvings;             // (tokens): how often a token was halved, -1 if it stands apart
  u32* apart;                // (tokens): 1 if a token of the range stands apart
  i16* out;                  // (components, tokens)
  float* squares;            // (tokens): sums of squared 16ths of a step, of tokens that may be coded
  u64* crossed;              // (tokens), zeros: sums of steps times what rounding took, in 2^-17 of a step's square
  u32* status;               // of the block: 2 if a value is not finite
  u32 components, tokens, depth, columns, values, angles, element, zero;
};
static_assert(sizeof(TideSource) == 176);

struct TideProjectArgs {
  const TideSource* sources;
  u64 source_count;
  u64 jobs_max;  // of a source
};

constexpr u32 norm_lanes = 16;
constexpr float norm_max = 131072.0f;
constexpr float value_max = 32000.0f;
constexpr i32 halvings_max = 8;
constexpr i32 coefficient_max = 2000;
constexpr u32 status_not_finite = 2;

struct Pair {
  float first, second;
};

INLINE bool is_finite(float value) { return (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u; }

// A pair of values of one token, keys turned back.
INLINE Pair take_pair(const TideSource& s, const ColumnPair& pair, u32 token) {
  const u64 base = s.bases[pair.stream];
  const i64 start = s.token_starts[token];
  const float first = take_element(base, start + pair.places[0], s.element);
  const float second = pair.values[1] >= 0 ? take_element(base, start + pair.places[1], s.element) : 0.0f;
  if (pair.angle < 0) return {first, second};
  const float* angles = reinterpret_cast<const float*>(s.turns[pair.stream]) + u64{token} * s.angles + pair.angle;
  const float cos = angles[0], sin = angles[u64{s.tokens} * s.angles];
  return {first * cos - second * sin, second * cos + first * sin};
}

INLINE void load_scaled(const TideSource& s, u32 token, u32 lane) {
  float* scaled = s.scaled + u64{token} * s.depth;
  for (u32 i = lane; i < s.columns / 2; i += warp_lanes) {
    const ColumnPair pair = s.pairs[i];
    if (pair.values[0] < 0) continue;
    const Pair found = take_pair(s, pair, token);
    if (!is_finite(found.first) || !is_finite(found.second)) *s.status = status_not_finite;
    scaled[pair.values[0]] = (found.first - s.mean[2 * i]) * s.scale[2 * i];
    if (pair.values[1] >= 0) scaled[pair.values[1]] = (found.second - s.mean[2 * i + 1]) * s.scale[2 * i + 1];
  }
  for (u32 i = s.values + lane; i < s.depth; i += warp_lanes) scaled[i] = 0.0f;
  __syncwarp();
}

// How often a token is halved to fit, -1 if it is too loud.
INLINE i32 halvings_of(const TideSource& s, u32 token, u32 lane) {
  const float* scaled = s.scaled + u64{token} * s.depth;
  float square = 0.0f, peak = 0.0f;
  for (u32 i = lane % norm_lanes; i < s.depth; i += norm_lanes) {
    const float value = scaled[i], magnitude = value < 0.0f ? -value : value;
    square += value * value;
    peak = magnitude > peak ? magnitude : peak;
  }
  float norm = 0.0f, loudest = 0.0f;
  for (u32 i = 0; i < norm_lanes; ++i) {
    norm += __uint_as_float(shuffle(__float_as_uint(square), i));
    const float other = __uint_as_float(shuffle(__float_as_uint(peak), i));
    loudest = other > loudest ? other : loudest;
  }
  if (lane == 0) s.squares[token] = norm;
  norm = sqrtf(norm);
  i32 halvings = 0;
  for (; norm > norm_max || loudest > value_max; norm *= 0.5f, loudest *= 0.5f) {
    if (++halvings > halvings_max) return -1;
  }
  return halvings;
}

// A warp for each token, and for each place that rows are padded by.
KERNEL tide_load(TideProjectArgs args) {
  const u32 lane = lane_of_warp();
  for (u64 i = first_job(); i < args.source_count * args.jobs_max; i += job_stride()) {
    const TideSource& s = args.sources[i / args.jobs_max];
    const u32 token = static_cast<u32>(i % args.jobs_max);
    if (token >= div_ceil(s.tokens, tile_tokens) * tile_tokens) continue;
    i32 halvings = -1;
    if (token < s.tokens) {
      load_scaled(s, token, lane);
      if (!any_lane(s.apart[token] != 0)) halvings = halvings_of(s, token, lane);
      __syncwarp();
      if (lane == 0) s.halvings[token] = halvings;
      if (lane == 0 && halvings < 0) s.apart[token] = 1;
    }
    // 2^-halvings; rounding to even by an addition, as on the processor.
    const float factor = __uint_as_float(static_cast<u32>(127 - halvings) << 23);
    for (u32 value = lane; value < s.depth; value += warp_lanes) {
      i16 whole = 0;
      if (halvings >= 0) whole = static_cast<i16>((s.scaled[u64{token} * s.depth + value] * factor + 12582912.0f) - 12582912.0f);
      s.high[u64{token} * s.depth + value] = static_cast<u8>(whole >> 8);
      s.low[u64{token} * s.depth + value] = static_cast<u8>(whole);
    }
  }
}

// Writes one coefficient in steps; a token that one does not fit stands apart. Returns the steps times what rounding took.
INLINE i64 put_steps(const TideSource& s, u32 component, u32 token, i32 sum) {
  if (component >= s.components || token >= s.tokens) return 0;
  const i32 halvings = s.halvings[token];
  i64 steps = 0, crossed = 0;
  if (halvings >= 0) {
    const i64 exact = i64{sum} * (1 << halvings);
    steps = (exact + (1 << 16)) >> 17;
    if (steps > coefficient_max || steps < -coefficient_max) s.apart[token] = 1;
    crossed = steps * (exact - steps * (1 << 17));
  }
  s.out[u64{component} * s.tokens + token] = static_cast<i16>(steps);
  return crossed;
}

// Sums of whole numbers, which wrap: any order gives the same.
INLINE void add_crossed(const TideSource& s, u32 token, i64 crossed) {
  if (crossed != 0) atomicAdd(s.crossed + token, static_cast<u64>(crossed));
}

// A block of 128 threads for each tile of 64 tokens by 64 components.
KERNEL tide_project(TideProjectArgs args) {
  __shared__ MatrixShared shared;
  const u32 lane = lane_of_warp(), warp = warp_of_block();
  for (u64 i = blockIdx.x; i < args.source_count * args.jobs_max; i += gridDim.x) {
    const TideSource& s = args.sources[i / args.jobs_max];
    const u32 job = static_cast<u32>(i % args.jobs_max), across = static_cast<u32>(div_ceil(s.components, tile_columns));
    if (job >= across * div_ceil(s.tokens, tile_tokens)) continue;
    const u32 first_component = job % across * tile_columns, first_token = job / across * tile_tokens;
    const ByteMatrix tokens = {s.high, s.low, s.depth}, rows = {s.matrix_high, s.matrix_low, s.depth};
    WarpSums sums;
    multiply_block(shared, tokens, first_token, rows, first_component, s.depth, sums);
    i64 crossed[2] = {0, 0};
#pragma unroll
    for (u32 tile = 0; tile < tiles_per_warp; ++tile) {
#pragma unroll
      for (u32 k = 0; k < 4; ++k) {
        const u32 component = first_component + tile * tile_columns_mma + 2 * (lane % 4) + k % 2;
        const u32 token = first_token + 16 * warp + 8 * (k / 2) + lane / 4;
        crossed[k / 2] += put_steps(s, component, token, static_cast<i32>(sums.at[tile][k]));
      }
    }
    for (u32 half = 0; half < 2; ++half) add_crossed(s, first_token + 16 * warp + 8 * half + lane / 4, crossed[half]);
  }
}

// Without a matrix: a warp for each component.
KERNEL tide_project_ordered(TideProjectArgs args) {
  const u32 lane = lane_of_warp();
  for (u64 i = first_job(); i < args.source_count * args.jobs_max; i += job_stride()) {
    const TideSource& s = args.sources[i / args.jobs_max];
    const u32 component = static_cast<u32>(i % args.jobs_max);
    if (component >= s.components) continue;
    for (u32 token = lane; token < s.tokens; token += warp_lanes) {
      const u64 at = u64{token} * s.depth + s.order[component];
      const i32 whole = static_cast<i32>(static_cast<i8>(s.high[at])) * 256 + s.low[at];
      add_crossed(s, token, put_steps(s, component, token, whole * 8192));
    }
  }
}

struct TideApartArgs {
  const TideSource* sources;
  u64 source_count;
  const u16* const* positions;  // of each source: tokens that stand apart
  const u64* counts;            // of each source
  float* const* out;            // of each source: (streams, count, channels)
  u64 count_max;
  u64 channels;
};

// The values of tokens that stand apart, keys turned back: a warp for each token of each source.
KERNEL tide_apart(TideApartArgs args) {
  const u32 lane = lane_of_warp();
  for (u64 i = first_job(); i < args.source_count * args.count_max; i += job_stride()) {
    const u64 source = i / args.count_max, index = i % args.count_max, count = args.counts[source];
    if (index >= count) continue;
    const TideSource& s = args.sources[source];
    for (u32 k = lane; k < s.columns / 2; k += warp_lanes) {
      const ColumnPair pair = s.pairs[k];
      if (pair.values[0] < 0) continue;
      const Pair found = take_pair(s, pair, args.positions[source][index]);
      float* row = args.out[source] + (static_cast<u64>(pair.stream) * count + index) * args.channels;
      row[static_cast<u64>(pair.values[0]) % args.channels] = found.first;
      if (pair.values[1] >= 0) row[static_cast<u64>(pair.values[1]) % args.channels] = found.second;
    }
  }
}
