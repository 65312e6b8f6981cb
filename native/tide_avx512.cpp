// The row for AVX-512 with VBMI2 and VNNI.
#include "tide_avx512_kernels.hpp"

namespace kvtide {

const TidePath tide_avx512 = tide_path<Avx512>("avx512", has_avx512);

}  // namespace kvtide
