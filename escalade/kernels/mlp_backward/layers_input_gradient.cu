// result[row][f] = sum over o of gradient[row][o] * weight[o][f], through the slope of the preceding activation
//
// One thread per feature. Limiter: two loads per product.
//
// Rung: `layers`. Read activation.cuh.
#include "common/elements.cuh"
#include "common/ptx.cuh"
#include "mlp_backward/activation.cuh"

extern "C" __global__ void mlp_backward_layers_input_gradient(const Gradient* gradient, const Element* weight,
                                                       const float* slope, float* result, int features, int outputs,
                                                       long long elements) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;
    const long long row = at / features;
    const int f = static_cast<int>(at - row * features);
    float sum = 0.f;
    for (int o = 0; o < outputs; ++o)
        sum += to_float(gradient[row * outputs + o]) * to_float(weight[1LL * o * features + f]);
    result[at] = through_slope<ACTIVATION>(sum, ACTIVATION != 0 ? slope[at] : 1.f);
}
