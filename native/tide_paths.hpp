// The rows of the dispatch table, each defined in the file of its instruction set.
#pragma once

#include "tide.hpp"

namespace kvtide {

extern const TidePath tide_portable;
extern const TidePath tide_avx2;
extern const TidePath tide_avx512;
extern const TidePath tide_amx;  // where the compiler knows AMX: KVTIDE_AMX

}  // namespace kvtide
