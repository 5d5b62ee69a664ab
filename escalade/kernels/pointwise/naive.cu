// out[i] = expression(in[i], …), inputs broadcast
//
// The foot of the ladder: one element per thread, its position by division. Limiter: few bytes in flight, one small
// load of each input per thread; in fp16 not enough to saturate memory. A result may alias a dense input.
//
// Rung: `naive` of every pointwise operation. Read pointwise.cuh (tensor declarations).
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
