// All kernels, one program.
#include "rans.cuh"
#include "tide_lists.cuh"
#include "tide_restore.cuh"
#include "pages.cuh"
