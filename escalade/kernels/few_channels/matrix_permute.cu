// y[n][filter][pixel] (or y[n][pixel][filter]) = product[filter][n][pixel] + bias[filter]
//
// Third of three steps: the product has filters outermost, y images. One thread per output. Limiter: memory.
//
// Rungs: `matrix_unroll`, `streams`, `tensor_cores`. Read shape.cuh (sizes, image access).
#include "common/epilogue.cuh"
#include "common/ptx.cuh"
#include "few_channels/shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr bool HAS_BIAS = false;  // problem.bias
#endif

extern "C" __global__ void few_channels_matrix_permute(const float* product, const Element* bias, Element* y,
                                                FewChannelsShape shape) {
    wait_for_previous_launch();
    const int pixels = shape.conv_height * shape.conv_width;
    const int image_outputs = shape.filters * pixels;
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= 1LL * shape.batch * image_outputs) return;
    const long long n = at / image_outputs;
    const int inside = at % image_outputs;
    const int filter = NHWC ? inside % shape.filters : inside / pixels;
    const int pixel = NHWC ? inside / shape.filters : inside % pixels;
    const float sum = product[(1LL * filter * shape.batch + n) * pixels + pixel];
    y[at] = finish<HAS_BIAS, false, false, Element>(sum, bias, filter, nullptr, 0);
}
