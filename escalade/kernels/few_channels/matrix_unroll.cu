// columns[k][pixel] = x[n][c][oh - pad_h + r][ow - pad_w + s]   with k = (c, r, s) and pixel = (n, oh, ow)
//
// First of three steps: unroll the convolution into a matrix, writing each pixel once per tap that reads it, zeros for
// the padding. One thread per channel and output pixel. Limiter: memory, the matrix is R*S times as large as x.
//
// Rungs: `matrix_unroll`, `streams`, `tensor_cores`. Read shape.cuh (sizes, image access).
#include "common/ptx.cuh"
#include "few_channels/shape.cuh"

extern "C" __global__ void few_channels_matrix_unroll(const Source* x, Element* columns, FewChannelsShape shape) {
    wait_for_previous_launch();
    const int conv_pixels = shape.conv_height * shape.conv_width;
    const long long pixels = 1LL * shape.batch * conv_pixels;
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= pixels * CHANNELS) return;
    const int channel = at / pixels;
    const long long pixel = at % pixels;
    const long long n = pixel / conv_pixels;
    const int row = pixel % conv_pixels / shape.conv_width - shape.pad_h;
    const int column = pixel % conv_pixels % shape.conv_width - shape.pad_w;

    const Source* image = x + n * CHANNELS * shape.height * shape.width;
    Element* target = columns + 1LL * channel * shape.filter_height * shape.filter_width * pixels + pixel;
    for (int r = 0; r < shape.filter_height; ++r)
        for (int s = 0; s < shape.filter_width; ++s) {
            *target = from_float<Element>(pixel_at(image, channel, row + r, column + s, shape));
            target += pixels;
        }
}
