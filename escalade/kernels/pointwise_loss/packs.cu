// loss = factor * sum of term(x[i], target[i]), gradient[i] = factor * scale * derivative(x[i], target[i])
//
// The term of an element and its derivative by x are one program with two results; without HAS_GRADIENT only the first
// is computed. A thread has PACKS packs of both tensors in flight. Sums of a CTA have a fixed order, and so has the
// reduction over CTAs by the last one to finish, found by ticket. `scale`, the incoming gradient, is read from memory.
// Limiter: memory, each element is read once and each gradient written once.
//
// Rung          switches
//   single      VECTOR 1
//   vectorised  VECTOR 16 bytes
#include "common/elements.cuh"
#include "common/expression.cuh"
#include "common/ptx.cuh"
#include "common/warp.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;               // problem.dtype
using Target = float;                // problem.target_dtype
constexpr bool HAS_GRADIENT = true;  // problem.gradient
constexpr int VECTOR = 4;            // vector: elements per access
constexpr int PACKS = 4;             // config.packs: accesses in flight per thread
constexpr int THREADS = 256;         // config.threads
#endif

constexpr int WARPS = THREADS / 32;

// Returns the term; stores the derivative times `scale` to `derivative`.
__device__ __forceinline__ float term_of(float x, float target, float scale, Element& derivative) {
    const float in[EXPRESSION_INPUTS] = {INPUTS};
    float out[EXPRESSION_RESULTS];
    evaluate(out, in);
    if constexpr (HAS_GRADIENT) derivative = from_float<Element>(scale * out[1]);
    return out[0];
}

// Sum over all threads, in the first.
__device__ __forceinline__ float block_sum(float value) {
    __shared__ float of_warps[WARPS];
    value = warp_sum(value);
    __syncthreads();  // the previous sum has been read
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    return threadIdx.x < 32 ? warp_sum(threadIdx.x < WARPS ? of_warps[threadIdx.x] : 0.f) : 0.f;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    pointwise_loss_packs(const Element* x, const Target* target, const float* scale, Element* gradient,
                         float* partials, u32* tickets, float* loss, long long elements, float factor) {
    using Values = Pack<Element, VECTOR>;
    wait_for_previous_launch();
    const long long whole = elements / VECTOR;  // packs; CTA 0 handles the remaining elements
    const long long first = 1LL * blockIdx.x * (THREADS * PACKS) + threadIdx.x;
    Values mine[PACKS];
    Pack<Target, VECTOR> wanted[PACKS];
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const long long pack = first + i * THREADS;
        if (pack >= whole) continue;
        mine[i] = load_pack<Element, VECTOR>(x + pack * VECTOR);
        wanted[i] = load_pack<Target, VECTOR>(target + pack * VECTOR);
    }
    const float weight = HAS_GRADIENT ? factor * scale[0] : 0.f;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const long long pack = first + i * THREADS;
        if (pack >= whole) continue;
        Values derivatives;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
            sum += term_of(to_float(mine[i].at[e]), to_float(wanted[i].at[e]), weight, derivatives.at[e]);
        if constexpr (HAS_GRADIENT) store_pack(gradient + pack * VECTOR, derivatives);
    }
    const long long last = whole * VECTOR + threadIdx.x;
    if (blockIdx.x == 0 && last < elements) {
        Element derivative;
        sum += term_of(to_float(x[last]), to_float(target[last]), weight, derivative);
        if constexpr (HAS_GRADIENT) gradient[last] = derivative;
    }

    __shared__ bool is_last;
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = sum;
        is_last = take_ticket(tickets, gridDim.x) == gridDim.x - 1;
    }
    __syncthreads();
    if (!is_last) return;
    sum = 0.f;
    for (u32 block = threadIdx.x; block < gridDim.x; block += THREADS) sum += partials[block];
    sum = block_sum(sum);
    if (threadIdx.x == 0) loss[0] = factor * sum;
}
