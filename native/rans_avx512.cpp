// rANS kernels for AVX-512 without VBMI2: words are spread and gathered as 32-bit lanes, half a row at a time.
#ifdef KVTIDE_SIMDE
#include "simde_avx512.hpp"
#else
#include <immintrin.h>
#endif

#include "rans_avx512_kernels.hpp"
#include "rans_paths.hpp"

namespace kvtide {
namespace {

struct PackDwords {
  static __m512i load_words(const std::uint8_t* from) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }

  static Vector spread(Vector kept, __mmask32 mask, const std::uint8_t* words) {
    const auto left_mask = static_cast<__mmask16>(mask), right_mask = static_cast<__mmask16>(mask >> 16);
    const Vector left = _mm512_maskz_expand_epi32(left_mask, load_words(words));
    const Vector right = _mm512_maskz_expand_epi32(right_mask, load_words(words + 2 * count_ones(left_mask)));
    const Vector packed = _mm512_packus_epi32(left, right);
    const Vector ordered = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed);
    return _mm512_mask_mov_epi16(kept, mask, ordered);
  }

  static void gather(Vector words, __mmask32 mask, std::uint8_t* to) {
    const auto left_mask = static_cast<__mmask16>(mask), right_mask = static_cast<__mmask16>(mask >> 16);
    store_words(_mm512_castsi512_si256(words), left_mask, to);
    store_words(_mm512_extracti64x4_epi64(words, 1), right_mask, to + 2 * count_ones(left_mask));
  }

  static void store_words(__m256i words, __mmask16 mask, std::uint8_t* to) {
    const __m512i packed = _mm512_maskz_compress_epi32(mask, _mm512_cvtepu16_epi32(words));
    const auto first = static_cast<__mmask16>((1u << count_ones(mask)) - 1u);
    _mm256_mask_storeu_epi16(to, first, _mm512_cvtepi32_epi16(packed));
  }
};

#ifdef KVTIDE_SIMDE
bool is_supported() { return true; }
#else
bool is_supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("popcnt");
}
#endif

}  // namespace

const RansPath rans_avx512 = {"avx512", is_supported, decode_with<Avx512<PackDwords>>, encode_with<Avx512<PackDwords>>,
                              map_with<Avx512<PackDwords>>};

}  // namespace kvtide
