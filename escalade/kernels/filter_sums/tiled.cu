// y[c][i][j][f] = x[f][r][s][c] + x[f][r][s+1][c] + x[f][r+1][s][c] + x[f][r+1][s+1][c], r and s counted from the end
//
// One CTA per row of y for TILE filters and TILE channels: its two rows of x are read into smem along channels, summed
// on the way, and written along filters. All reads of a thread are in flight at once. Limiter: the launch; for large
// filters, L2.
//
// Rung: `tiled`. Read filters.cuh (sizes).
#include "filter_sums/filters.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int WIDTH = 3;      // problem.width
constexpr int THREADS = 512;  // config.threads
#endif

constexpr int TILE = 32;
constexpr int WARPS = THREADS / 32;
// with wide filters, the reads of a thread would exceed its registers
constexpr int PASSES = WIDTH > 4 ? TILE / WARPS : 1;
constexpr int ROUNDS = WIDTH * TILE / WARPS / PASSES;
constexpr int COLUMNS = WIDTH + 2 * ZEROS - 1;
static_assert(TILE % WARPS == 0, "warps divide the taps evenly");

extern "C" __global__ void __launch_bounds__(THREADS) filter_sums_tiled(const Element* x, Element* y, Filters shape) {
    __shared__ float tile[WIDTH][TILE][TILE + 1];  // sums of two rows, by tap, channel and filter
    wait_for_previous_launch();
    const int first_filter = blockIdx.x * TILE, first_channel = blockIdx.y * TILE;
    const int row = Filters::window(blockIdx.z, shape.rows);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // Out-of-range rows read a valid one and are not added: a branch would serialize the reads.
    const bool has_upper = row >= 0, has_lower = row + 1 < shape.height;
    const int upper = max(row, 0), lower = min(row + 1, shape.height - 1);
    const Element* columns = x + min(first_channel + lane, shape.channels - 1);
#pragma unroll 1
    for (int pass = 0; pass < PASSES; ++pass) {
        Element read[ROUNDS][2];
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            const int at = (pass * ROUNDS + round) * WARPS + warp;
            const long long filter = min(first_filter + at / WIDTH, shape.filters - 1);
            read[round][0] = columns[((filter * shape.height + upper) * WIDTH + at % WIDTH) * shape.channels];
            read[round][1] = columns[((filter * shape.height + lower) * WIDTH + at % WIDTH) * shape.channels];
        }
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            const int at = (pass * ROUNDS + round) * WARPS + warp;
            const float sum = has_upper ? to_float(read[round][0]) : 0.f;
            tile[at % WIDTH][lane][at / WIDTH] = has_lower ? sum + to_float(read[round][1]) : sum;
        }
    }
    __syncthreads();

    const int filter = first_filter + lane;
#pragma unroll 4
    for (int at = warp; at < COLUMNS * TILE; at += WARPS) {
        const int channel = at / COLUMNS, j = at % COLUMNS;
        if (filter >= shape.filters || first_channel + channel >= shape.channels) continue;
        const int column = Filters::window(j, COLUMNS);
        float sum = column >= 0 ? tile[column][channel][lane] : 0.f;
        if (column + 1 < WIDTH) sum += tile[column + 1][channel][lane];
        y[((1LL * (first_channel + channel) * shape.rows + blockIdx.z) * COLUMNS + j) * shape.filters + filter] =
            from_float<Element>(sum);
    }
}
