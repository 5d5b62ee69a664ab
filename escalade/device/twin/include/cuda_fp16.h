// NVIDIA's header, as a host compiler sees it, and what it keeps from host compilers.
#pragma once

#include_next <cuda_fp16.h>

#include "atomics.h"
#include "collectives.h"

#define TWIN_T __half
#define TWIN_T2 __half2
#define TWIN_TO(x) __half2float(x)
#define TWIN_FROM(x) __float2half_rn(x)
#define TWIN_FROM_DOUBLE(x) __double2half(x)
#include "half_functions.h"
#undef TWIN_T
#undef TWIN_T2
#undef TWIN_TO
#undef TWIN_FROM
#undef TWIN_FROM_DOUBLE
