// y[row][f] = activated((x[row][f] - mean) / sqrt(variance + epsilon) * weight[f] + bias[f])
//
// ROW_THREADS threads hold a row in registers, PACKS packs of up to 16 bytes each, all loaded at once: part of a warp
// for narrow rows, a CTA for wide ones. Mean and variance are computed one after the other from registers, so nothing
// cancels. Limiter: memory, each element is read and written once.
//
// Rung: `in_registers`. Read layer_norm.cuh.
#include "common/warp.cuh"
#include "layer_norm/layer_norm.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int VECTOR = 4;        // vector: elements per access
constexpr int ROW_THREADS = 32;  // config.row_threads: threads per row
constexpr int PACKS = 1;         // config.packs: accesses per thread
constexpr int THREADS = 128;     // config.threads
#endif

constexpr int WARPS = ROW_THREADS < 32 ? 1 : ROW_THREADS / 32;  // per row; 1 if a row is part of a warp
static_assert(WARPS <= 1 || ROW_THREADS == THREADS, "warps of one row share the CTA barrier");
using Values = Pack<Element, VECTOR>;
using Parameters = Pack<Parameter, VECTOR>;

// As many of the weights as elements of an access, 16 bytes at a time: fp32 ones take two accesses for 16-bit elements.
__device__ __forceinline__ Parameters load_parameters(const Parameter* address) {
    constexpr int PART = VECTOR * sizeof(Parameter) > 16 ? 16 / sizeof(Parameter) : VECTOR;
    Parameters loaded;
#pragma unroll
    for (int first = 0; first < VECTOR; first += PART) {
        const Pack<Parameter, PART> part = load_pack<Parameter, PART>(address + first);
#pragma unroll
        for (int e = 0; e < PART; ++e) loaded.at[first + e] = part.at[e];
    }
    return loaded;
}

__device__ __forceinline__ float sum_of_row(float value) {
    constexpr int LANES = ROW_THREADS < 32 ? ROW_THREADS : 32;
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    if constexpr (WARPS > 1) {
        __shared__ float parts[WARPS];
        const int lane = threadIdx.x % 32;
        __syncthreads();  // the previous round has been read
        if (lane == 0) parts[threadIdx.x / 32] = value;
        __syncthreads();
        value = warp_sum(lane < WARPS ? parts[lane] : 0.f);
    }
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    layer_norm_in_registers(const Element* x, const Parameter* weight, const Parameter* bias, Element* y, int rows,
                            int features, float epsilon) {
    wait_for_previous_launch();
    const long long row = 1LL * blockIdx.x * (THREADS / ROW_THREADS) + threadIdx.x / ROW_THREADS;
    const int thread = threadIdx.x % ROW_THREADS;
    const int packs = features / VECTOR;
    // Shuffles need every lane: those of a missing row read the last one and write nothing.
    const long long at = (row < rows ? row : rows - 1) * features;
    Values loaded[PACKS];
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const int pack = i * ROW_THREADS + thread;
        loaded[i] = load_pack<Element, VECTOR>(x + at + (pack < packs ? pack : 0) * VECTOR);
    }
    float mean = 0.f, squares = 0.f;
    if (HAS_MEAN) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                mean += i * ROW_THREADS + thread < packs ? to_float(loaded[i].at[e]) : 0.f;
        mean = sum_of_row(mean) / features;
    }
#pragma unroll
    for (int i = 0; i < PACKS; ++i)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            const float difference = to_float(loaded[i].at[e]) - mean;
            squares += i * ROW_THREADS + thread < packs ? difference * difference : 0.f;
        }
    const float scale = rsqrtf(sum_of_row(squares) / features + epsilon);
    if (row >= rows) return;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const int first = (i * ROW_THREADS + thread) * VECTOR;
        if (first >= features) continue;
        Parameters weights = {}, biases = {};
        if (HAS_WEIGHT) weights = load_parameters(weight + first);
        if (HAS_BIAS) biases = load_parameters(bias + first);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
            loaded[i].at[e] = normalized(to_float(loaded[i].at[e]), mean, scale, weights.at, biases.at, e);
        store_pack(y + at + first, loaded[i]);
    }
}
