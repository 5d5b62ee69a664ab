// y[n][i*classes_h + p][j*classes_w + q][c] = source[n][i + shift_h][j + shift_w][(p*classes_w + q)*channels + c]
//
// Depth-to-space: rearranges the results of one convolution, a block of output pixels per pixel, into those of a
// transposed convolution. A row of a block is contiguous in both, so threads move VECTOR elements at once; rows of
// threads take rows of y. Limiter: memory.
//
// Rung: `subpixel`.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;     // forward.dtype
constexpr int VECTOR = 2;  // vector
#endif

#include "common/elements.cuh"
#include "common/ptx.cuh"

struct Blocks {  // filled by escalade/ops/conv2d_input_gradient/rungs/subpixel.py, in this order
    int batch, channels, height, width;
    int classes_h, classes_w;  // pixels of a block
    int shift_h, shift_w, source_height, source_width;
};

extern "C" __global__ void conv2d_input_gradient_subpixel_shuffle(const Element* source, Element* y, Blocks blocks) {
    wait_for_previous_launch();
    const int row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= blocks.batch * blocks.height) return;
    const int n = row / blocks.height, h = row % blocks.height;
    const int i = h / blocks.classes_h + blocks.shift_h, p = h % blocks.classes_h;
    const int run = blocks.classes_w * blocks.channels, length = blocks.width * blocks.channels;
    const long long source_row = (1LL * n * blocks.source_height + i) * blocks.source_width + blocks.shift_w;
    const Element* from = source + (source_row * blocks.classes_h + p) * run;
    Element* to = y + 1LL * row * length;
    for (int at = threadIdx.x * VECTOR; at < length; at += blockDim.x * VECTOR) {
        const int j = at / run;
        const Element* one = from + 1LL * j * blocks.classes_h * run + at % run;
        store_pack(to + at, load_pack<Element, VECTOR>(one));
    }
}
