// All kernels, one program.
#include "groups.cuh"
#include "pages.cuh"
#include "rans.cuh"
#include "tide_encode.cuh"
#include "tide_lists.cuh"
#include "tide_project.cuh"
#include "tide_restore.cuh"
