// dx[n][c][h][w] = sum of dy[n][c][oh][ow] over the windows whose largest is x[n][c][h][w]                     (NCHW)
//
// Like atomics.cu, but a CTA has the sums of TILE_ROWS x TILE_COLUMNS pixels of a plane in smem, in fp32: its threads
// loop over the windows that reach into the tile and add to the sums there, and each pixel is written once. No
// workspace, no second launch, and no global atomics; where windows overlap, the order of additions still varies from
// run to run. Limiter: single-element loads, and recomputing maxima of windows that reach into two tiles.
//
// Rung: `shared_sums`. max_pool2d/largest_place.cuh has PyTorch's argmax rule.
#include "common/pool_gradient.cuh"
#include "common/ptx.cuh"
#include "max_pool2d/largest_place.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;            // problem.dtype
constexpr bool MASK = false;      // backward.mask: x is the output of a ReLU
constexpr bool STORED = false;    // backward.stored: read the places of maxima instead of x
constexpr int TILE_ROWS = 16;     // config.rows: pixels per CTA
constexpr int TILE_COLUMNS = 32;  // config.columns
#endif

// Windows along one dimension that cover any of the pixels [first, end).
__device__ __forceinline__ CoveringRange covering_any(int first, int end, int kernel, int dilation, int stride, int pad,
                                                      int outputs) {
    const int span = (kernel - 1) * dilation + 1;
    return {covering(first, span, stride, pad, outputs).first, covering(end - 1, span, stride, pad, outputs).end};
}

extern "C" __global__ void max_pool2d_backward_shared_sums(const Element* gradient, const Element* x,
                                                           const unsigned char* indices, Element* dx, PoolShape shape,
                                                           Windows windows, int row_tiles, int column_tiles) {
    __shared__ float sums[TILE_ROWS][TILE_COLUMNS];
    wait_for_previous_launch();
    const int top = blockIdx.x / column_tiles % row_tiles * TILE_ROWS, left = blockIdx.x % column_tiles * TILE_COLUMNS;
    const int bottom = min(top + TILE_ROWS, shape.height), right = min(left + TILE_COLUMNS, shape.width);
    const long long plane = blockIdx.x / column_tiles / row_tiles;
    if (plane >= 1LL * shape.batch * shape.channels) return;
    for (int at = threadIdx.x; at < TILE_ROWS * TILE_COLUMNS; at += blockDim.x)
        sums[at / TILE_COLUMNS][at % TILE_COLUMNS] = 0.f;
    __syncthreads();

    const CoveringRange down = covering_any(top, bottom, windows.kernel_h, windows.dilation_h, windows.stride_h,
                                            windows.pad_h, shape.output_height);
    const CoveringRange along = covering_any(left, right, windows.kernel_w, windows.dilation_w, windows.stride_w,
                                             windows.pad_w, shape.output_width);
    const int across = along.end - along.first;
    const long long outputs = plane * shape.output_height * shape.output_width;
    const long long pixels = plane * shape.height * shape.width;
    for (int at = threadIdx.x; at < (down.end - down.first) * across; at += blockDim.x) {
        const int output_row = down.first + at / across, output_column = along.first + at % across;
        const long long output = outputs + output_row * shape.output_width + output_column;
        Largest largest{1.f, 0};
        if (STORED) largest.index = indices[output];
        else largest = largest_in_window(x + pixels, 1, output_row, output_column, shape, windows);
        if (STORED ? largest.index == NOWHERE : MASK && largest.is_inactive()) continue;
        const int row =
            output_row * windows.stride_h - windows.pad_h + largest.index / windows.kernel_w * windows.dilation_h;
        const int column =
            output_column * windows.stride_w - windows.pad_w + largest.index % windows.kernel_w * windows.dilation_w;
        if (row < top || row >= bottom || column < left || column >= right) continue;  // another tile's
        atomicAdd(&sums[row - top][column - left], to_float(gradient[output]));
    }
    __syncthreads();
    for (int at = threadIdx.x; at < TILE_ROWS * TILE_COLUMNS; at += blockDim.x) {
        const int row = top + at / TILE_COLUMNS, column = left + at % TILE_COLUMNS;
        if (row < bottom && column < right)
            dx[pixels + row * shape.width + column] = from_float<Element>(sums[row - top][column - left]);
    }
}
