// large[n][c][h*FACTOR + i][w*FACTOR + j] = small[n][(c*FACTOR + i)*FACTOR + j][h][w]; with DOWN the inverse
//
// The foot of the ladder: one thread per element, in the order of the large image, whose accesses coalesce. Limiter:
// single-element accesses, in the small image FACTOR * FACTOR apart, and the divisions that compute positions.
//
// Rung: `naive`. Read shuffle.cuh (sizes).
#include "pixel_shuffle/shuffle.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;       // problem.dtype
constexpr bool NHWC = true;  // problem.layout == "nhwc"
#endif

extern "C" __global__ void pixel_shuffle_naive(const Element* x, Element* y, Shuffle shape) {
    wait_for_previous_launch();
    const int height = shape.height * FACTOR, width = shape.width * FACTOR;
    const long long elements = 1LL * shape.batch * shape.channels * height * width;
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;

    long long rest = at;
    int channel = 0;
    if (NHWC) channel = rest % shape.channels, rest /= shape.channels;
    const int column = rest % width;
    rest /= width;
    const int row = rest % height;
    rest /= height;
    if (!NHWC) channel = rest % shape.channels, rest /= shape.channels;
    const long long image = rest;

    const int h = row / FACTOR, w = column / FACTOR;
    const long long many = 1LL * channel * BLOCK + row % FACTOR * FACTOR + column % FACTOR;
    const long long large = NHWC ? ((image * height + row) * width + column) * shape.large_step + channel : at;
    const long long small =
        NHWC ? ((image * shape.height + h) * shape.width + w) * shape.small_step + many
             : ((image * shape.channels * BLOCK + many) * shape.height + h) * shape.width + w;
    y[DOWN ? small : large] = x[DOWN ? large : small];
}
