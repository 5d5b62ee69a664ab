// Loads of 16 bytes of global memory that no store of this kernel may have written.
#pragma once

#include "common/ptx.cuh"

// 16 bytes of global memory if wanted, else zeros. The compiler would
// merge loaded and zero elements of 16 bits one by one, two instructions each.
__device__ __forceinline__ uint4 load_16_if(bool wanted, const void* global) {
    uint4 value;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\n"
                 "mov.u32 %3, 0;\n@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w)
                 : "l"(global), "r"(u32(wanted)));
    return value;
}

// The same for data that is read once per launch, around L1. With EVICT_FIRST its lines are the first to leave L2, so
// that they do not displace what is read again: for more data than L2 keeps until the next launch.
template <bool EVICT_FIRST>
__device__ __forceinline__ uint4 load_16_once_if(bool wanted, const void* global) {
    uint4 value;
    if constexpr (EVICT_FIRST) {
        asm volatile("{\n.reg .pred p;\n.reg .b64 policy;\nsetp.ne.u32 p, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\n"
                     "mov.u32 %2, 0;\nmov.u32 %3, 0;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
                     "@p ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], policy;\n}"
                     : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w)
                     : "l"(global), "r"(u32(wanted)));
    } else {
        asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\n"
                     "mov.u32 %3, 0;\n@p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                     : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w)
                     : "l"(global), "r"(u32(wanted)));
    }
    return value;
}
