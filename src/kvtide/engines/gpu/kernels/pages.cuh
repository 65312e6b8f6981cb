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
