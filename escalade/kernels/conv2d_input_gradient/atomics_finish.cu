// dx = sums after the epilogue; resets the sums to zero for the next call
//
// HAS_MASK: the gradient passes where the auxiliary tensor is positive, as through a ReLU; HAS_RESIDUAL: the auxiliary
// tensor is added. A transposed convolution has a bias and an activation instead. Limiter: memory.
//
// Rung: `atomics`. Read mask.cuh for the mask.
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                // problem.dtype
constexpr bool NHWC = false;          // problem.layout == "nhwc"
constexpr bool HAS_MASK = true;       // problem.mask
constexpr bool HAS_BIAS = false;      // problem.forward.bias
constexpr bool HAS_RESIDUAL = false;  // problem.forward.residual
constexpr bool HAS_RELU = false;      // problem.forward.relu
#endif

#include "common/epilogue.cuh"
#include "common/ptx.cuh"
#include "conv2d_input_gradient/mask.cuh"

extern "C" __global__ void conv2d_input_gradient_atomics_finish(float* sums, const Element* aux, const Element* bias,
                                                                Element* y, ConvShape shape) {
    wait_for_previous_launch();
    const int pixels = shape.height * shape.width;
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= 1LL * shape.batch * shape.channels * pixels) return;
    const int channel = static_cast<int>((NHWC ? at : at / pixels) % shape.channels);
    float sum = sums[at];
    sums[at] = 0.f;
    if (HAS_MASK) sum = masked(sum, aux[at]);
    y[at] = finish<HAS_BIAS, HAS_RESIDUAL, HAS_RELU, Element>(sum, bias, channel, aux, at);
}
