// sums[k][r][s][c] += gradient[p][k] * x[window(p, r, s)][c] for every pixel p; for the bias, gradient[p][k] alone
//
// The foot of the ladder: one thread per element of the gradient, in memory order, which adds a product to every weight
// of its filter. All pixels add to the same few weights, in an order that varies from run to run.
// Limiter: atomics in L2, one per product.
//
// Rung: `atomics`. atomics_finish.cu converts the sums to results.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;           // problem.dtype
constexpr bool HAS_BIAS = true;  // problem.bias
constexpr bool NHWC = false;     // problem.layout == "nhwc"
#endif

#include "common/elements.cuh"
#include "common/gradient_element.cuh"
#include "common/ptx.cuh"

extern "C" __global__ void conv2d_weight_gradient_atomics(const Element* x, const Element* gradient, float* sums,
                                                          ConvShape shape) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= 1LL * shape.batch * shape.filters * shape.output_height * shape.output_width) return;

    const GradientElement element(at, shape);
    const int group_channels = shape.channels / shape.groups, taps = shape.filter_height * shape.filter_width;
    const Element* image = x + 1LL * element.image * shape.channels * shape.height * shape.width;
    float* weights = sums + 1LL * element.filter * group_channels * taps;
    const float g = to_float(gradient[at]);

    if (HAS_BIAS) atomicAdd(sums + 1LL * shape.filters * group_channels * taps + element.filter, g);
    for (int tap = 0; tap < taps; ++tap)
        for (int channel = 0; channel < group_channels; ++channel) {
            const int from = element.input_offset(tap, channel, shape);
            if (from < 0) break;
            atomicAdd(weights + (NHWC ? tap * group_channels + channel : channel * taps + tap), g * to_float(image[from]));
        }
}
