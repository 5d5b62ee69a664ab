// y[row][c] = weight[c] * rstd[c] * (g - mean of g - (x - mean[c]) * rstd[c] * mean of g * (x - mean[c]) * rstd[c])
// (NHWC)
//
// One launch; the gradient and x are read once. A cluster has COLUMNS packs of channels, its CTAs split the rows, and a
// thread keeps its STEPS rows in registers while the cluster reduces by shuffles, smem and DSMEM. The order is fixed,
// so every run gives the same bits. g is the gradient before the ReLU, if any; with HAS_RESIDUAL it is also a result,
// the residual's gradient. Limiter: round trips to memory and between CTAs; with more rows, memory. y may be the
// gradient or x.
//
// Rung: `resident`. Read batch_norm_backward.cuh, cluster_sums.cuh (reduction over a cluster).
#include "batch_norm_backward/batch_norm_backward.cuh"
#include "common/cluster_sums.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                // problem.dtype
constexpr bool HAS_RESIDUAL = false;  // problem.residual
constexpr int VECTOR = 4;             // vector: channels per access
constexpr int THREADS = 256;          // config.threads
constexpr int COLUMNS = 4;            // config.columns: packs of channels per slice
constexpr int STEPS = 4;              // config.steps: most rows per thread
#endif

constexpr int HEIGHT = THREADS / COLUMNS, TOGETHER = STEPS < 4 ? STEPS : 4;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    batch_norm_backward_resident(const Element* gradient, const Element* x, const Element* output,
                                 const float* __restrict__ weight, const float* __restrict__ bias,
                                 const float* __restrict__ mean, const float* __restrict__ rstd,
                                 Element* residual_gradient, float* weight_gradient, float* bias_gradient, Element* y,
                                 float share, int channels, int rows, Element* again) {
    __shared__ ClusterSums<2 * VECTOR, COLUMNS, THREADS> of_both;
    wait_for_previous_launch();
    const int channel = (blockIdx.y * COLUMNS + threadIdx.x % COLUMNS) * VECTOR;
    const int first = blockIdx.x * HEIGHT + threadIdx.x / COLUMNS, step = gridDim.x * HEIGHT;
    const auto place = [&](int i) { return 1LL * (first + i * step) * channels + channel; };

    float means[VECTOR], scales[VECTOR], rstds[VECTOR], biases[VECTOR] = {};
    load_channels(mean + channel, means);
    load_channels(rstd + channel, rstds);
    load_channels(weight + channel, scales);
    if (NEEDS_BIAS) load_channels(bias + channel, biases);

    Pack<Element, VECTOR> gradients[STEPS], xs[STEPS];
    float sums[2 * VECTOR] = {};  // of gradients, and of their products with distances
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const bool inside = first + i * step < rows;
        gradients[i] = load_pack_if<Element, VECTOR>(inside, gradient + place(i));
        xs[i] = load_pack_if<Element, VECTOR>(inside, x + place(i));
    }
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) scales[e] *= rstds[e];
#pragma unroll
    for (int some = 0; some < STEPS; some += TOGETHER) {
        Pack<Element, VECTOR> outputs[TOGETHER] = {};
#pragma unroll
        for (int i = 0; i < TOGETHER && some + i < STEPS; ++i)
            if (MASK == BY_OUTPUT)
                outputs[i] = load_pack_if<Element, VECTOR>(first + (some + i) * step < rows, output + place(some + i));
#pragma unroll
        for (int i = 0; i < TOGETHER && some + i < STEPS; ++i) {
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                const float distance = to_float(xs[some + i].at[e]) - means[e];
                const float before =
                    before_function(to_float(gradients[some + i].at[e]), distance, scales[e], biases[e],
                                    outputs[i].at[e]);  // 0 past the last row
                if (MASK != NO_MASK) gradients[some + i].at[e] = from_float<Element>(before);
                sums[e] += before;
                sums[VECTOR + e] += before * distance;
            }
            if (HAS_RESIDUAL && first + (some + i) * step < rows)
                store_pack(residual_gradient + place(some + i), gradients[some + i]);
        }
    }
    of_both.over(sums);
    cluster_arrive();  // no more DSMEM reads by this CTA

    float across[VECTOR], shifts[VECTOR];
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {
        const float products = sums[VECTOR + e] * rstds[e];
        if (blockIdx.x == 0 && threadIdx.x < COLUMNS)
            weight_gradient[channel + e] = products, bias_gradient[channel + e] = sums[e];
        across[e] = -scales[e] * rstds[e] * products * share;
        shifts[e] = -scales[e] * sums[e] * share;
    }
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        if (first + i * step >= rows) break;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            const float distance = to_float(xs[i].at[e]) - means[e];
            gradients[i].at[e] =
                from_float<Element>(scales[e] * to_float(gradients[i].at[e]) + (across[e] * distance + shifts[e]));
        }
        store_pack(y + place(i), gradients[i]);
        if (RECOMPUTES) {
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                xs[i].at[e] = from_float<Element>(recomputed((to_float(xs[i].at[e]) - means[e]) * scales[e] + biases[e]));
            store_pack(again + place(i), xs[i]);
        }
    }
    cluster_wait();  // no more DSMEM reads of this CTA
}
