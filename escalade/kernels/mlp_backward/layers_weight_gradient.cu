// parts[part][o][f] = sum over the part's rows of gradient[row][o] * input[row][f]; bias: of gradient[row][o]
//
// One thread per weight, and one per output's bias; rows are divided into parts of `part_rows`, one per blockIdx.y.
// Limiter: two loads per product.
//
// Rung: `layers`. Read layer_input.cuh.
#include "common/ptx.cuh"
#include "mlp_backward/layer_input.cuh"

extern "C" __global__ void mlp_backward_layers_weight_gradient(const Gradient* gradient, const Input* input,
                                                        const Element* norm_weight, const Element* norm_bias,
                                                        float* parts, long long pitch, long long weight_at,
                                                        long long bias_at, int features, int outputs, long long rows,
                                                        long long part_rows) {
    wait_for_previous_launch();
    const int columns = features + (HAS_BIAS ? 1 : 0);
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= 1LL * outputs * columns) return;
    const int o = static_cast<int>(at / columns), f = static_cast<int>(at - 1LL * o * columns);
    const long long end = min(rows, (blockIdx.y + 1) * part_rows);
    float sum = 0.f;
    for (long long row = blockIdx.y * part_rows; row < end; ++row) {
        const float g = to_float(gradient[row * outputs + o]);
        sum += HAS_BIAS && f == features ? g : g * layer_input(input, norm_weight, norm_bias, row * features, f);
    }
    float* part = parts + blockIdx.y * pitch;
    if (HAS_BIAS && f == features)
        part[bias_at + o] = sum;
    else
        part[weight_at + 1LL * o * features + f] = sum;
}
