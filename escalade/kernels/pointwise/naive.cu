// out[i] = expression(in[i], …), inputs broadcast
//
// The foot of the ladder: an element a thread, its place by division. What bounds it: how few bytes are on their way at
// a time, one small load of each input a thread; in fp16 not enough to keep the memory busy. A result may be an input
// that is dense.
//
// Serves `naive` of every pointwise operation. pointwise.cuh says how tensors are declared.
#include "pointwise/pointwise.cuh"

template <bool DENSE>
__device__ __forceinline__ long long offset_of(const Walk& walk, const int (&stride)[RANK], long long at) {
    if (DENSE) return at;
    long long offset = 0;
#pragma unroll
    for (int d = RANK - 1; d >= 0; --d) {
        offset += at % walk.size[d] * stride[d];
        at /= walk.size[d];
    }
    return offset;
}

extern "C" __global__ void pointwise_naive(PARAMETERS, const Walk walk, long long elements) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;
#define INPUT(number, access) to_float(in##number[offset_of<(access) == DENSE>(walk, walk.stride[number], at)]),
    const float in[EXPRESSION_INPUTS] = {INPUTS};
#undef INPUT
    float out[EXPRESSION_RESULTS];
    evaluate(out, in);
#define RESULT(number) out##number[at] = from_float<Out##number>(out[number]);
    RESULTS
#undef RESULT
}
