// y[c][i][j][f] = x[f][r][s][c] + x[f][r][s+1][c] + x[f][r+1][s][c] + x[f][r+1][s+1][c], r and s counted from the end
//
// A block takes one row of y for TILE filters and TILE channels: the two rows of x that it is of come into shared memory
// along channels, added up on the way, and leave it along filters. What bounds it: the launch; for large filters, L2.
//
// Serves `tiled`. filters.cuh has the sizes.
#include "filter_sums/filters.cuh"

constexpr int TILE = 32;

extern "C" __global__ void __launch_bounds__(THREADS) filter_sums_tiled(const Element* x, Element* y, Filters shape) {
    __shared__ float tile[WIDTH][TILE][TILE + 1];  // the sums of two rows, by tap, channel and filter
    wait_for_previous_launch();
    const int first_filter = blockIdx.x * TILE, first_channel = blockIdx.y * TILE;
    const int row = Filters::window(blockIdx.z, shape.rows);
    const int lane = threadIdx.x % 32;

    for (int at = threadIdx.x / 32; at < WIDTH * TILE; at += THREADS / 32) {
        const int tap = at % WIDTH, filter = first_filter + at / WIDTH, channel = first_channel + lane;
        float sum = 0.f;
        if (filter < shape.filters && channel < shape.channels) {
            const Element* first = x + (1LL * filter * shape.height * WIDTH + tap) * shape.channels + channel;
#pragma unroll
            for (int r = row; r < row + 2; ++r)
                if (r >= 0 && r < shape.height) sum += to_float(first[r * WIDTH * shape.channels]);
        }
        tile[tap][lane][at / WIDTH] = sum;
    }
    __syncthreads();

    const int filter = first_filter + lane;
    for (int at = threadIdx.x / 32; at < shape.columns * TILE; at += THREADS / 32) {
        const int channel = at / shape.columns, j = at % shape.columns;
        if (filter >= shape.filters || first_channel + channel >= shape.channels) continue;
        const int column = Filters::window(j, shape.columns);
        float sum = column >= 0 ? tile[column][channel][lane] : 0.f;
        if (column + 1 < WIDTH) sum += tile[column + 1][channel][lane];
        y[((1LL * (first_channel + channel) * shape.rows + blockIdx.z) * shape.columns + j) * shape.filters + filter] =
            from_float<Element>(sum);
    }
}
