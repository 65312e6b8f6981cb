// What all kernels share: types, lanes, and the rules that let one source run on a GPU and on a processor.
//
// Built by NVRTC for GPUs and, with gpu/tests/emulation.hpp, by a C++ compiler for the twin that tests run everywhere. So: no
// headers, whole warps only (every lane of a warp meets every collective), arguments in one struct of 8-byte fields by value, and
// every kernel walks its jobs in a loop, so that any number of blocks will do: that number is the budget.
// Floats take one operation at a time (no contraction), as on the processor, so that bytes are the same.
#pragma once

#ifndef KVTIDE_EMULATION
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i16 = short;
using i32 = int;
using i64 = long long;
#endif

#define KERNEL extern "C" __global__ void
#define INLINE __device__ __forceinline__

constexpr u32 warp_lanes = 32;
constexpr u32 all_lanes = 0xffffffffu;

INLINE u32 lane_of_warp() { return threadIdx.x % warp_lanes; }
INLINE u32 warp_of_block() { return threadIdx.x / warp_lanes; }
INLINE u32 warps_of_block() { return blockDim.x / warp_lanes; }
// Numbers all warps of the grid: a job for each.
INLINE u64 first_job() { return u64{blockIdx.x} * warps_of_block() + warp_of_block(); }
INLINE u64 job_stride() { return u64{gridDim.x} * warps_of_block(); }

INLINE u32 ballot(bool is_set) { return __ballot_sync(all_lanes, is_set); }
INLINE bool any_lane(bool is_set) { return ballot(is_set) != 0; }
// `lane` counts modulo 32.
INLINE u32 shuffle(u32 value, u32 lane) { return __shfl_sync(all_lanes, value, static_cast<int>(lane)); }
INLINE u32 count_bits(u32 mask) { return static_cast<u32>(__popc(mask)); }
INLINE u32 lanes_below(u32 lane) { return (1u << lane) - 1u; }

INLINE u32 smaller(u32 a, u32 b) { return a < b ? a : b; }
INLINE i32 clipped(i32 value, i32 low, i32 high) { return value < low ? low : value > high ? high : value; }
INLINE i32 floor_div(i32 a, i32 b) { return a / b - (a % b != 0 && (a ^ b) < 0); }
INLINE u64 div_ceil(u64 a, u64 b) { return (a + b - 1) / b; }
