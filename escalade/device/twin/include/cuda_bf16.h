// NVIDIA's header, as a host compiler sees it, and what it keeps from host compilers.
#pragma once

#include_next <cuda_bf16.h>

#include "atomics.h"
#include "collectives.h"

#define TWIN_T __nv_bfloat16
#define TWIN_T2 __nv_bfloat162
#define TWIN_TO(x) __bfloat162float(x)
#define TWIN_FROM(x) __float2bfloat16_rn(x)
#define TWIN_FROM_DOUBLE(x) __double2bfloat16(x)
#include "half_functions.h"
#undef TWIN_T
#undef TWIN_T2
#undef TWIN_TO
#undef TWIN_FROM
#undef TWIN_FROM_DOUBLE
