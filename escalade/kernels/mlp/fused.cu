// y[item] = the last layer of (... the first layer of x[item]), or the mean squared distance of that from x[item]
//
// One CTA per item; intermediate values stay in two rows of smem, so x is read and y written once. A thread computes
// one output at a time from a row of weights, which all CTAs share in L2. WARP_REDUCTIONS: a warp normalizes a group by
// shuffles; otherwise the whole CTA reduces in a tree, two barriers per level. `vector` weights and activations are
// read at once. Limiter: reads of weights from L2, width_out rows per item.
//
// Rung               switches
//   fused            none
//   warp_reductions  WARP_REDUCTIONS
//   vectorised       WARP_REDUCTIONS, VECTOR_IN, VECTOR_OUT and the layers' `vector`
// Read chain.cuh (layers), then activation.cuh.
#include "common/ptx.cuh"
#include "common/warp.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                   // problem.dtype
using Result = float;                    // "fp32" if problem.output == "error" else problem.dtype
constexpr bool ERROR = false;            // problem.output == "error"
constexpr int THREADS = 256;             // config.threads: per CTA, which has one row
constexpr int WIDTH = 320;               // width: floats per row of intermediate values
constexpr bool WARP_REDUCTIONS = false;  // rung.warp_reductions: norms and the error by shuffles
constexpr int VECTOR_IN = 1;             // vector_in
constexpr int VECTOR_OUT = 1;            // vector_out
#endif

#include "mlp/activation.cuh"
#include "mlp/chain.cuh"

constexpr int WARPS = THREADS / 32;

// Sum over all threads; every thread receives it.
__device__ __forceinline__ float block_sum(float value, float* scratch) {
    if constexpr (WARP_REDUCTIONS) {
        value = warp_sum(value);
        if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
        __syncthreads();
        float sum = 0.f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum += scratch[warp];
        return sum;
    } else {
        scratch[threadIdx.x] = value;
        for (int half = THREADS / 2; half > 0; half /= 2) {
            __syncthreads();
            if (threadIdx.x < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
        }
        __syncthreads();
        const float sum = scratch[0];
        __syncthreads();  // before the scratch is reused
        return sum;
    }
}

// Normalizes one group, by the threads that `sum` reduces over: each takes every STEP-th feature from `first` on.
template <int L, int STEP, class Sum, class Parameters>
__device__ __forceinline__ void normalize_group(float* values, int first, const Sum& sum,
                                                const Parameters& parameters) {
    constexpr Layer layer = LAYERS[L];
    const Element *weight = parameters[Of<L>::norm_weight], *bias = parameters[Of<L>::norm_bias];
    float total = 0.f, squares = 0.f;
    for (int f = first; f < layer.features; f += STEP) total += values[f];
    const float mean = sum(total) / layer.features;
    for (int f = first; f < layer.features; f += STEP) squares += (values[f] - mean) * (values[f] - mean);
    const float scale = rsqrtf(sum(squares) / layer.features + layer.epsilon);
    for (int f = first; f < layer.features; f += STEP)
        values[f] = (values[f] - mean) * scale * to_float(weight[f]) + to_float(bias[f]);
}

template <int L, class Parameters>
__device__ __forceinline__ void normalize(float* row, float* scratch, const Parameters& parameters) {
    constexpr Layer layer = LAYERS[L];
    if constexpr (WARP_REDUCTIONS) {
        const auto sum = [](float value) { return warp_sum(value); };
        for (int group = threadIdx.x / 32; group < layer.groups; group += WARPS)
            normalize_group<L, 32>(row + group * layer.features, threadIdx.x % 32, sum, parameters);
    } else {
        const auto sum = [&](float value) { return block_sum(value, scratch); };
        for (int group = 0; group < layer.groups; ++group)
            normalize_group<L, THREADS>(row + group * layer.features, threadIdx.x, sum, parameters);
    }
    __syncthreads();
}

template <int VECTOR>
__device__ __forceinline__ void multiply(float& sum, const Element* weights, const float* values) {
    constexpr int FOURS = VECTOR < 4 ? VECTOR : 4;
    const Pack<Element, VECTOR> pack = load_pack<Element, VECTOR>(weights);
#pragma unroll
    for (int first = 0; first < VECTOR; first += FOURS) {
        const Pack<float, FOURS> four = load_pack<float, FOURS>(values + first);
#pragma unroll
        for (int e = 0; e < FOURS; ++e) sum += to_float(pack.at[first + e]) * four.at[e];
    }
}

// Runs layers L to the last; returns the row with the result.
template <int L, class Parameters>
__device__ __forceinline__ float* run(float* row, float* other, float* scratch, const Parameters& parameters) {
    constexpr Layer layer = LAYERS[L];
    if constexpr (layer.norm) normalize<L>(row, scratch, parameters);
    for (int at = threadIdx.x; at < Of<L>::width_out; at += THREADS) {
        const int output = at % layer.outputs;
        const float* values = row + at / layer.outputs * layer.features;
        const Element* weights = parameters[Of<L>::weight] + output * layer.features;
        float sum = 0.f;
#pragma unroll(layer.vector > 1 ? 4 : 1)
        for (int f = 0; f < layer.features; f += layer.vector) multiply<layer.vector>(sum, weights + f, values + f);
        if constexpr (layer.bias) sum += to_float(parameters[Of<L>::bias][output]);
        other[at] = activate<layer.activation>(sum);
    }
    __syncthreads();
    if constexpr (L < LAST)
        return run<L + 1>(other, row, scratch, parameters);
    else
        return other;
}

extern "C" __global__ void __launch_bounds__(THREADS) mlp_fused(const Element* x, Result* y, PARAMETER_LIST) {
    extern __shared__ __align__(16) float shared[];
    float* row = shared_part(shared, WIDTH);
    float* other = shared_part(shared + WIDTH, WIDTH);
    float* scratch = shared_part(shared + 2 * WIDTH, REST);
    const Element* const parameters[] = {PARAMETER_NAMES};
    wait_for_previous_launch();

    const Element* item = x + 1LL * blockIdx.x * FEATURES;
    for (int at = threadIdx.x * VECTOR_IN; at < FEATURES; at += THREADS * VECTOR_IN) {
        const Pack<Element, VECTOR_IN> pack = load_pack<Element, VECTOR_IN>(item + at);
#pragma unroll
        for (int e = 0; e < VECTOR_IN; ++e) row[at + e] = to_float(pack.at[e]);
    }
    __syncthreads();
    const float* result = run<0>(row, other, scratch, parameters);

    if constexpr (ERROR) {
        float squares = 0.f;
        for (int f = threadIdx.x; f < FEATURES; f += THREADS) {
            const float distance = result[f] - to_float(item[f]);
            squares += distance * distance;
        }
        squares = block_sum(squares, scratch);
        if (threadIdx.x == 0) y[blockIdx.x] = from_float<Result>(squares / FEATURES);
    } else {
        for (int at = threadIdx.x * VECTOR_OUT; at < OUTPUTS; at += THREADS * VECTOR_OUT) {
            Pack<Result, VECTOR_OUT> pack;
#pragma unroll
            for (int e = 0; e < VECTOR_OUT; ++e) pack.at[e] = from_float<Result>(result[at + e]);
            store_pack(y + 1LL * blockIdx.x * OUTPUTS + at, pack);
        }
    }
}
