// dx[n][c][h][w] = sum of row_weight * column_weight * dy[n][c][oh][ow] over the outputs that depend on (h, w)  (NCHW)
//
// The sum of per_pixel.cu, with shared data in smem. A CTA computes TILE_ROWS x TILE_COLUMNS pixels, one per thread, of
// PLANES planes one after another. It keeps
//   - the outputs that depend on each row and column, and the weights: computed once per CTA, not once per pixel,
//   - the tile of dy that is summed, staged once per plane in coalesced loads: the four source pixels of a bilinear
//   output (16 of a bicubic one) read it there again.
// Limiter: elements still move one by one, and two barriers per plane separate loads from sums.
//
// Rung: `shared_tile`. Read made_of.cuh (outputs and their weights, by the rules of upsample2d/places.cuh).
#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;              // problem.dtype
constexpr int TILE_ROWS = 16;       // config.rows: pixels per CTA
constexpr int TILE_COLUMNS = 16;    // config.columns
constexpr int PLANES = 8;           // config.planes: planes per CTA
constexpr int OUTPUT_ROWS = 32;     // config.staged(backward)[0]: gradients in shared memory
constexpr int OUTPUT_COLUMNS = 32;  // config.staged(backward)[1]
constexpr int MOST_ROWS = 2;        // config.most_weights(backward)[0]: weights per row and column
constexpr int MOST_COLUMNS = 2;     // config.most_weights(backward)[1]
#endif

#include "common/elements.cuh"
#include "common/ptx.cuh"
#include "upsample2d_backward/made_of.cuh"

constexpr int THREADS = TILE_ROWS * TILE_COLUMNS;

// Along one dimension, for SIZE pixels of a tile: their outputs, at most MOST per pixel, and the weights in these.
template <int SIZE, int MOST>
struct Contributions {
    DependentOutputs outputs[SIZE];
    float weight[MOST][SIZE];  // adjacent pixels in adjacent banks

    __device__ __forceinline__ void find(int at, int pixel, int size, int output_size, float step) {
        const DependentOutputs found = dependent_outputs(pixel, size, output_size, step);
        outputs[at] = found;
        if constexpr (TAPS > 1)  // the weight of the nearest pixel is 1
            for (int i = 0; i < found.end - found.first; ++i)
                weight[i][at] = weight_in(found.first + i, pixel, size, step);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    upsample2d_backward_shared_tile(const Element* gradient, Element* dx, PoolShape shape, float row_step,
                                    float column_step) {
    __shared__ Contributions<TILE_ROWS, MOST_ROWS> rows;
    __shared__ Contributions<TILE_COLUMNS, MOST_COLUMNS> columns;
    __shared__ float tile[OUTPUT_ROWS][OUTPUT_COLUMNS];
    wait_for_previous_launch();

    const int column_tiles = (shape.width + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int row_tiles = (shape.height + TILE_ROWS - 1) / TILE_ROWS;
    const int top = blockIdx.x / column_tiles % row_tiles * TILE_ROWS, left = blockIdx.x % column_tiles * TILE_COLUMNS;
    const int height = min(TILE_ROWS, shape.height - top), width = min(TILE_COLUMNS, shape.width - left);
    for (int at = threadIdx.x; at < height + width; at += THREADS) {
        if (at < height) rows.find(at, top + at, shape.height, shape.output_height, row_step);
        else columns.find(at - height, left + at - height, shape.width, shape.output_width, column_step);
    }
    __syncthreads();

    // Outputs of a tile: from the first of its first pixel to the last of its last.
    const int output_top = rows.outputs[0].first, output_left = columns.outputs[0].first;
    const int output_rows = rows.outputs[height - 1].end - output_top;
    const int output_columns = columns.outputs[width - 1].end - output_left;

    const int row = threadIdx.x / TILE_COLUMNS, column = threadIdx.x % TILE_COLUMNS;
    const long long planes = 1LL * shape.batch * shape.channels;
    const long long first_plane = 1LL * blockIdx.x / column_tiles / row_tiles * PLANES;
    for (long long plane = first_plane; plane < min(planes, first_plane + PLANES); ++plane) {
        if (plane > first_plane) __syncthreads();  // the previous plane has been summed
        const Element* gradients =
            gradient + (plane * shape.output_height + output_top) * shape.output_width + output_left;
#pragma unroll 4
        for (int at = threadIdx.x; at < OUTPUT_ROWS * OUTPUT_COLUMNS; at += THREADS) {
            const int i = at / OUTPUT_COLUMNS, j = at % OUTPUT_COLUMNS;
            if (i < output_rows && j < output_columns) tile[i][j] = to_float(gradients[i * shape.output_width + j]);
        }
        __syncthreads();

        if (row >= height || column >= width) continue;
        const DependentOutputs down = rows.outputs[row], along = columns.outputs[column];
        float sum = 0.f;
        for (int i = 0; i < down.end - down.first; ++i) {
            const float* outputs = tile[down.first - output_top + i] + along.first - output_left;
            float row_sum = 0.f;
            for (int j = 0; j < along.end - along.first; ++j)
                row_sum += TAPS > 1 ? columns.weight[j][column] * outputs[j] : outputs[j];
            sum += TAPS > 1 ? rows.weight[i][row] * row_sum : row_sum;
        }
        dx[(plane * shape.height + top + row) * shape.width + left + column] = from_float<Element>(sum);
    }
}
