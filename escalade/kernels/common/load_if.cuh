// Predicated loads of packs.
#pragma once

#include "common/ptx.cuh"

// 16 bytes of global memory if wanted, else zeros. No store of this kernel may have written them. The compiler would
// merge loaded and zero elements of 16 bits one by one, two instructions each.
__device__ __forceinline__ uint4 load_16_if(bool wanted, const void* global) {
    uint4 value;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\n"
                 "mov.u32 %3, 0;\n@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w)
                 : "l"(global), "r"(u32(wanted)));
    return value;
}
