// PTX instructions, one named function each.
//
// Fragments are as the instructions define them: 32-bit registers distributed over the lanes of a warp. With group =
// lane / 4 and member = lane % 4, an 8x8 matrix of 16-bit elements gives every lane columns 2*member and 2*member + 1
// of row `group`; the same 16-byte rows, read as four 32-bit elements, give column `member` of row `group`.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Address in the shared window of a pointer to smem, as the functions below take it.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Carves `count` elements (REST: the remainder) from dynamic smem at `start`, and returns `start`. The twin's checks
// put guards around each part to catch overruns. All threads declare the same parts, and access them by no other
// pointer.
constexpr u32 REST = ~0u;
template <class T>
__device__ __forceinline__ T* shared_part(T* start, u32 count) {
    return start;
}

// cp.async: global to shared memory, bypassing registers. Without `inside` nothing is read and zeros are written.
__device__ __forceinline__ void copy_async_4(u32 shared, const void* global, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(inside ? 4 : 0)
                 : "memory");
}

__device__ __forceinline__ void copy_async_8(u32 shared, const void* global, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(inside ? 8 : 0)
                 : "memory");
}

// The 16-byte form bypasses L1 (.cg) unless the prelude defines COPY_THROUGH_L1, which pays if the CTA soon reads the
// same bytes again. It prefetches the whole 128-byte line into L2, since rows are read in order.
#ifdef COPY_THROUGH_L1
#define COPY_16_CACHE ".ca"
#else
#define COPY_16_CACHE ".cg"
#endif
__device__ __forceinline__ void copy_async_16(u32 shared, const void* global, bool inside) {
    asm volatile("cp.async" COPY_16_CACHE ".shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
                 "r"(inside ? 16 : 0)
                 : "memory");
}

// Commits the copies that this thread has issued since the last commit as one group.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's newest groups are in flight.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ldmatrix: 8x8 matrices of 16-bit elements. Lane 8*i + j passes the address of row j of matrix i; register i of every
// lane receives its share of matrix i.
__device__ __forceinline__ void load_matrices(u32 (&r)[1], u32 row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(row_address) : "memory");
}

__device__ __forceinline__ void load_matrices(u32 (&r)[2], u32 row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(row_address)
                 : "memory");
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row_address)
                 : "memory");
}

// ldmatrix with transposition.
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[1], u32 row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(row_address)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[2], u32 row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(row_address)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row_address)
                 : "memory");
}

#if __CUDA_ARCH__ >= 900
// stmatrix: the inverse of load_matrices.
__device__ __forceinline__ void store_matrices(u32 row_address, const u32 (&r)[1]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(row_address), "r"(r[0]) : "memory");
}

__device__ __forceinline__ void store_matrices(u32 row_address, const u32 (&r)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(row_address), "r"(r[0]), "r"(r[1])
                 : "memory");
}

__device__ __forceinline__ void store_matrices(u32 row_address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

__device__ __forceinline__ void store_matrices_transposed(u32 row_address, const u32 (&r)[1]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(row_address), "r"(r[0])
                 : "memory");
}

__device__ __forceinline__ void store_matrices_transposed(u32 row_address, const u32 (&r)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row_address), "r"(r[0]),
                 "r"(r[1])
                 : "memory");
}

__device__ __forceinline__ void store_matrices_transposed(u32 row_address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
#endif

// mma: d += a * b over a warp, a 16 x k row-major, b k x 8 column-major, d 16x8 in fp32.
//   d[0..1]: row group,     columns 2*member, 2*member + 1;  d[2..3]: row group + 8, the same columns
//   16-bit operands, k = 16: a[0]: row group, k = 2*member and the next; a[1]: row group + 8;
//                            a[2], a[3]: the same rows, k + 8;
//                            b[0]: column group, k = 2*member and the next; b[1]: k + 8
//   tf32 operands, k = 8:    a[0]: row group, k = member; a[1]: row group + 8; a[2], a[3]: the same rows, k + 4;
//                            b[0]: column group, k = member; b[1]: k + 4
//   e4m3 operands, k = 32:   a[0]: row group, k = 4*member and the next three; a[1]: row group + 8;
//                            a[2], a[3]: the same rows, k + 16;
//                            b[0]: column group, k = 4*member and the next three; b[1]: k + 16
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// From sm_89 on, as the conversions below. Native on the tensor cores of sm_89 and sm_120. sm_90 and sm_100 take e4m3
// in wgmma and tcgen05 only: ptxas emits a widening to fp16 and two m16n8k16, at the fp16 rate.
__device__ __forceinline__ void mma_m16n8k32_e4m3(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two floats as e4m3, the first in the low byte: to nearest even, saturated to 448; NaN stays NaN.
__device__ __forceinline__ u16 to_e4m3x2(float low, float high) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// Four e4m3 as two pairs of halves (exact): the low two bytes, then the high two.
__device__ __forceinline__ void e4m3x4_to_half2(u32 (&pairs)[2], u32 four) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(pairs[0]), "=r"(pairs[1])
        : "r"(four));
}

