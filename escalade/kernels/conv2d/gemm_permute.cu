// y[n][filter][oh][ow] = relu(product[filter][n][oh][ow] + bias[filter] + residual[n][filter][oh][ow])      (NCHW)
//
// Third of three steps: the product has filters outermost, y images. One thread per output; reads and writes are both
// contiguous. Limiter: memory.
//
// Rung: `im2col_gemm`.
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                // problem.dtype
constexpr bool HAS_BIAS = false;      // problem.bias
constexpr bool HAS_RESIDUAL = false;  // problem.residual
constexpr bool HAS_RELU = false;      // problem.relu
#endif

#include "common/epilogue.cuh"

extern "C" __global__ void conv2d_gemm_permute(const float* __restrict__ product, const Element* __restrict__ bias,
                                          const Element* __restrict__ residual, Element* __restrict__ y,
                                          ConvShape shape) {
    const int output_pixels = shape.output_height * shape.output_width;
    const int image_outputs = shape.filters * output_pixels;
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= 1LL * shape.batch * image_outputs) return;

    const int n = at / image_outputs;
    const int in_image = at - 1LL * n * image_outputs;
    const int filter = in_image / output_pixels;
    const int pixel = in_image - filter * output_pixels;
    const float sum = product[(1LL * filter * shape.batch + n) * output_pixels + pixel];
    y[at] = finish<HAS_BIAS, HAS_RESIDUAL, HAS_RELU>(sum, bias, filter, residual, at);
}
