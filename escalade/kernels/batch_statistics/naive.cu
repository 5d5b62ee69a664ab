// y[0][c] = mean of x over channel c,  y[1][c] = mean of (x - y[0][c])^2
//
// The foot of the ladder: one CTA per channel in two passes, first the mean, then the squared deviations. Limiter: few
// loads in flight on as many SMs as there are channels; in NHWC also a warp's 32 elements in 32 sectors.
//
// Rung: `naive`, also of `batch_norm_training`. Read batch_statistics.cuh.
#include "batch_statistics/batch_statistics.cuh"
#include "common/block.cuh"
#include "common/elements.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;        // problem.dtype
constexpr bool NHWC = true;   // problem.layout == "nhwc" or problem.pixels == 1: one pixel is alike in both layouts
constexpr int THREADS = 256;  // config.threads
#endif

__device__ __forceinline__ float element(const Element* x, long long at, int channel, int channels, int plane) {
    if (NHWC) return to_float(x[at * channels + channel]);
    const long long image = at / plane;
    return to_float(x[(image * channels + channel) * plane + (at - image * plane)]);
}

extern "C" __global__ void batch_statistics_naive(const Element* x, float* y, Results results, int channels, int plane,
                                                  long long count, float epsilon, float momentum) {
    wait_for_previous_launch();
    const int c = blockIdx.x;
    float sum = 0.f;
    for (long long at = threadIdx.x; at < count; at += THREADS) sum += element(x, at, c, channels, plane);
    const float mean = block_sum<THREADS>(sum) / static_cast<float>(count);

    float squares = 0.f;
    for (long long at = threadIdx.x; at < count; at += THREADS) {
        const float distance = element(x, at, c, channels, plane) - mean;
        squares += distance * distance;
    }
    squares = block_sum<THREADS>(squares);
    if (threadIdx.x == 0)
        store_statistics(y, results, c, channels, mean, squares, static_cast<float>(count), epsilon, momentum);
}
