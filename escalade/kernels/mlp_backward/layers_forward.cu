// z = bias[o] + sum over f of input[row][f] * weight[o][f];  value[row][o] = activation(z), slope[row][o] = its slope
//
// Forward step of a layer, one thread per output; groups of a row are rows of their own. After a norm, the input is the
// normalized row, without the norm's weight and bias. Limiter: two loads per product.
//
// Rung: `layers`. Read activation.cuh and layer_input.cuh.
#include "mlp_backward/activation.cuh"
#include "mlp_backward/layer_input.cuh"
#include "common/ptx.cuh"

extern "C" __global__ void mlp_backward_layers_forward(const Input* input, const Element* norm_weight,
                                                const Element* norm_bias, const Element* weight, const Element* bias,
                                                float* value, float* slope, int features, int outputs,
                                                long long elements) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;
    const long long row = at / outputs;
    const int o = static_cast<int>(at - row * outputs);
    float z = HAS_BIAS ? to_float(bias[o]) : 0.f;
    for (int f = 0; f < features; ++f)
        z += layer_input(input, norm_weight, norm_bias, row * features, f) * to_float(weight[1LL * o * features + f]);
    const Activated result = activate_with_slope<ACTIVATION>(z);
    if (KEEP_VALUE) value[at] = result.value;
    if (ACTIVATION != 0) slope[at] = result.slope;
}
