// dx[row][f] of a layer norm, and partial[0][cta][f], partial[1][cta][f] = sums of dy and of dy * n over the CTA's rows
//
// First of two launches. ROW_THREADS threads hold a row of dy and of x in registers, so that each element is read once:
// the statistics are computed again, which costs less than reading them. CTAs loop over rows and add their terms of the
// parameters' gradients to registers; at the end the row groups of a CTA add theirs in smem, one after the other, so
// every run gives the same bits. Limiter: memory.
//
// Rung: `in_registers`. Read layer_norm_backward.cuh.
#include "common/warp.cuh"
#include "layer_norm_backward/layer_norm_backward.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int VECTOR = 4;        // vector: elements per access
constexpr int ROW_THREADS = 32;  // config.row_threads: threads per row
constexpr int PACKS = 1;         // config.packs: accesses per thread and tensor
constexpr int THREADS = 256;     // config.threads
#endif

constexpr int WARPS = THREADS / 32, ROWS = THREADS / ROW_THREADS;  // of a CTA
constexpr bool SPLIT = ROW_THREADS > 32;                           // several warps share a row
static_assert(!SPLIT || ROW_THREADS == THREADS, "warps of one row share the CTA barrier");
using Results = Pack<Result, VECTOR>;

// dx replaces x in its registers if both have one dtype; otherwise it takes `others`.
__device__ __forceinline__ Results& results_in(Results& values, Results&) { return values; }
template <class Values>
__device__ __forceinline__ Results& results_in(Values&, Results& others) { return others; }

__device__ __forceinline__ void sum_of_row(float& first, float& second) {
    constexpr int LANES = SPLIT ? 32 : ROW_THREADS;
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        first += __shfl_xor_sync(ALL_LANES, first, distance);
        second += __shfl_xor_sync(ALL_LANES, second, distance);
    }
    if constexpr (SPLIT) {
        __shared__ float2 parts[WARPS];
        const int lane = threadIdx.x % 32;
        __syncthreads();  // the previous round has been read
        if (lane == 0) parts[threadIdx.x / 32] = make_float2(first, second);
        __syncthreads();
        const float2 part = lane < WARPS ? parts[lane] : make_float2(0.f, 0.f);
        first = warp_sum(part.x), second = warp_sum(part.y);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    layer_norm_backward_in_registers(const Gradient* gradient, const Element* x, const float* weight, Result* y,
                                     float* partial, int rows, int features, float epsilon, const Residual* residual,
                                     Rounded* rounded) {
    __shared__ float shared[SPLIT ? 1 : 2 * ROW_THREADS * PACKS * VECTOR];
    wait_for_previous_launch();
    const int thread = threadIdx.x % ROW_THREADS, packs = features / VECTOR;
    float bias_sums[PACKS][VECTOR] = {}, weight_sums[PACKS][VECTOR] = {};
    for (long long first_row = 1LL * blockIdx.x * ROWS; first_row < rows; first_row += 1LL * gridDim.x * ROWS) {
        const long long row = first_row + threadIdx.x / ROW_THREADS;
        // Shuffles need every lane: those of a missing row read the last one, and neither write nor add anything.
        const bool exists = row < rows;
        const long long at = (exists ? row : rows - 1) * features;
        Pack<Element, VECTOR> values[PACKS];
        Pack<Gradient, VECTOR> gradients[PACKS];
        [[maybe_unused]] Pack<Residual, VECTOR> residuals[PACKS];
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int pack = i * ROW_THREADS + thread;
            const long long from = at + (pack < packs ? pack : 0) * VECTOR;
            values[i] = load_pack<Element, VECTOR>(x + from);
            gradients[i] = load_pack<Gradient, VECTOR>(gradient + from);
            if constexpr (HAS_RESIDUAL) residuals[i] = load_pack<Residual, VECTOR>(residual + from);
        }
        float mean = 0.f, sum = 0.f, squares = 0.f, products = 0.f;
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int first = (i * ROW_THREADS + thread) * VECTOR;
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                if (first >= features) continue;
                mean += to_float(values[i].at[e]);
                sum += times_weight(to_float(gradients[i].at[e]), weight, first + e);
            }
        }
        if (HAS_MEAN) sum_of_row(mean, sum);
        mean = HAS_MEAN ? mean / features : 0.f;
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int first = (i * ROW_THREADS + thread) * VECTOR;
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                if (first >= features) continue;
                const float difference = to_float(values[i].at[e]) - mean;
                squares += difference * difference;
                products += times_weight(to_float(gradients[i].at[e]), weight, first + e) * difference;
            }
        }
        sum_of_row(squares, products);
        const RowSums sums(mean, sum, squares, products, features, epsilon);
        if (!exists) continue;
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int first = (i * ROW_THREADS + thread) * VECTOR;
            if (first >= features) continue;
            Results others;
            Results& results = results_in(values[i], others);
            [[maybe_unused]] Pack<Rounded, VECTOR> copies;
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                const float dy = to_float(gradients[i].at[e]), n = sums.normalized(to_float(values[i].at[e]));
                bias_sums[i][e] += dy;
                weight_sums[i][e] += dy * n;
                float dx = sums.gradient(times_weight(dy, weight, first + e), n);
                if constexpr (HAS_RESIDUAL) dx += to_float(residuals[i].at[e]);
                results.at[e] = from_float<Result>(dx);
                if constexpr (HAS_ROUNDED) copies.at[e] = from_float<Rounded>(dx);
            }
            store_pack(y + at + first, results);
            if constexpr (HAS_ROUNDED) store_pack(rounded + at + first, copies);
        }
    }
    float* const of_bias = partial + 1LL * blockIdx.x * features;
    float* const of_weight = of_bias + 1LL * gridDim.x * features;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const int first = (i * ROW_THREADS + thread) * VECTOR;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            if constexpr (SPLIT) {
                if (first >= features) continue;
                of_bias[first + e] = bias_sums[i][e];
                of_weight[first + e] = weight_sums[i][e];
            } else {
#pragma unroll
                for (int distance = 16; distance >= ROW_THREADS; distance /= 2) {  // the rows of a warp
                    bias_sums[i][e] += __shfl_xor_sync(ALL_LANES, bias_sums[i][e], distance);
                    weight_sums[i][e] += __shfl_xor_sync(ALL_LANES, weight_sums[i][e], distance);
                }
            }
        }
    }
    if constexpr (!SPLIT) {
        constexpr int SPAN = ROW_THREADS * PACKS * VECTOR;
        for (int warp = 0; warp < WARPS; ++warp) {
            if (threadIdx.x / 32 == warp && threadIdx.x % 32 < ROW_THREADS) {
#pragma unroll
                for (int i = 0; i < PACKS; ++i) {
                    const int first = (i * ROW_THREADS + thread) * VECTOR;
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e) {
                        const float before = warp ? shared[first + e] : 0.f;
                        const float before_products = warp ? shared[SPAN + first + e] : 0.f;
                        shared[first + e] = before + bias_sums[i][e];
                        shared[SPAN + first + e] = before_products + weight_sums[i][e];
                    }
                }
            }
            __syncthreads();
        }
        for (int f = threadIdx.x; f < features; f += THREADS) {
            of_bias[f] = shared[f];
            of_weight[f] = shared[SPAN + f];
        }
    }
}
