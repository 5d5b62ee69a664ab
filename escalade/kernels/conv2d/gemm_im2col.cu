// columns[k][pixel] = x[n][c][oh*stride_h - pad_h + r*dilation_h][ow*stride_w - pad_w + s*dilation_w]      (NCHW)
// with k = (c, r, s) and pixel = (n, oh, ow); zero in the padding.
//
// First of three steps: unroll the convolution into a matrix, writing each input once per tap that reads it. One thread
// per channel and output pixel; adjacent threads store adjacent pixels. Limiter: memory, the matrix is R*S times as
// large as x.
//
// Rung: `im2col_gemm`.
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;  // problem.dtype
#endif

#include "common/elements.cuh"

extern "C" __global__ void conv2d_gemm_im2col(const Element* __restrict__ x, Element* __restrict__ columns,
                                         ConvShape shape) {
    const int output_pixels = shape.output_height * shape.output_width;
    const int pixels = shape.batch * output_pixels;
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= 1LL * pixels * shape.channels) return;

    const int channel = at / pixels;
    const int pixel = at - 1LL * channel * pixels;
    const int n = pixel / output_pixels;
    const int output_row = (pixel - n * output_pixels) / shape.output_width;
    const int output_column = pixel - n * output_pixels - output_row * shape.output_width;
    const int first_row = output_row * shape.stride_h - shape.pad_h;
    const int first_column = output_column * shape.stride_w - shape.pad_w;

    const Element* image = x + (1LL * n * shape.channels + channel) * shape.height * shape.width;
    Element* target = columns + 1LL * channel * shape.filter_height * shape.filter_width * pixels + pixel;
    for (int r = 0; r < shape.filter_height; ++r)
        for (int s = 0; s < shape.filter_width; ++s) {
            const int row = first_row + r * shape.dilation_h;
            const int column = first_column + s * shape.dilation_w;
            const bool inside = row >= 0 && row < shape.height && column >= 0 && column < shape.width;
            *target = inside ? image[row * shape.width + column] : from_float<Element>(0.f);
            target += pixels;
        }
}
