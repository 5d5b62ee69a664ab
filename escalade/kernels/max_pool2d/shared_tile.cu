// y[n][c][oh][ow] = max over r, s of x[n][c][oh*stride - pad + r][ow*stride - pad + s]                        (NCHW)
//
// One CTA per TILE_ROWS x TILE_COLUMNS outputs of one plane. The inputs of their windows are staged in smem once, so
// that overlapping windows cost no further loads and no bounds checks. Limiter: instructions, since elements still move
// one by one.
//
// Rung: `shared_tile`. Read largest.cuh (max, two elements at once in 16 bits).
#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;            // problem.dtype
constexpr int TILE_ROWS = 8;      // config.rows: outputs per CTA
constexpr int TILE_COLUMNS = 32;  // config.columns
#endif

#include "common/pool_shape.cuh"
#include "common/window_size.cuh"
#include "max_pool2d/largest.cuh"

constexpr int THREADS = TILE_ROWS * TILE_COLUMNS;
constexpr int ROWS = (TILE_ROWS - 1) * STRIDE_H + KERNEL_H;
constexpr int COLUMNS = (TILE_COLUMNS - 1) * STRIDE_W + KERNEL_W;

extern "C" __global__ void __launch_bounds__(THREADS)
    max_pool2d_shared_tile(const Element* x, Element* y, PoolShape shape, int row_tiles, int column_tiles) {
    __shared__ __align__(4) unsigned char shared_memory[ROWS * COLUMNS * sizeof(Element)];
    Element* tile = reinterpret_cast<Element*>(shared_memory);
    wait_for_previous_launch();

    const int first_column = blockIdx.x % column_tiles * TILE_COLUMNS;
    const int first_row = blockIdx.x / column_tiles % row_tiles * TILE_ROWS;
    const long long plane = blockIdx.x / column_tiles / row_tiles;
    if (plane >= 1LL * shape.batch * shape.channels) return;
    const Element* image = x + plane * shape.height * shape.width;
    const int top = first_row * STRIDE_H - PAD_H;
    const int left = first_column * STRIDE_W - PAD_W;
#pragma unroll 4
    for (int at = threadIdx.x; at < ROWS * COLUMNS; at += THREADS) {
        const int row = nearest_inside(top + at / COLUMNS, shape.height);
        const int column = nearest_inside(left + at % COLUMNS, shape.width);
        tile[at] = image[row * shape.width + column];
    }
    __syncthreads();

    const int row = threadIdx.x / TILE_COLUMNS;
    const int column = threadIdx.x % TILE_COLUMNS;
    if (first_row + row >= shape.output_height || first_column + column >= shape.output_width) return;
    const Element* window = tile + row * STRIDE_H * COLUMNS + column * STRIDE_W;
    Element largest = window[0];
#pragma unroll 8
    for (int r = 0; r < KERNEL_H; ++r)
#pragma unroll 8
        for (int s = 0; s < KERNEL_W; ++s) largest = larger(largest, window[r * COLUMNS + s]);
    y[(plane * shape.output_height + first_row + row) * shape.output_width + first_column + column] = largest;
}
