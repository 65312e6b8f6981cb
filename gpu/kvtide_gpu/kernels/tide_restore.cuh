// Coefficients of the codec tide to elements in the engine's pages: pulled, transformed back, rotated, scattered.
#pragma once

#include "elements.cuh"
#include "matrix.cuh"
#include "tide_lists.cuh"

// Two neighbouring columns of a group's matrix: where their values go. Keys that turn together are such a pair.
struct ColumnPair {
  i64 places[2];  // elements behind the token's place in a page
  i32 values[2];  // number of the value in the group, -1 if there is none
  i32 stream;     // K or V of a layer of the group
  i32 angle;      // which angle of the token the pair is turned by, -1 if it is not
};
static_assert(sizeof(ColumnPair) == 32);

// One group of a range of a block. Columns are padded to whole tiles.
struct TideGroup {
  const i16* values;             // (rows, tokens), tokens in coded order
  const i16* scales;             // (rows), in units
  u8* high;                      // (tokens padded, depth): values in 16ths of a step
  u8* low;
  const u8* matrix_high;         // (columns, matrix_stride); none if `order` is used
  const u8* matrix_low;
  const i32* row_of;             // (values): without a matrix, the row that a value is, -1 if none
  const ColumnPair* pairs;       // (columns / 2)
  const float* mean;             // (columns)
  const float* scale;            // (columns)
  const u16* places;             // (tokens): the token at each place in coded order
  const i64* token_starts;       // (tokens): elements from a stream's base to a token, -1 if it is not wanted
  const u64* bases;              // (streams): addresses of pages
  const u64* turns;              // (streams): addresses of (tokens, angles) cosines, then sines
  const i32* apart_of;           // (tokens): which of the tokens that are kept whole it is, -1 if none
  const u16* apart_scales;       // (streams, apart, heads), bfloat16
  const i8* apart_values;        // (streams, apart, heads, head_dim)
  const u32* status;             // of the block: nothing is written if it is not 0
  const i8* pulls;               // (32, 4)
  u64 matrix_stride;
  u32 rows, tokens, depth, columns, channels, head_dim, angles, apart_count;
  i32 units;                     // the step of these coefficients
  u32 element;
  i8 gains[tide_parts];
  u32 zero;
};
static_assert(sizeof(TideGroup) == 208);

struct TideRestoreArgs {
  const TideGroup* groups;
  u64 group_count;
  u64 tiles_max;    // jobs of a group, at most
};

// The middle of what a coefficient stands for, in 16ths of a step, wrapping as 16 bits do.
INLINE i16 pulled(i16 value, const i8* pulls) {
  const i32 magnitude = static_cast<i16>(value < 0 ? -value : value);
  const i32 pull = magnitude == 1 ? pulls[1] : magnitude == 2 ? pulls[2] : magnitude > 2 ? pulls[3] : 0;
  return static_cast<i16>(value * 16 - (value < 0 ? -pull : pull));
}

INLINE const i8* pulls_of(const TideGroup& g, u32 row, u32 token) {
  return g.pulls + 4 * top_table(g.scales[row] + g.gains[part_of(token, g.tokens)] - g.units);
}

constexpr u32 pull_side = 32;

// A warp for each square of 32 components by 32 tokens, which it turns over.
KERNEL tide_pull(TideRestoreArgs args) {
  __shared__ i16 squares[place_warps][pull_side][pull_side + 1];
  const u32 lane = lane_of_warp();
  i16(&square)[pull_side][pull_side + 1] = squares[warp_of_block()];
  for (u64 i = first_job(); i < args.group_count * args.tiles_max; i += job_stride()) {
    const TideGroup& g = args.groups[i / args.tiles_max];
    const u32 job = static_cast<u32>(i % args.tiles_max), across = g.depth / pull_side;
    const u32 padded = static_cast<u32>(div_ceil(g.tokens, tile_tokens)) * tile_tokens;
    if (job >= across * (padded / pull_side)) continue;
    const u32 first_row = job % across * pull_side, first_token = job / across * pull_side, token = first_token + lane;
    for (u32 r = 0; r < pull_side; ++r) {
      const u32 row = first_row + r;
      const bool is_value = row < g.rows && token < g.tokens;
      square[r][lane] = is_value ? pulled(g.values[u64{row} * g.tokens + token], pulls_of(g, row, token)) : i16{0};
    }
    __syncwarp();
    for (u32 t = 0; t < pull_side; ++t) {
      const i16 value = square[lane][t];
      const u64 at = u64{first_token + t} * g.depth + first_row + lane;
      g.high[at] = static_cast<u8>(value >> 8);
      g.low[at] = static_cast<u8>(value);
    }
    __syncwarp();
  }
}

