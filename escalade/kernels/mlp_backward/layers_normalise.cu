// hat[row][f] = (x[row][f] - mean) * rstd[row],  mean and variance over the features of the row
//
// One warp per row; readers apply the norm's weight and bias. Limiter: memory.
//
// Rung: `layers`.
#include "common/elements.cuh"
#include "common/ptx.cuh"
#include "common/warp.cuh"

extern "C" __global__ void mlp_backward_layers_normalise(const Input* x, float* hat, float* rstd, int features,
                                                  long long rows) {
    wait_for_previous_launch();
    const int lane = threadIdx.x % 32;
    const long long row = (1LL * blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    const Input* from = x + row * features;
    float sum = 0.f;
    for (int f = lane; f < features; f += 32) sum += to_float(from[f]);
    const float mean = warp_sum(sum) / features;
    float squares = 0.f;
    for (int f = lane; f < features; f += 32) {
        const float distance = to_float(from[f]) - mean;
        squares += distance * distance;
    }
    const float scale = 1.f / sqrtf(warp_sum(squares) / features + EPSILON);
    for (int f = lane; f < features; f += 32) hat[row * features + f] = (to_float(from[f]) - mean) * scale;
    if (lane == 0) rstd[row] = scale;
}
