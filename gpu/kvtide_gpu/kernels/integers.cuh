// Whole numbers (docs/codec.md, "Whole numbers"): high parts as symbols, escapes, low bits in planes.
#pragma once

#include "rans.cuh"

constexpr u32 integer_planes = 6;
constexpr i32 integer_centre = 15, integer_max = 511;

// Numbers, run by run: a stream's, or some of its runs'.
struct IntegerRuns {
  i16* numbers;       // (runs, symbols); 0 where they are not here
  const u8* shifts;   // low bits of each run's numbers
  const u32* ranks;   // (runs, planes): how many runs before it have bits in a plane
  u32* planes;        // zeros where numbers are coded
  u32 plane_starts[integer_planes];  // bytes
  u32 symbols, zero;
};
static_assert(sizeof(IntegerRuns) == 64);

INLINE u64 low_bit(const IntegerRuns& r, u32 plane, u32 run, u32 at) {
  return 8 * u64{r.plane_starts[plane]} + u64{r.ranks[run * integer_planes + plane]} * r.symbols + at;
}

// A number whose symbol or escape was decoded, with its low bits.
INLINE i32 number_of(const IntegerRuns& r, u32 run, u32 at) {
  u32 value = static_cast<u16>(r.numbers[u64{run} * r.symbols + at]);
#pragma unroll 1
  for (u32 plane = 0; plane < r.shifts[run]; ++plane) {
    const u64 bit = low_bit(r, plane, run, at);
    value |= (r.planes[bit / 32] >> bit % 32 & 1u) << plane;
  }
  return static_cast<i16>(value);
}

// Symbols of numbers; the escapes among them go to the end of `escapes`, low bits to their planes.
struct IntegerSymbols {
  const IntegerRuns& runs;
  i16* escapes;
  u32 escapes_left;

  INLINE u32 take(u32 run, u32 at, u32 lane, bool is_active) {
    const i32 value = is_active ? runs.numbers[at + lane] : 0;
    const u32 shift = runs.shifts[run];
    const i32 high = (value >> shift) + integer_centre;
    const bool is_small = value > -integer_max && value < integer_max && high >= 0 && high < static_cast<i32>(rans_escape);
    const u32 mask = ballot(is_active && !is_small);
    if (is_active && !is_small) escapes[escapes_left - count_bits(mask >> lane)] = static_cast<i16>(value);
    escapes_left -= count_bits(mask);
#pragma unroll 1
    for (u32 plane = 0; plane < shift; ++plane) {
      // (Unrolled, this kernel takes 300 KB on sm_120.)
      const u32 bits = ballot(is_active && (value >> plane & 1) != 0);
      const u64 first = low_bit(runs, plane, run, at - run * runs.symbols);
      const u32 offset = static_cast<u32>(first % 32);
      if (lane == 0 && bits != 0) {
        // Other runs' bits are in the same words.
        atomicAdd(runs.planes + first / 32, bits << offset);
        if (offset != 0 && bits >> (32 - offset) != 0) atomicAdd(runs.planes + first / 32 + 1, bits >> (32 - offset));
      }
    }
    return is_small ? static_cast<u32>(high) : rans_escape;
  }
};

struct IntegerStream {
  RansStream rans;  // `escapes`: room for as many as there are numbers, filled from its end
  IntegerRuns numbers;
};
static_assert(sizeof(IntegerStream) == 136);

struct IntegersArgs {
  const IntegerStream* streams;
  u64 stream_count;
  u32* sizes;  // (2, streams): bytes of each stream, bytes of its escapes
};

KERNEL integers_encode(IntegersArgs args) {
  const u32 lane = lane_of_warp();
  for (u64 i = first_job(); i < args.stream_count; i += job_stride()) {
    const RansStream job = args.streams[i].rans;
    const IntegerRuns runs = args.streams[i].numbers;
    IntegerSymbols symbols = {runs, reinterpret_cast<i16*>(job.escapes), job.count};
    encode_job({nullptr, 0, args.sizes}, i, job, symbols, lane);
    if (lane == 0) args.sizes[args.stream_count + i] = 2 * (job.count - symbols.escapes_left);
  }
}