INLINE float apart_value(const TideGroup& g, i32 value, i32 stream, i32 apart) {
  const u32 channel = static_cast<u32>(value) % g.channels, heads = g.channels / g.head_dim;
  const u64 token = u64{static_cast<u32>(stream)} * g.apart_count + static_cast<u32>(apart);
  const float scale = from_bfloat(g.apart_scales[token * heads + channel / g.head_dim]);
  return static_cast<float>(g.apart_values[token * g.channels + channel]) * scale;
}

// Writes a pair of values of one token.
INLINE void put_pair(const TideGroup& g, const ColumnPair& pair, u32 token, float first, float second) {
  const i64 start = g.token_starts[token];
  if (start < 0 || pair.values[0] < 0) return;
  const i32 apart = g.apart_of[token];
  const bool has_second = pair.values[1] >= 0;
  if (apart >= 0) {
    first = apart_value(g, pair.values[0], pair.stream, apart);
    if (has_second) second = apart_value(g, pair.values[1], pair.stream, apart);
  }
  if (pair.angle >= 0) {
    const float* angles = reinterpret_cast<const float*>(g.turns[pair.stream]) + u64{token} * g.angles + pair.angle;
    const float cos = angles[0], sin = angles[u64{g.tokens} * g.angles];
    const float turned = first * cos - second * sin;
    second = second * cos + first * sin;
    first = turned;
  }
  const u64 base = g.bases[pair.stream];
  put_element(base, start + pair.places[0], g.element, first);
  if (has_second) put_element(base, start + pair.places[1], g.element, second);
}

// A block of 128 threads for each tile of 64 tokens by 64 columns.
KERNEL tide_restore(TideRestoreArgs args) {
  __shared__ MatrixShared shared;
  const u32 lane = lane_of_warp(), warp = warp_of_block();
  for (u64 i = blockIdx.x; i < args.group_count * args.tiles_max; i += gridDim.x) {
    const TideGroup& g = args.groups[i / args.tiles_max];
    const u32 job = static_cast<u32>(i % args.tiles_max), across = g.columns / tile_columns;
    if (job >= across * div_ceil(g.tokens, tile_tokens) || *g.status != 0) continue;
    const u32 first_column = job % across * tile_columns, first_token = job / across * tile_tokens;
    const ByteMatrix tokens = {g.high, g.low, g.depth}, columns = {g.matrix_high, g.matrix_low, g.matrix_stride};
    WarpSums sums;
    multiply_block(shared, tokens, first_token, columns, first_column, g.depth, sums);
#pragma unroll
    for (u32 tile = 0; tile < tiles_per_warp; ++tile) {
      const u32 column = first_column + tile * tile_columns_mma + 2 * (lane % 4);
      const ColumnPair pair = g.pairs[column / 2];
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        const u32 place = first_token + 16 * warp + 8 * half + lane / 4;
        if (place >= g.tokens) continue;
        const float first = static_cast<float>(static_cast<i32>(sums.at[tile][2 * half])) * g.scale[column] + g.mean[column];
        const float second = static_cast<float>(static_cast<i32>(sums.at[tile][2 * half + 1])) * g.scale[column + 1] + g.mean[column + 1];
        put_pair(g, pair, g.places[place], first, second);
      }
    }
  }
}

INLINE float ordered_value(const TideGroup& g, i32 value, u32 column, u32 place) {
  const i32 row = value < 0 ? -1 : g.row_of[value];
  if (row < 0 || row >= static_cast<i32>(g.rows)) return g.mean[column];
  const u32 component = static_cast<u32>(row);
  const i16 sixteenths = pulled(g.values[u64{component} * g.tokens + place], pulls_of(g, component, place));
  return static_cast<float>(sixteenths) * (g.scale[column] * 8192.0f) + g.mean[column];
}

// Without a matrix: a warp for 32 pairs of columns by 16 tokens, so that what it reads of a row is in the nearest cache.
constexpr u32 ordered_tokens = 16;
KERNEL tide_restore_ordered(TideRestoreArgs args) {
  const u32 lane = lane_of_warp();
  for (u64 i = first_job(); i < args.group_count * args.tiles_max; i += job_stride()) {
    const TideGroup& g = args.groups[i / args.tiles_max];
    const u32 job = static_cast<u32>(i % args.tiles_max), across = g.columns / tile_columns;
    if (job >= across * div_ceil(g.tokens, ordered_tokens) || *g.status != 0) continue;
    const u32 column = job % across * tile_columns + 2 * lane, first = job / across * ordered_tokens;
    const ColumnPair pair = g.pairs[column / 2];
    for (u32 place = first; place < smaller(first + ordered_tokens, g.tokens); ++place) {
      const float one = ordered_value(g, pair.values[0], column, place), two = ordered_value(g, pair.values[1], column + 1, place);
      put_pair(g, pair, g.places[place], one, two);
    }
  }
}
