// The rows of the dispatch table, each defined in the file of its instruction set.
#pragma once

#include "rans.hpp"

namespace kvtide {

extern const RansPath rans_portable;
extern const RansPath rans_avx2;
extern const RansPath rans_avx512;
extern const RansPath rans_avx512_vbmi2;

}  // namespace kvtide
