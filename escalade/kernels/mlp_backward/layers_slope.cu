// gradient[i] = grad_y[i] * slope[i]
//
// Backward through the last layer's activation. Limiter: memory.
//
// Rung: `layers`. Read activation.cuh.
#include "common/elements.cuh"
#include "common/ptx.cuh"
#include "mlp_backward/activation.cuh"

extern "C" __global__ void mlp_backward_layers_slope(const Element* grad_y, const float* slope, float* gradient,
                                              long long elements) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at < elements) gradient[at] = through_slope<ACTIVATION>(to_float(grad_y[at]), slope[at]);
}
