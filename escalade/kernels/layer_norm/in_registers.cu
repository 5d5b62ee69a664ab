// y[row][f] = activated((x[row][f] - mean) / sqrt(variance + epsilon) * weight[f] + bias[f])
//
// ROW_THREADS threads hold a row in registers, PACKS packs of up to 16 bytes each: part of a warp for narrow rows, a CTA
// for wide ones. A thread has a share of ROWS rows, whose loads are all in flight at once, and those of the weights too
// where registers allow. Mean and variance are computed one after the other from registers, so nothing cancels.
// Limiter: memory, each element is read and written once.
//
// Rung: `in_registers`. Read layer_norm.cuh.
#include "common/row_sums.cuh"
#include "layer_norm/layer_norm.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int VECTOR = 4;        // vector: elements per access
constexpr int ROW_THREADS = 32;  // config.row_threads: threads per row
constexpr int PACKS = 1;         // config.packs: accesses per thread and row
constexpr int ROWS = 1;          // config.rows: rows per thread
constexpr int THREADS = 128;     // config.threads
constexpr bool FULL = true;      // full: every thread has PACKS packs of its row
#endif

constexpr int WARPS = ROW_THREADS < 32 ? 1 : ROW_THREADS / 32;  // per row; 1 if a row is part of a warp
constexpr int GROUPS = THREADS / ROW_THREADS;                   // rows that the CTA loads with one access per thread
static_assert(WARPS <= 1 || (ROW_THREADS == THREADS && ROWS == 1), "warps of one row share the CTA barrier");
constexpr bool EARLY = PACKS * VECTOR * sizeof(Parameter) <= 16;  // weights are loaded before the sums; 32 registers
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

extern "C" __global__ void __launch_bounds__(THREADS)
    layer_norm_in_registers(const Element* x, const Parameter* weight, const Parameter* bias, Result* y, int rows,
                            int features, float epsilon) {
    wait_for_previous_launch();
    const int first_row = blockIdx.x * (GROUPS * ROWS) + threadIdx.x / ROW_THREADS;
    const int thread = threadIdx.x % ROW_THREADS;
    const int packs = features / VECTOR;
    const auto has = [&](int i) { return FULL || i * ROW_THREADS + thread < packs; };
    // Shuffles need every lane: those of a missing row read the last one and write nothing.
    Values loaded[ROWS][PACKS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const Element* row = x + 1LL * min(first_row + r * GROUPS, rows - 1) * features;
#pragma unroll
        for (int i = 0; i < PACKS; ++i)
            loaded[r][i] = load_pack<Element, VECTOR>(row + (has(i) ? i * ROW_THREADS + thread : 0) * VECTOR);
    }
    Parameters weights[PACKS] = {}, biases[PACKS] = {};
    const auto load_weights = [&](int i) {
        const int first = (has(i) ? i * ROW_THREADS + thread : 0) * VECTOR;
        if (HAS_WEIGHT) weights[i] = load_parameters(weight + first);
        if (HAS_BIAS) biases[i] = load_parameters(bias + first);
    };
#pragma unroll
    for (int i = 0; i < PACKS; ++i)
        if (EARLY) load_weights(i);
    const float one_over_features = 1.f / features;
    float means[ROWS] = {}, scales[ROWS];
    if (HAS_MEAN) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float sum = 0.f;
#pragma unroll
            for (int i = 0; i < PACKS; ++i)
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) sum += has(i) ? to_float(loaded[r][i].at[e]) : 0.f;
            means[r] = sum_over_row_threads<ROW_THREADS, 0>(sum) * one_over_features;
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float squares = 0.f;
#pragma unroll
        for (int i = 0; i < PACKS; ++i)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                const float difference = to_float(loaded[r][i].at[e]) - means[r];
                squares += has(i) ? difference * difference : 0.f;
            }
        scales[r] = rsqrtf(sum_over_row_threads<ROW_THREADS, 1>(squares) * one_over_features + epsilon);
    }
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const int first = (i * ROW_THREADS + thread) * VECTOR;
        if (!has(i)) continue;
        if (!EARLY) load_weights(i);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int row = first_row + r * GROUPS;
            Pack<Result, VECTOR> results;
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                results.at[e] = normalized(to_float(loaded[r][i].at[e]), means[r], scales[r], weights[i].at,
                                           biases[i].at, e);
            if (row < rows) store_pack(y + 1LL * row * features + first, results);
        }
    }
}
