// weight_gradient[f] = sum over rows of dy * (x - mean) * rstd, bias_gradient[f] = sum over rows of dy
//
// Second of two launches: one thread per feature reads all rows. Limiter: few threads.
//
// Rung: `naive`.
#include "layer_norm_backward/layer_norm_backward.cuh"

extern "C" __global__ void layer_norm_backward_naive_sums(const Gradient* gradient, const Element* x,
                                                          const float2* statistics, float* weight_gradient,
                                                          float* bias_gradient, int rows, int features) {
    wait_for_previous_launch();
    const int f = blockIdx.x * blockDim.x + threadIdx.x;
    if (f >= features) return;
    float products = 0.f, sum = 0.f;
    for (long long row = 0; row < rows; ++row) {
        const float2 of_row = statistics[row];
        const float g = to_float(gradient[row * features + f]);
        products += g * (to_float(x[row * features + f]) - of_row.x) * of_row.y;
        sum += g;
    }
    weight_gradient[f] = products;
    bias_gradient[f] = sum;
}
