// More wgmma widths than common/hopper.cuh: every multiple of 16 columns, 8 and 248 (not of S8). For kernels whose tiles
// follow from the image size.
#pragma once

#include "common/hopper.cuh"

#define FIRST_4 "%0,%1,%2,%3"
#define FIRST_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define FIRST_16 FIRST_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define FIRST_24 FIRST_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define FIRST_32 FIRST_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define FIRST_40 FIRST_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define FIRST_48 FIRST_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define FIRST_56 FIRST_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define FIRST_64 FIRST_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define FIRST_72 FIRST_64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define FIRST_80 FIRST_72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define FIRST_88 FIRST_80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define FIRST_96 FIRST_88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define FIRST_104 FIRST_96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define FIRST_112 FIRST_104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define FIRST_120 FIRST_112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define FIRST_124 FIRST_120 ",%120,%121,%122,%123"

#define SUMS_4(KIND) ACCUMULATORS_OF_4(KIND, 0)
#define SUMS_8(KIND) ACCUMULATORS_OF_8(KIND, 0)
#define SUMS_16(KIND) SUMS_8(KIND), ACCUMULATORS_OF_8(KIND, 8)
#define SUMS_24(KIND) SUMS_16(KIND), ACCUMULATORS_OF_8(KIND, 16)
#define SUMS_32(KIND) SUMS_24(KIND), ACCUMULATORS_OF_8(KIND, 24)
#define SUMS_40(KIND) SUMS_32(KIND), ACCUMULATORS_OF_8(KIND, 32)
#define SUMS_48(KIND) SUMS_40(KIND), ACCUMULATORS_OF_8(KIND, 40)
#define SUMS_56(KIND) SUMS_48(KIND), ACCUMULATORS_OF_8(KIND, 48)
#define SUMS_64(KIND) SUMS_56(KIND), ACCUMULATORS_OF_8(KIND, 56)
#define SUMS_72(KIND) SUMS_64(KIND), ACCUMULATORS_OF_8(KIND, 64)
#define SUMS_80(KIND) SUMS_72(KIND), ACCUMULATORS_OF_8(KIND, 72)
#define SUMS_88(KIND) SUMS_80(KIND), ACCUMULATORS_OF_8(KIND, 80)
#define SUMS_96(KIND) SUMS_88(KIND), ACCUMULATORS_OF_8(KIND, 88)
#define SUMS_104(KIND) SUMS_96(KIND), ACCUMULATORS_OF_8(KIND, 96)
#define SUMS_112(KIND) SUMS_104(KIND), ACCUMULATORS_OF_8(KIND, 104)
#define SUMS_120(KIND) SUMS_112(KIND), ACCUMULATORS_OF_8(KIND, 112)
#define SUMS_124(KIND) SUMS_120(KIND), ACCUMULATORS_OF_4(KIND, 120)

#define DEFINE_WGMMA_OF_TYPE(NAME, DEPTH, TYPE, MAJORS, N, REGISTERS, A, B, P) \
    template <class Sum> \
    __device__ __forceinline__ void NAME(Sum (&d)[REGISTERS], u64 a, u64 b, u32 accumulate) { \
        asm volatile(WGMMA(DEPTH, TYPE, MAJORS, N, FIRST_##REGISTERS, A, B, P) \
                     : SUMS_##REGISTERS("+f") : "l"(a), "l"(b), "r"(accumulate)); \
    }
#define DEFINE_WGMMA_S8(N, REGISTERS, A, B, P) \
    template <class Sum> \
    __device__ __forceinline__ void wgmma_s8(Sum (&d)[REGISTERS], u64 a, u64 b, u32 accumulate) { \
        asm volatile(WGMMA_S8(N, FIRST_##REGISTERS, A, B, P) \
                     : SUMS_##REGISTERS("+r") : "l"(a), "l"(b), "r"(accumulate)); \
    }
#ifdef __CUDA_BF16_H__
#define DEFINE_WGMMA_OF_BF16(...) \
    DEFINE_WGMMA_OF_TYPE(wgmma_bf16, "16", "bf16", ", 0, 0", __VA_ARGS__) \
    DEFINE_WGMMA_OF_TYPE(wgmma_bf16_rows_transposed, "16", "bf16", ", 1, 0", __VA_ARGS__)
#else
#define DEFINE_WGMMA_OF_BF16(...)
#endif
#define DEFINE_WGMMA_OF_FLOATS(...) \
    DEFINE_WGMMA_OF_TYPE(wgmma, "16", "f16", ", 0, 0", __VA_ARGS__) \
    DEFINE_WGMMA_OF_TYPE(wgmma_tf32, "8", "tf32", "", __VA_ARGS__) \
    DEFINE_WGMMA_OF_TYPE(wgmma_rows_transposed, "16", "f16", ", 1, 0", __VA_ARGS__) \
    DEFINE_WGMMA_OF_BF16(__VA_ARGS__)
#define DEFINE_WGMMA_WIDTH(...) DEFINE_WGMMA_OF_FLOATS(__VA_ARGS__) DEFINE_WGMMA_S8(__VA_ARGS__)

DEFINE_WGMMA_OF_FLOATS("8", 4, "%4", "%5", "%6")
DEFINE_WGMMA_WIDTH("16", 8, "%8", "%9", "%10")
DEFINE_WGMMA_WIDTH("32", 16, "%16", "%17", "%18")
DEFINE_WGMMA_WIDTH("48", 24, "%24", "%25", "%26")
DEFINE_WGMMA_WIDTH("80", 40, "%40", "%41", "%42")
DEFINE_WGMMA_WIDTH("96", 48, "%48", "%49", "%50")
DEFINE_WGMMA_WIDTH("112", 56, "%56", "%57", "%58")
DEFINE_WGMMA_WIDTH("144", 72, "%72", "%73", "%74")
DEFINE_WGMMA_WIDTH("160", 80, "%80", "%81", "%82")
DEFINE_WGMMA_WIDTH("176", 88, "%88", "%89", "%90")
DEFINE_WGMMA_WIDTH("208", 104, "%104", "%105", "%106")
DEFINE_WGMMA_WIDTH("224", 112, "%112", "%113", "%114")
DEFINE_WGMMA_WIDTH("240", 120, "%120", "%121", "%122")
DEFINE_WGMMA_OF_FLOATS("248", 124, "%124", "%125", "%126")
