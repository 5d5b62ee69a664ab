// dx[n][h][w][c] = sum of dy[n][oh][ow][c], divided as that window's sum was, over the windows that cover (h, w) (NHWC)
//
// A thread takes VECTOR channels (16 bytes where they divide) of TILE_ROWS x TILE_COLUMNS adjacent pixels. It loops
// over the windows that cover any of them: each gradient is loaded and divided once, and added to the pixels of its
// window, in a fixed order and in fp32. Limiter: memory.
//
// Rung: `vectorised`. Read avg_pool2d/divisor.cuh (PyTorch's divisor).
#include "avg_pool2d/divisor.cuh"
#include "common/elements.cuh"
#include "common/pool_gradient.cuh"
#include "common/ptx.cuh"
#include "common/window_size.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;           // problem.dtype
constexpr int VECTOR = 4;        // vector: channels per access
constexpr int TILE_ROWS = 2;     // config.rows: pixels per thread
constexpr int TILE_COLUMNS = 2;  // config.columns
#endif

using Vector = Pack<Element, VECTOR>;

extern "C" __global__ void avg_pool2d_backward_vectorised(const Element* gradient, Element* dx, PoolShape shape) {
    wait_for_previous_launch();
    const u32 vectors = shape.channels / VECTOR;
    const u32 runs = (shape.width + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const u32 bands = (shape.height + TILE_ROWS - 1) / TILE_ROWS;
    u32 rest = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 channel = rest % vectors * VECTOR;
    rest /= vectors;
    const int first_column = rest % runs * TILE_COLUMNS;
    rest /= runs;
    const int first_row = rest % bands * TILE_ROWS;
    const u32 image = rest / bands;
    if (image >= static_cast<u32>(shape.batch)) return;

    const Element* gradients =
        gradient + 1LL * image * shape.output_height * shape.output_width * shape.channels + channel;
    const int first_of_rows = covering(first_row, KERNEL_H, STRIDE_H, PAD_H, shape.output_height).first;
    const int end_of_rows = covering(first_row + TILE_ROWS - 1, KERNEL_H, STRIDE_H, PAD_H, shape.output_height).end;
    const int first_of_columns = covering(first_column, KERNEL_W, STRIDE_W, PAD_W, shape.output_width).first;
    const int end_of_columns =
        covering(first_column + TILE_COLUMNS - 1, KERNEL_W, STRIDE_W, PAD_W, shape.output_width).end;
    float sums[TILE_ROWS][TILE_COLUMNS][VECTOR] = {};
    for (int output_row = first_of_rows; output_row < end_of_rows; ++output_row) {
        const int top = output_row * STRIDE_H - PAD_H;
        for (int output_column = first_of_columns; output_column < end_of_columns; ++output_column) {
            const int left = output_column * STRIDE_W - PAD_W;
            const Vector seen = load_pack<Element, VECTOR>(
                gradients + (output_row * shape.output_width + output_column) * shape.channels);
            const float scale = one_over_divisor(counted(top, KERNEL_H, shape.height, PAD_H),
                                                 counted(left, KERNEL_W, shape.width, PAD_W));
            float share[VECTOR];
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) share[e] = to_float(seen.at[e]) * scale;
#pragma unroll
            for (int i = 0; i < TILE_ROWS; ++i)
#pragma unroll
                for (int j = 0; j < TILE_COLUMNS; ++j) {
                    const int r = first_row + i - top, s = first_column + j - left;
                    if (r < 0 || r >= KERNEL_H || s < 0 || s >= KERNEL_W) continue;
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e) sums[i][j][e] += share[e];
                }
        }
    }

    Element* pixels = dx + 1LL * image * shape.height * shape.width * shape.channels + channel;
#pragma unroll
    for (int i = 0; i < TILE_ROWS; ++i)
#pragma unroll
        for (int j = 0; j < TILE_COLUMNS; ++j) {
            if (first_row + i >= shape.height || first_column + j >= shape.width) continue;
            Vector result;
            from_floats(result, sums[i][j]);
            store_pack(pixels + ((first_row + i) * shape.width + first_column + j) * shape.channels, result);
        }
}
