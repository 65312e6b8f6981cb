// CUDA's dialect on a processor: each thread of a block is a fiber, and collectives are where they meet.
//
// Stricter than a GPU: every lane of a warp must meet the same collective, shared memory is filled with rubbish before each block,
// and threads run in an order that a seed shuffles, so that a missing barrier shows as wrong bytes or as a message.
#pragma once

#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

#include <bit>
#include <utility>
#include <cmath>
#include <memory>
#include <vector>

#define KVTIDE_EMULATION
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __restrict__
#define __launch_bounds__(...)
// One section of the program holds all shared memory.
#define __shared__ static __attribute__((section("kvtide_shared")))

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = unsigned long long;
using i8 = std::int8_t;
using i16 = std::int16_t;
using i32 = std::int32_t;
using i64 = long long;

struct Dim {
  u32 x, y, z;
};

namespace emulation {

constexpr u32 lanes = 32;
constexpr std::size_t stack_bytes = 64 << 10;
constexpr std::size_t slot_words = 8;

[[noreturn]] inline void fail(const char* message) {
  std::fprintf(stderr, "emulation: %s\n", message);
  std::abort();
}

enum class Wait : u8 { none, warp, block, ended };

struct Fiber {
  ucontext_t start;
  jmp_buf resume;
  std::unique_ptr<char[]> stack;
  bool is_started = false;
  Wait wait = Wait::none;
  const char* where = nullptr;
  u32 meetings = 0;
};

struct Warp {
  // Two sets: a lane writes one while others may still read the other.
  u32 slots[2][lanes][slot_words];
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  void (*body)(const void*) = nullptr;
  const void* args = nullptr;
  u32 thread = 0;
  jmp_buf scheduler;
  u32 seed = 1;
};

inline Block block;
inline Dim thread_index, block_index, block_size, grid_size;

inline void pause(Wait wait, const char* where) {
  Fiber& fiber = block.fibers[block.thread];
  fiber.wait = wait;
  fiber.where = where;
  if (_setjmp(fiber.resume) == 0) _longjmp(block.scheduler, 1);
}

inline void run_fiber() {
  block.body(block.args);
  block.fibers[block.thread].wait = Wait::ended;
  _longjmp(block.scheduler, 1);
}

inline void enter(u32 thread) {
  block.thread = thread;
  thread_index = {thread, 0, 0};
  Fiber& fiber = block.fibers[thread];
  if (_setjmp(block.scheduler) != 0) return;
  if (fiber.is_started) _longjmp(fiber.resume, 1);
  fiber.is_started = true;
  setcontext(&fiber.start);
}

// Lets those go on that wait for a meeting that is complete. Returns whether there are any.
inline bool release(u32 first, u32 count, Wait wait) {
  const char* where = nullptr;
  for (u32 i = first; i < first + count; ++i) {
    const Fiber& fiber = block.fibers[i];
    if (fiber.wait == Wait::ended && wait == Wait::block) continue;
    if (fiber.wait != wait) return false;
    if (where != nullptr && fiber.where != where && std::strcmp(fiber.where, where) != 0) fail("lanes met different collectives");
    where = fiber.where;
  }
  if (where == nullptr) return false;
  for (u32 i = first; i < first + count; ++i) {
    if (block.fibers[i].wait == wait) block.fibers[i].wait = Wait::none;
  }
  return true;
}

inline void run_block() {
  const auto threads = static_cast<u32>(block.fibers.size());
  for (;;) {
    bool has_run = false, has_all_ended = true;
    block.seed = block.seed * 1664525u + 1013904223u;
    const u32 first = (block.seed >> 8) % threads;
    const bool is_backward = block.seed >> 31;
    for (u32 i = 0; i < threads; ++i) {
      const u32 thread = (first + (is_backward ? threads - i : i)) % threads;
      if (block.fibers[thread].wait == Wait::none) {
        enter(thread);
        has_run = true;
      }
    }
    for (u32 warp = 0; warp < threads / lanes; ++warp) has_run |= release(warp * lanes, lanes, Wait::warp);
    has_run |= release(0, threads, Wait::block);
    for (const Fiber& fiber : block.fibers) has_all_ended &= fiber.wait == Wait::ended;
    if (has_all_ended) return;
    if (!has_run) fail("threads wait for others that do not come");
  }
}

extern "C" {
extern char __start_kvtide_shared[] __attribute__((weak));
extern char __stop_kvtide_shared[] __attribute__((weak));
}

inline void launch(void (*body)(const void*), const void* args, u32 blocks, u32 threads, u32 seed) {
  if (threads % lanes != 0) fail("blocks are whole warps");
  block_size = {threads, 1, 1};
  grid_size = {blocks, 1, 1};
  block.body = body;
  block.args = args;
  block.seed = seed;
  if (block.fibers.size() != threads) block.fibers = std::vector<Fiber>(threads);
  block.warps.resize(threads / lanes);
  for (u32 index = 0; index < blocks; ++index) {
    block_index = {index, 0, 0};
    if (__start_kvtide_shared != nullptr) {
      std::memset(__start_kvtide_shared, 0xa5, static_cast<std::size_t>(__stop_kvtide_shared - __start_kvtide_shared));
    }
    for (Fiber& fiber : block.fibers) {
      if (!fiber.stack) fiber.stack = std::make_unique<char[]>(stack_bytes);
      getcontext(&fiber.start);
      fiber.start.uc_stack.ss_sp = fiber.stack.get();
      fiber.start.uc_stack.ss_size = stack_bytes;
      fiber.start.uc_link = nullptr;
      makecontext(&fiber.start, run_fiber, 0);
      fiber.is_started = false;
      fiber.wait = Wait::none;
      fiber.meetings = 0;
    }
    run_block();
  }
}

// Shows `words` to the other lanes of the warp; returns what they show, by lane.
inline const u32 (*meet(const char* where, u32 mask, const u32* words, std::size_t count))[slot_words] {
  if (mask != ~0u) fail("collectives are of whole warps");
  Fiber& fiber = block.fibers[block.thread];
  auto& slots = block.warps[block.thread / lanes].slots[fiber.meetings++ % 2];
  std::memcpy(slots[block.thread % lanes], words, count * sizeof *words);
  pause(Wait::warp, where);
  return slots;
}

}  // namespace emulation

