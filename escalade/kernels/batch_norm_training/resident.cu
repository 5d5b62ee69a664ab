// y[row][c] = relu((x[row][c] - mean[c]) * weight[c] * rstd[c] + bias[c] + residual[row][c]), and mean, rstd of c
// (NHWC)
//
// One launch; x is read once. A cluster has COLUMNS packs of channels, its CTAs split the rows, and a thread keeps its
// STEPS rows in registers while the cluster computes the mean, then the squared deviations, by shuffles, smem and
// DSMEM. The order is fixed, so every run gives the same bits. Limiter: round trips to memory and between CTAs; with
// more rows, memory. y may be x or the residual.
//
// Rung: `resident`. Read batch_norm/batch_norm.cuh (normalization), batch_statistics/batch_statistics.cuh (results per
// channel), cluster_sums.cuh (reduction over a cluster).
#include "batch_norm/batch_norm.cuh"
#include "batch_statistics/batch_statistics.cuh"
#include "common/cluster_sums.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;        // problem.dtype
constexpr int VECTOR = 4;     // vector: channels per access
constexpr int THREADS = 256;  // config.threads
constexpr int COLUMNS = 4;    // config.columns: packs of channels per slice
constexpr int STEPS = 4;      // config.steps: most rows per thread
#endif

constexpr int HEIGHT = THREADS / COLUMNS, TOGETHER = STEPS < 4 ? STEPS : 4;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    batch_norm_training_resident(const Element* x, const float* __restrict__ weight, const float* __restrict__ bias,
                                 const Element* residual, Element* y, Results results, int channels, int rows,
                                 float epsilon, float momentum) {
    __shared__ ClusterSums<VECTOR, COLUMNS, THREADS> of_values, of_squares;
    wait_for_previous_launch();
    const int channel = (blockIdx.y * COLUMNS + threadIdx.x % COLUMNS) * VECTOR;
    const int first = blockIdx.x * HEIGHT + threadIdx.x / COLUMNS, step = gridDim.x * HEIGHT;
    const auto place = [&](int i) { return 1LL * (first + i * step) * channels + channel; };

    Pack<Element, VECTOR> values[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; ++i) values[i] = load_pack_if<Element, VECTOR>(first + i * step < rows, x + place(i));
    float scales[VECTOR], biases[VECTOR];
    load_channels(weight + channel, scales);
    load_channels(bias + channel, biases);

    float means[VECTOR] = {}, squares[VECTOR] = {};
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) means[e] += to_float(values[i].at[e]);  // 0 past the last row
    of_values.over(means);
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) means[e] /= static_cast<float>(rows);
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            const float distance = to_float(values[i].at[e]) - means[e];
            if (first + i * step < rows) squares[e] += distance * distance;
        }
    of_squares.over(squares);
    cluster_arrive();  // no more DSMEM reads by this CTA

    const float count = static_cast<float>(rows);
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {
        scales[e] *= rsqrtf(squares[e] / count + epsilon);
        if (blockIdx.x == 0 && threadIdx.x < COLUMNS)
            store_training_statistics(results, channel + e, means[e], squares[e], count, epsilon, momentum);
    }
#pragma unroll
    for (int some = 0; some < STEPS; some += TOGETHER) {
        Pack<Element, VECTOR> others[TOGETHER] = {};
#pragma unroll
        for (int i = 0; i < TOGETHER && some + i < STEPS; ++i)
            if (HAS_RESIDUAL)
                others[i] = load_pack_if<Element, VECTOR>(first + (some + i) * step < rows, residual + place(some + i));
#pragma unroll
        for (int i = 0; i < TOGETHER && some + i < STEPS; ++i) {
            if (first + (some + i) * step >= rows) break;
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                values[some + i].at[e] =
                    normalized(values[some + i].at[e], means[e], scales[e], biases[e], others[i].at[e]);
            store_pack(y + place(some + i), values[some + i]);
        }
    }
    cluster_wait();  // no more DSMEM reads of this CTA
}
