// y[row][f] = activated((x[row][f] - mean) / sqrt(variance + epsilon) * weight[f] + bias[f])
//
// A warp a row: lanes read neighbouring elements and sum by shuffles, in three passes, of which the last two find the
// row in a cache. What bounds it: the loads, one element each.
//
// Serves `warp_per_row`. layer_norm.cuh has what becomes of an element.
#include "common/warp.cuh"
#include "layer_norm/layer_norm.cuh"

extern "C" __global__ void layer_norm_warp_per_row(const Element* x, const Element* weight, const Element* bias,
                                                   Element* y, int rows, int features, float epsilon) {
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
        y[row * features + f] = normalised(to_float(values[f]), mean, scale, weight, bias, f);
}
