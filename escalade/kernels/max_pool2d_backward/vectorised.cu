// dx[n][h][w][c] = sum of dy[n][oh][ow][c] over the windows whose largest is x[n][h][w][c]                    (NHWC)
//
// A thread takes VECTOR channels (16 bytes where they divide) of a tile of x: the pixels from the first of a window to
// the first of the window TILE_ROWS further down and TILE_COLUMNS to the right. For each window that reaches into the
// tile it has the gradient and the argmax, one byte each: stored by the forward pass (STORED), or recomputed from x
// once for the whole tile. Then each pixel adds up its gradients, in a fixed order and in fp32. Limiter: memory; where
// windows overlap and x is read, the comparisons.
//
// Rung: `vectorised`. max_pool2d/largest_place.cuh has PyTorch's argmax rule.
#include "common/pool_gradient.cuh"
#include "common/ptx.cuh"
#include "common/window_size.cuh"
#include "max_pool2d/largest_place.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;           // problem.dtype
constexpr bool MASK = false;     // backward.mask: x is the output of a ReLU
constexpr bool STORED = false;   // backward.stored: read the places of maxima instead of x
constexpr int VECTOR = 4;        // vector: channels per access
constexpr int TILE_ROWS = 1;     // config.rows: windows that begin in a tile
constexpr int TILE_COLUMNS = 1;  // config.columns
#endif

constexpr int BEFORE_ROWS = (KERNEL_H - 1) / STRIDE_H;  // windows that begin before a tile and reach into it
constexpr int BEFORE_COLUMNS = (KERNEL_W - 1) / STRIDE_W;
constexpr int WINDOW_ROWS = BEFORE_ROWS + TILE_ROWS;
constexpr int WINDOW_COLUMNS = BEFORE_COLUMNS + TILE_COLUMNS;
constexpr int PIXEL_ROWS = TILE_ROWS * STRIDE_H;
constexpr int PIXEL_COLUMNS = TILE_COLUMNS * STRIDE_W;

using Vector = Pack<Element, VECTOR>;
using Indices = Pack<unsigned char, VECTOR>;

__device__ __forceinline__ int nearest(int position, int size) { return min(max(position, 0), size - 1); }
__device__ __forceinline__ bool within(int position, int size) { return position >= 0 && position < size; }

// Argmax of VECTOR channels; `image` is their first in the image's first pixel. Every load is issued, taps in the
// padding reading the nearest pixel, so that all are in flight together.
__device__ __forceinline__ Indices find(const Element* image, int output_row, int output_column,
                                        const PoolShape& shape) {
    const int top = output_row * STRIDE_H - PAD_H, left = output_column * STRIDE_W - PAD_W;
    const int first = first_inside(top, 1) * KERNEL_W + first_inside(left, 1);
    Largest largest[VECTOR];
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) largest[e] = {__int_as_float(0xFF800000), first};  // -inf
#pragma unroll
    for (int r = 0; r < KERNEL_H; ++r)
#pragma unroll
        for (int s = 0; s < KERNEL_W; ++s) {
            const int row = nearest(top + r, shape.height), column = nearest(left + s, shape.width);
            const Vector seen = load_pack<Element, VECTOR>(image + (row * shape.width + column) * shape.channels);
            if (!within(top + r, shape.height) || !within(left + s, shape.width)) continue;
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) largest[e].update(to_float(seen.at[e]), r * KERNEL_W + s);
        }
    Indices indices;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) indices.at[e] = stored_index<MASK>(largest[e]);
    return indices;
}

extern "C" __global__ void max_pool2d_backward_vectorised(const Element* gradient, const Element* x,
                                                          const unsigned char* stored, Element* dx, PoolShape shape,
                                                          int tile_rows, int tile_columns) {
    wait_for_previous_launch();
    const u32 vectors = shape.channels / VECTOR;
    u32 rest = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 channel = rest % vectors * VECTOR;
    rest /= vectors;
    const int tile_column = rest % static_cast<u32>(tile_columns);
    rest /= static_cast<u32>(tile_columns);
    const int tile_row = rest % static_cast<u32>(tile_rows);
    const u32 image = rest / static_cast<u32>(tile_rows);
    if (image >= static_cast<u32>(shape.batch)) return;

    const long long outputs = 1LL * image * shape.output_height * shape.output_width * shape.channels + channel;
    const long long pixels = 1LL * image * shape.height * shape.width * shape.channels + channel;
    Vector gradients[WINDOW_ROWS][WINDOW_COLUMNS];
    Indices indices[WINDOW_ROWS][WINDOW_COLUMNS];
#pragma unroll
    for (int i = 0; i < WINDOW_ROWS; ++i)
#pragma unroll
        for (int j = 0; j < WINDOW_COLUMNS; ++j) {
            const int output_row = tile_row * TILE_ROWS - BEFORE_ROWS + i;
            const int output_column = tile_column * TILE_COLUMNS - BEFORE_COLUMNS + j;
            const int row = nearest(output_row, shape.output_height);
            const int column = nearest(output_column, shape.output_width);
            const long long output = outputs + (row * shape.output_width + column) * shape.channels;
            gradients[i][j] = load_pack<Element, VECTOR>(gradient + output);
            indices[i][j] =
                STORED ? load_pack<unsigned char, VECTOR>(stored + output) : find(x + pixels, row, column, shape);
            if (within(output_row, shape.output_height) && within(output_column, shape.output_width)) continue;
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) indices[i][j].at[e] = NOWHERE;
        }

#pragma unroll
    for (int i = 0; i < PIXEL_ROWS; ++i)
#pragma unroll
        for (int j = 0; j < PIXEL_COLUMNS; ++j) {
            float sums[VECTOR] = {};
#pragma unroll
            for (int a = 0; a < WINDOW_ROWS; ++a)
#pragma unroll
                for (int b = 0; b < WINDOW_COLUMNS; ++b) {
                    const int r = i - (a - BEFORE_ROWS) * STRIDE_H, s = j - (b - BEFORE_COLUMNS) * STRIDE_W;
                    if (r < 0 || r >= KERNEL_H || s < 0 || s >= KERNEL_W) continue;
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e)
                        if (indices[a][b].at[e] == r * KERNEL_W + s) sums[e] += to_float(gradients[a][b].at[e]);
                }
            const int row = tile_row * PIXEL_ROWS - PAD_H + i, column = tile_column * PIXEL_COLUMNS - PAD_W + j;
            if (!within(row, shape.height) || !within(column, shape.width)) continue;
            Vector result;
            from_floats(result, sums);
            store_pack(dx + pixels + (row * shape.width + column) * shape.channels, result);
        }
}
