// rANS kernels for AVX-512 with VBMI2, which spreads and gathers 32 words at once.
#ifdef KVTIDE_SIMDE
#include "simde_avx512.hpp"
#else
#include <immintrin.h>
#endif

#include "rans_avx512_kernels.hpp"
#include "rans_paths.hpp"

namespace kvtide {
namespace {

struct PackWords {
  static Vector spread(Vector kept, __mmask32 mask, const std::uint8_t* words) {
    return _mm512_mask_expand_epi16(kept, mask, load64(words));
  }

  static void gather(Vector words, __mmask32 mask, std::uint8_t* to) {
    const auto first = static_cast<__mmask32>((std::uint64_t{1} << count_ones(mask)) - 1u);
    _mm512_mask_storeu_epi16(to, first, _mm512_maskz_compress_epi16(mask, words));
  }
};

#ifdef KVTIDE_SIMDE
bool is_supported() { return true; }
#else
bool is_supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("popcnt");
}
#endif

}  // namespace

const RansPath rans_avx512_vbmi2 = {"avx512_vbmi2", is_supported, decode_with<Avx512<PackWords>>, encode_with<Avx512<PackWords>>,
                                    map_with<Avx512<PackWords>>};

}  // namespace kvtide