// Nearest TF32 number (ties away from zero), in the bits of an fp32.
__device__ __forceinline__ u32 to_tf32(float value) {
    u32 rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
    return rounded;
}

// Pairs of fp16, the first in the low half.
__device__ __forceinline__ u32 pack_half2(float low, float high) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ float2 unpack_half2(u32 packed) {
    float2 value;
    asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        : "=f"(value.x), "=f"(value.y) : "r"(packed));
    return value;
}

// 16 bytes to global memory in one access: the compiler may split a store of values assembled from parts.
__device__ __forceinline__ void store_16(void* global, uint4 value) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

// start[at] = value, predicated, with one instruction for the address: the compiler would branch around each of a loop's
// stores, and compute addresses with four.
__device__ __forceinline__ void store_if(bool wanted, float* start, int at, float value) {
    asm volatile("{\n.reg .pred p;\n.reg .u64 address;\nsetp.ne.u32 p, %3, 0;\nmad.wide.s32 address, %1, 4, %0;\n"
                 "@p st.global.f32 [address], %2;\n}" ::"l"(start), "r"(at), "f"(value), "r"(u32(wanted)));
}

// start[at], likewise; 0 if not wanted. No store of this kernel may have written it.
__device__ __forceinline__ float load_if(bool wanted, const float* start, int at) {
    float value;
    asm volatile("{\n.reg .pred p;\n.reg .u64 address;\nsetp.ne.u32 p, %3, 0;\nmad.wide.s32 address, %2, 4, %1;\n"
                 "mov.f32 %0, 0f00000000;\n@p ld.global.nc.f32 %0, [address];\n}"
                 : "=f"(value) : "l"(start), "r"(at), "r"(u32(wanted)));
    return value;
}

// Pairs of bfloat16, the first in the low half.
__device__ __forceinline__ u32 pack_bfloat2(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Max of two numbers; NaN if either is.
__device__ __forceinline__ float max_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

// Special-function unit, denormals flushed to zero: 2^x and 1 / x to about 2^-22 of the result, tanh to 2^-11.
__device__ __forceinline__ float exp2_approximate(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

__device__ __forceinline__ float reciprocal_approximate(float value) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

__device__ __forceinline__ float tanh_approximate(float value) {
    float result;
    asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

// threadIdx.x, re-read at each call: values derived from it are not kept in registers across loop iterations.
__device__ __forceinline__ int thread_number() {
    int number;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
    return number;
}

// No instruction: returns its argument, opaque to the compiler. Values derived from it are computed where needed,
// instead of hoisted out of a loop and kept in registers.
__device__ __forceinline__ int anew(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

// Counts the arrival of one of `blocks` CTAs; returns the number that arrived before. The last resets the count to 0.
// Acquire-release: later CTAs see what this thread observed, and what its CTA wrote before a barrier preceding this
// call.
__device__ __forceinline__ u32 take_ticket(u32* count, u32 blocks) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(count), "r"(blocks - 1) : "memory");
    return before;
}

// ------------------------------------------------------------------ programmatic dependent launch (PDL)
//
// No-ops before Hopper, where a launch starts when the previous one has finished.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// From here on, writes of previous launches are visible, and nothing of theirs is still being read.
__device__ __forceinline__ void wait_for_previous_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next launch start once all CTAs have called this; it still waits for this one's writes. Without it, the next
// launch starts as the last CTA exits. That is better if several of its CTAs fit an SM: early ones crowd onto the SMs
// that happen to be free and stay there (ResNet-18 at batch 8: 327 us against 224). If each fills an SM they cannot,
// and their prologue is hidden: a recipe requests that with `ReleaseDependents`.
__device__ __forceinline__ void let_next_launch_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
__device__ __forceinline__ void wait_for_previous_launch() {}
__device__ __forceinline__ void let_next_launch_start() {}
#endif
