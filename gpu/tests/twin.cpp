// The kernels as a shared library for this processor: the same source, emulated.
#include "emulation.hpp"

#include <string_view>
#include <utility>

#include "kernels.cu"

namespace {

template <auto kernel>
struct Body;

template <class Args, void (*kernel)(Args)>
struct Body<kernel> {
  static constexpr std::size_t args_bytes = sizeof(Args);
  static_assert(sizeof(Args) % 8 == 0);
  static void run(const void* args) {
    Args copy;
    std::memcpy(static_cast<void*>(&copy), args, sizeof copy);
    kernel(copy);
  }
};

struct Kernel {
  std::string_view name;
  void (*run)(const void*);
  std::size_t args_bytes;
};

#define ROW(kernel) Kernel{#kernel, Body<kernel>::run, Body<kernel>::args_bytes}
constexpr Kernel kernels[] = {
    ROW(rans_decode), ROW(rans_encode), ROW(rans_tables),  ROW(tide_place),           ROW(tide_decode),
    ROW(pack), ROW(integers_encode), ROW(groups_quantise), ROW(groups_restore),
    ROW(tide_deal),   ROW(tide_pull),   ROW(tide_restore), ROW(tide_restore_ordered), ROW(pages_copy),
    ROW(tide_load),   ROW(tide_project), ROW(tide_project_ordered), ROW(tide_apart), ROW(tide_loudness), ROW(tide_levels),
    ROW(tide_put), ROW(tide_encode), ROW(tide_pack), ROW(block_copy),
};

}  // namespace

// Returns 0, 1 if there is no such kernel, 2 if its arguments are of another size.
extern "C" int twin_launch(const char* name, const void* args, std::size_t args_bytes, u32 blocks, u32 threads, u32 seed) {
  for (const Kernel& kernel : kernels) {
    if (kernel.name != name) continue;
    if (kernel.args_bytes != args_bytes) return 2;
    emulation::launch(kernel.run, args, blocks, threads, seed);
    return 0;
  }
  return 1;
}
