// The one dispatch table.
#include <array>

#include "rans_paths.hpp"

namespace kvtide {

std::span<const RansPath> rans_paths() {
#if defined(__x86_64__)
  static const std::array paths = {rans_avx512_vbmi2, rans_avx512, rans_avx2, rans_portable};
#else
  static const std::array paths = {rans_portable};
#endif
  return paths;
}

}  // namespace kvtide
