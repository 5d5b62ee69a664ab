// parts[part][f] = sum over the part's rows of gradient[row][f] * hat[row][f]; then of gradient[row][f]
//
// Gradients of a norm's weight and bias, one thread per feature. Limiter: memory.
//
// Rung: `layers`.
#include "common/elements.cuh"
#include "common/ptx.cuh"

extern "C" __global__ void mlp_backward_layers_norm_parameters(const float* gradient, const float* hat, float* parts,
                                                        long long pitch, long long parameter_at, int features,
                                                        long long rows, long long part_rows) {
    wait_for_previous_launch();
    const int f = blockIdx.x * blockDim.x + threadIdx.x;
    if (f >= features) return;
    const long long end = min(rows, (blockIdx.y + 1) * part_rows);
    float along = 0.f, sum = 0.f;
    for (long long row = blockIdx.y * part_rows; row < end; ++row) {
        const float g = gradient[row * features + f];
        along += g * hat[row * features + f];
        sum += g;
    }
    float* part = parts + blockIdx.y * pitch + parameter_at;
    part[f] = along, part[features + f] = sum;
}
