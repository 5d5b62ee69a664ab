// z = bias[o] + sum over f of input[row][f] * weight[o][f];  value[row][o] = activation(z), slope[row][o] = its slope
//
// The forward step of a layer, a thread an output; groups of a row are rows of their own. Where a norm comes first the
// input is what it made of the row, still without its weight and bias. What bounds it: loads, two for each product.
//
// Serves `layers`. activation.cuh has activations and their slopes. layer_input.cuh has what the weights are multiplied
// with.
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
