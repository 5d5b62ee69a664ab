// y[row][f] = activated((x[row][f] - mean) / sqrt(variance + epsilon) * weight[f] + bias[f])
//
// The foot of the ladder: one thread per row, in three passes: mean, variance, results. Limiter: the threads of a warp
// read 32 rows at once, so every load takes 32 sectors for 32 elements.
//
// Rung: `naive`. Read layer_norm.cuh.
#include "layer_norm/layer_norm.cuh"

extern "C" __global__ void layer_norm_naive(const Element* x, const Parameter* weight, const Parameter* bias, Result* y,
                                            int rows, int features, float epsilon) {
    wait_for_previous_launch();
    const long long row = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const Element* values = x + row * features;
    float mean = 0.f, squares = 0.f;
    if (HAS_MEAN) {
        for (int f = 0; f < features; ++f) mean += to_float(values[f]);
        mean /= features;
    }
    for (int f = 0; f < features; ++f) {
        const float difference = to_float(values[f]) - mean;
        squares += difference * difference;
    }
    const float scale = rsqrtf(squares / features + epsilon);
    for (int f = 0; f < features; ++f)
        y[row * features + f] = normalized(to_float(values[f]), mean, scale, weight, bias, f);
}
