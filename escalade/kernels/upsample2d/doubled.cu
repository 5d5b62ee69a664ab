// y[n][c][oh][ow] = sum over r, s of weight[r] * weight[s] * x[n][c][row[r]][column[s]], twice as high and wide  (NCHW)
//
// Between two pixels of x there are two of y, a quarter and three quarters of the way: the weights are constants. A
// thread takes 4 x 4 outputs, computed from 4 x 4 pixels, each loaded once; first along columns, then along rows.
// Limiter: memory.
//
// Rung: `doubled`.
#include "common/elements.cuh"
#include "common/pool_shape.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;  // problem.dtype
#endif

constexpr int OUTPUTS = 4;  // down and along
constexpr int PIXELS = OUTPUTS / 2 + 2;
constexpr float NEAR = 0.75f, FAR = 0.25f;

// Outputs, the first of which precedes pixel 1. Nothing precedes an image's first pixel: there the first output is that
// pixel, and its second tap the next one, with a weight of 0.
__device__ __forceinline__ void between(float (&outputs)[OUTPUTS], const float (&pixels)[PIXELS], bool is_first) {
#pragma unroll
    for (int o = 0; o < OUTPUTS; o += 2) {
        outputs[o] = FAR * pixels[o / 2] + NEAR * pixels[o / 2 + 1];
        outputs[o + 1] = NEAR * pixels[o / 2 + 1] + FAR * pixels[o / 2 + 2];
    }
    if (is_first) outputs[0] = pixels[1] + 0.f * pixels[2];
}

extern "C" __global__ void upsample2d_doubled(const Element* x, Element* y, PoolShape shape, float, float) {
    wait_for_previous_launch();
    const u32 runs = shape.output_width / OUTPUTS;
    const u32 groups = (shape.output_height + OUTPUTS - 1) / OUTPUTS;
    u32 rest = blockIdx.x * blockDim.x + threadIdx.x;
    const int first_column = rest % runs * OUTPUTS;
    rest /= runs;
    const int first_row = rest % groups * OUTPUTS;
    const u32 plane = rest / groups;
    if (plane >= static_cast<u32>(shape.batch) * shape.channels) return;

    const Element* pixels = x + 1LL * plane * shape.height * shape.width;
    const int column = first_column / 2, left = max(column - 1, 0), right = min(column + 2, shape.width - 1);
    float along[PIXELS][OUTPUTS];
#pragma unroll
    for (int r = 0; r < PIXELS; ++r) {
        const Element* row = pixels + min(max(first_row / 2 + r - 1, 0), shape.height - 1) * shape.width;
        const Pack<Element, 2> middle = load_pack<Element, 2>(row + column);
        const float seen[PIXELS] = {to_float(row[left]), to_float(middle.at[0]), to_float(middle.at[1]),
                                    to_float(row[right])};
        between(along[r], seen, first_column == 0);
    }
    Pack<Element, OUTPUTS> results[OUTPUTS];
#pragma unroll
    for (int j = 0; j < OUTPUTS; ++j) {
        const float seen[PIXELS] = {along[0][j], along[1][j], along[2][j], along[3][j]};
        float outputs[OUTPUTS];
        between(outputs, seen, first_row == 0);
#pragma unroll
        for (int i = 0; i < OUTPUTS; ++i) results[i].at[j] = from_float<Element>(outputs[i]);
    }
    Element* corner = y + 1LL * plane * shape.output_height * shape.output_width + first_column;
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i)
        if (first_row + i < shape.output_height)
            store_pack(corner + 1LL * (first_row + i) * shape.output_width, results[i]);
}
