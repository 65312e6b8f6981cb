// Pages of an engine to one piece of memory and back, so that a swap is a few large copies and not one for each page.
#pragma once

#include "base.cuh"

struct alignas(16) PageVector {
  u32 words[4];
};

struct PagesArgs {
  const u64* bases;    // (layers): addresses of page 0
  const i64* pages;    // (count)
  u64 staging;         // (count, layers, page_bytes)
  u64 count, layers;
  u64 page_bytes;      // a multiple of 16, as all addresses are
  u64 page_stride;     // bytes
  u64 to_pages;        // 0: from pages to staging
};

// A warp moves this much at a time, all of it under way at once.
constexpr u32 piece_vectors = 4;

KERNEL pages_copy(PagesArgs args) {
  const u32 lane = lane_of_warp();
  const u64 vectors = args.page_bytes / sizeof(PageVector), pieces = div_ceil(vectors, piece_vectors * warp_lanes);
  for (u64 i = first_job(); i < args.count * args.layers * pieces; i += job_stride()) {
    const u64 cell = i / pieces, first = i % pieces * (piece_vectors * warp_lanes) + lane;
    PageVector* page = reinterpret_cast<PageVector*>(args.bases[cell % args.layers] +
                                                     static_cast<u64>(args.pages[cell / args.layers]) * args.page_stride);
    PageVector* staged = reinterpret_cast<PageVector*>(args.staging) + cell * vectors;
    const PageVector* from = args.to_pages != 0 ? staged : page;
    PageVector* to = args.to_pages != 0 ? page : staged;
    PageVector held[piece_vectors];
#pragma unroll
    for (u32 piece = 0; piece < piece_vectors; ++piece) {
      if (first + piece * warp_lanes < vectors) held[piece] = from[first + piece * warp_lanes];
    }
#pragma unroll
    for (u32 piece = 0; piece < piece_vectors; ++piece) {
      if (first + piece * warp_lanes < vectors) to[first + piece * warp_lanes] = held[piece];
    }
  }
}

struct BlockArgs {
  const u64* bases;         // (layers, 2): addresses of K and V of the first token of page 0
  const i64* token_starts;  // (tokens): elements behind a base, -1 for tokens that no page is given for
  u64 block;                // (layers, 2, tokens, kv_heads, head_dim)
  u64 layers, tokens, kv_heads;
  u64 head_bytes, head_stride;  // bytes
  u64 item_bytes, unit_bytes;   // a unit is 16 bytes where all addresses and sizes are whole 16 bytes, else 2
  u64 to_pages;                 // 0: from pages to the block
};

// A warp for each token of a layer's keys or values.
template <class Unit>
INLINE void copy_block(const BlockArgs& args) {
  const u32 lane = lane_of_warp();
  const u64 head_units = args.head_bytes / sizeof(Unit), row_units = args.kv_heads * head_units;
  for (u64 i = first_job(); i < args.layers * 2 * args.tokens; i += job_stride()) {
    const i64 start = args.token_starts[i % args.tokens];
    if (start < 0) continue;
    const u64 token = args.bases[i / args.tokens] + static_cast<u64>(start) * args.item_bytes;
    Unit* row = reinterpret_cast<Unit*>(args.block) + i * row_units;
    for (u64 unit = lane; unit < row_units; unit += warp_lanes) {
      Unit* page = reinterpret_cast<Unit*>(token + unit / head_units * args.head_stride) + unit % head_units;
      if (args.to_pages != 0) {
        *page = row[unit];
      } else {
        row[unit] = *page;
      }
    }
  }
}

KERNEL block_copy(BlockArgs args) {
  if (args.unit_bytes == sizeof(PageVector)) {
    copy_block<PageVector>(args);
  } else {
    copy_block<u16>(args);
  }
}
