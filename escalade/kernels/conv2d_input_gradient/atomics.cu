// sums[window(p, r, s)][c] += dy[p][k] * w[k][r][s][c] for every pixel p
//
// The foot of the ladder: one thread per element of dy, which adds a product to every element of dx in its window. All
// filters of a pixel, and overlapping windows, add to the same elements, in an order that varies from run to run.
// Limiter: atomics in L2, one per product.
//
// Rung: `atomics`. atomics_finish.cu converts the sums to results.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;        // problem.dtype
constexpr bool NHWC = false;  // problem.layout == "nhwc"
#endif

#include "common/elements.cuh"
#include "common/gradient_element.cuh"
#include "common/ptx.cuh"

extern "C" __global__ void conv2d_input_gradient_atomics(const Element* gradient, const Element* weight, float* sums,
                                                         ConvShape shape) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= 1LL * shape.batch * shape.filters * shape.output_height * shape.output_width) return;

    const GradientElement element(at, shape);
    const int group_channels = shape.channels / shape.groups, taps = shape.filter_height * shape.filter_width;
    const Element* weights = weight + 1LL * element.filter * group_channels * taps;
    float* image = sums + 1LL * element.image * shape.channels * shape.height * shape.width;
    const float g = to_float(gradient[at]);

    for (int tap = 0; tap < taps; ++tap)
        for (int channel = 0; channel < group_channels; ++channel) {
            const int to = element.input_offset(tap, channel, shape);
            if (to < 0) break;
            atomicAdd(image + to, g * to_float(weights[NHWC ? tap * group_channels + channel : channel * taps + tap]));
        }
}
