// y[row][f] = activated((x[row][f] - mean) / sqrt(variance + epsilon) * weight[f] + bias[f])
//
// One warp per row: lanes read adjacent elements and reduce by shuffles, in three passes, the last two from cache.
// Limiter: single-element loads.
//
// Rung: `warp_per_row`. Read layer_norm.cuh.
#include "common/warp.cuh"
#include "layer_norm/layer_norm.cuh"

extern "C" __global__ void layer_norm_warp_per_row(const Element* x, const Parameter* weight, const Parameter* bias,
                                                   Result* y, int rows, int features, float epsilon) {
    wait_for_previous_launch();
    const int lane = threadIdx.x % 32;
    const long long row = 1LL * blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const Element* values = x + row * features;
    float mean = 0.f, squares = 0.f;
    if (HAS_MEAN) {
        for (int f = lane; f < features; f += 32) mean += to_float(values[f]);
        mean = warp_sum(mean) / features;
    }
    for (int f = lane; f < features; f += 32) {
        const float difference = to_float(values[f]) - mean;
        squares += difference * difference;
    }
    const float scale = rsqrtf(warp_sum(squares) / features + epsilon);
    for (int f = lane; f < features; f += 32)
        y[row * features + f] = normalized(to_float(values[f]), mean, scale, weight, bias, f);
}
