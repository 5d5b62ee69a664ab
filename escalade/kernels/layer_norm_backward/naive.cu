// dx[row][f] of a layer norm, and mean and rstd of each row for the sums over rows (see layer_norm_backward.cuh)
//
// The foot of the ladder, first of two launches: one thread per row, in three passes. Limiter: the threads of a warp
// read 32 rows at once, so every load takes 32 sectors for 32 elements.
//
// Rung: `naive`. Read layer_norm_backward.cuh.
#include "layer_norm_backward/layer_norm_backward.cuh"

extern "C" __global__ void layer_norm_backward_naive(const Gradient* gradient, const Element* x, const float* weight,
                                                     Result* y, float2* statistics, int rows, int features,
                                                     float epsilon, const Residual* residual, Rounded* rounded) {
    wait_for_previous_launch();
    const long long row = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const Element* values = x + row * features;
    const Gradient* gradients = gradient + row * features;
    float mean = 0.f, sum = 0.f, squares = 0.f, products = 0.f;
    for (int f = 0; f < features; ++f) {
        if (HAS_MEAN) mean += to_float(values[f]);
        sum += times_weight(to_float(gradients[f]), weight, f);
    }
    mean /= features;
    for (int f = 0; f < features; ++f) {
        const float difference = to_float(values[f]) - mean;
        squares += difference * difference;
        products += times_weight(to_float(gradients[f]), weight, f) * difference;
    }
    const RowSums sums(mean, sum, squares, products, features, epsilon);
    for (int f = 0; f < features; ++f) {
        const float g = times_weight(to_float(gradients[f]), weight, f);
        float dx = sums.gradient(g, sums.normalized(to_float(values[f])));
        if (HAS_RESIDUAL) dx += to_float(residual[row * features + f]);
        y[row * features + f] = from_float<Result>(dx);
        if (HAS_ROUNDED) rounded[row * features + f] = from_float<Rounded>(dx);
    }
    statistics[row] = make_float2(sums.mean, sums.rstd);
}