#define threadIdx (emulation::thread_index)
#define blockIdx (emulation::block_index)
#define blockDim (emulation::block_size)
#define gridDim (emulation::grid_size)

inline void __syncthreads() { emulation::pause(emulation::Wait::block, "syncthreads"); }
inline void __syncwarp(u32 mask = ~0u) {
  const u32 nothing = 0;
  emulation::meet("syncwarp", mask, &nothing, 1);
}
inline u32 __ballot_sync(u32 mask, bool is_set) {
  const u32 word = is_set;
  const auto* shown = emulation::meet("ballot", mask, &word, 1);
  u32 result = 0;
  for (u32 lane = 0; lane < emulation::lanes; ++lane) result |= shown[lane][0] << lane;
  return result;
}
inline u32 __shfl_sync(u32 mask, u32 value, int lane) {
  return emulation::meet("shfl", mask, &value, 1)[static_cast<u32>(lane) % emulation::lanes][0];
}
inline int __popc(u32 value) { return std::popcount(value); }
inline u32 __umulhi(u32 a, u32 b) { return static_cast<u32>(u64{a} * b >> 32); }
inline u32 __float_as_uint(float value) { return std::bit_cast<u32>(value); }
inline float __uint_as_float(u32 bits) { return std::bit_cast<float>(bits); }
inline u32 atomicAdd(u32* at, u32 value) { return std::exchange(*at, *at + value); }
inline u64 atomicAdd(u64* at, u64 value) { return std::exchange(*at, *at + value); }

namespace emulation {

inline i32 byte_of(u32 word, u32 index, bool is_signed) {
  const auto byte = static_cast<u8>(word >> 8 * index);
  return is_signed ? static_cast<i8>(byte) : byte;
}

}  // namespace emulation

// mma.sync m16n8k32 by what PTX says of its fragments, which matrix.cuh repeats.
template <bool is_a_signed, bool is_b_signed, class Sums, class A, class B>
void multiply_tile(Sums& sums, const A& a, const B& b) {
  const u32 mine[6] = {a.words[0], a.words[1], a.words[2], a.words[3], b.words[0], b.words[1]};
  const auto* shown = emulation::meet("mma", ~0u, mine, 6);
  const u32 lane = threadIdx.x % emulation::lanes;
  for (u32 i = 0; i < 4; ++i) {
    const u32 row = lane / 4 + (i < 2 ? 0 : 8), column = 2 * (lane % 4) + i % 2;
    u32 sum = static_cast<u32>(sums.at[i]);
    for (u32 k = 0; k < 32; ++k) {
      const u32 a_word = shown[4 * (row % 8) + k % 16 / 4][2 * (k / 16) + row / 8];
      const u32 b_word = shown[4 * column + k % 16 / 4][4 + k / 16];
      sum += static_cast<u32>(emulation::byte_of(a_word, k % 4, is_a_signed) * emulation::byte_of(b_word, k % 4, is_b_signed));
    }
    sums.at[i] = static_cast<i32>(sum);
  }
}
