// Products of int16 in int32 on tensor cores that take bytes: each factor is 256 high + low, which makes four products.
//
// Sums wrap at 32 bits as the processor's do, so every order of summation gives the same bits.
#pragma once

#include "base.cuh"

// A warp's tile: (16, 32) bytes of a, (32, 8) of b, (16, 8) sums. As mma.sync m16n8k32 lays them out over lanes, with
// g = lane / 4, q = lane % 4: a's words 0 to 3 are rows g, g + 8, g, g + 8, columns from 4 q, 4 q, 4 q + 16, 4 q + 16 on; b's words are
// rows from 4 q and 4 q + 16 on of column g; the sums are rows g, g, g + 8, g + 8, columns 2 q, 2 q + 1, 2 q, 2 q + 1.
struct TileA {
  u32 words[4];
};
struct TileB {
  u32 words[2];
};
struct TileSums {
  i32 at[4];
};

#ifndef KVTIDE_EMULATION
#define KVTIDE_MMA(a_type, b_type)                                                                                        \
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." a_type "." b_type ".s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+r"(sums.at[0]), "+r"(sums.at[1]), "+r"(sums.at[2]), "+r"(sums.at[3])                                    \
               : "r"(a.words[0]), "r"(a.words[1]), "r"(a.words[2]), "r"(a.words[3]), "r"(b.words[0]), "r"(b.words[1]))

template <bool is_a_signed, bool is_b_signed>
INLINE void multiply_tile(TileSums& sums, const TileA& a, const TileB& b) {
  if constexpr (is_a_signed && is_b_signed) KVTIDE_MMA("s8", "s8");
  if constexpr (is_a_signed && !is_b_signed) KVTIDE_MMA("s8", "u8");
  if constexpr (!is_a_signed && is_b_signed) KVTIDE_MMA("u8", "s8");
  if constexpr (!is_a_signed && !is_b_signed) KVTIDE_MMA("u8", "u8");
}
#endif

constexpr u32 tile_tokens = 64;   // of a block
constexpr u32 tile_columns = 64;
constexpr u32 tile_depth = 32;
constexpr u32 matrix_threads = 128;  // four warps, each 16 tokens by all columns
constexpr u32 tile_columns_mma = 8;
constexpr u32 tiles_per_warp = tile_columns / tile_columns_mma;

// Rows of 32 bytes stand 48 apart, so that the lanes of a warp meet in no bank.
constexpr u32 row_words = 12;
struct alignas(16) Bytes16 {
  u32 words[4];
};
struct MatrixShared {
  Bytes16 a_high[tile_tokens * row_words / 4], a_low[tile_tokens * row_words / 4];
  Bytes16 b_high[tile_columns * row_words / 4], b_low[tile_columns * row_words / 4];
};

// High and low bytes of a matrix, rows of `stride` bytes, a multiple of 32; rows are padded to whole tiles.
struct ByteMatrix {
  const u8* high;
  const u8* low;
  u64 stride;
};

INLINE void load_rows(Bytes16* to, const u8* from, u64 stride, u64 first_row, u32 depth) {
  const u32 row = threadIdx.x / 2, half = threadIdx.x % 2;
  to[row * (row_words / 4) + half] = *reinterpret_cast<const Bytes16*>(from + (first_row + row) * stride + depth + 16 * half);
}

INLINE TileA tile_a(const Bytes16* rows, u32 first_row, u32 lane) {
  const u32* words = rows[0].words + (first_row + lane / 4) * row_words + lane % 4;
  return {{words[0], words[8 * row_words], words[4], words[8 * row_words + 4]}};
}

INLINE TileB tile_b(const Bytes16* columns, u32 first_column, u32 lane) {
  const u32* words = columns[0].words + (first_column + lane / 4) * row_words + lane % 4;
  return {{words[0], words[4]}};
}

struct WarpSums {
  u32 at[tiles_per_warp][4];
};

// Sums over `depth` of 64 rows of a by 64 rows of b: each warp gets those of its 16 rows of a. All threads of the block call it.
INLINE void multiply_block(MatrixShared& shared, const ByteMatrix& a, u64 a_row, const ByteMatrix& b, u64 b_row, u32 depth,
                           WarpSums& result) {
  const u32 lane = lane_of_warp(), warp = warp_of_block();
  TileSums high[tiles_per_warp] = {}, cross[tiles_per_warp] = {}, low[tiles_per_warp] = {};
  for (u32 at = 0; at < depth; at += tile_depth) {
    __syncthreads();
    load_rows(shared.a_high, a.high, a.stride, a_row, at);
    load_rows(shared.a_low, a.low, a.stride, a_row, at);
    load_rows(shared.b_high, b.high, b.stride, b_row, at);
    load_rows(shared.b_low, b.low, b.stride, b_row, at);
    __syncthreads();
    const TileA a_high = tile_a(shared.a_high, 16 * warp, lane), a_low = tile_a(shared.a_low, 16 * warp, lane);
#pragma unroll
    for (u32 tile = 0; tile < tiles_per_warp; ++tile) {
      const TileB b_high = tile_b(shared.b_high, tile * tile_columns_mma, lane);
      const TileB b_low = tile_b(shared.b_low, tile * tile_columns_mma, lane);
      multiply_tile<true, true>(high[tile], a_high, b_high);
      multiply_tile<true, false>(cross[tile], a_high, b_low);
      multiply_tile<false, true>(cross[tile], a_low, b_high);
      multiply_tile<false, false>(low[tile], a_low, b_low);
    }
  }
#pragma unroll
  for (u32 tile = 0; tile < tiles_per_warp; ++tile) {
    for (u32 i = 0; i < 4; ++i) {
      result.at[tile][i] = (static_cast<u32>(high[tile].at[i]) << 16) + (static_cast<u32>(cross[tile].at[i]) << 8) +
                           static_cast<u32>(low[tile].at[i]);
    }
  }
}
