// g = gradient[row] * norm_weight;  result[row] = rstd[row] * (g - mean(g) - hat[row] * mean(g * hat[row])), then
// through the slope of the preceding activation
//
// One warp per row. Limiter: memory.
//
// Rung: `layers`. Read activation.cuh.
#include "common/elements.cuh"
#include "common/ptx.cuh"
#include "common/warp.cuh"
#include "mlp_backward/activation.cuh"

extern "C" __global__ void mlp_backward_layers_norm_gradient(const float* gradient, const float* hat, const float* rstd,
                                                      const Element* norm_weight, const float* slope, float* result,
                                                      int features, long long rows) {
    wait_for_previous_launch();
    const int lane = threadIdx.x % 32;
    const long long row = (1LL * blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    const long long start = row * features;
    float sum = 0.f, along = 0.f;
    for (int f = lane; f < features; f += 32) {
        const float g = gradient[start + f] * to_float(norm_weight[f]);
        sum += g;
        along += g * hat[start + f];
    }
    const float mean = warp_sum(sum) / features, mean_along = warp_sum(along) / features, scale = rstd[row];
    for (int f = lane; f < features; f += 32) {
        const float g = gradient[start + f] * to_float(norm_weight[f]);
        const float below = scale * (g - mean - hat[start + f] * mean_along);
        result[start + f] = through_slope<ACTIVATION>(below, ACTIVATION != 0 ? slope[start + f] : 1.f);
    }
}
