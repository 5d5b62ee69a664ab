// y[c][i][j][f] = x[f][r][s][c] + x[f][r][s+1][c] + x[f][r+1][s][c] + x[f][r+1][s+1][c], r and s counted from the end
//
// The foot of the ladder: one thread per element of y; writes coalesce. Limiter: single-element reads, a whole filter
// apart, each its own sector.
//
// Rung: `naive`. Read filters.cuh (sizes).
#include "filter_sums/filters.cuh"

extern "C" __global__ void filter_sums_naive(const Element* x, Element* y, Filters shape) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    long long rest = at;
    const int filter = rest % shape.filters;
    rest /= shape.filters;
    const int column = Filters::window(rest % shape.columns, shape.columns);
    rest /= shape.columns;
    const int row = Filters::window(rest % shape.rows, shape.rows);
    const long long channel = rest / shape.rows;
    if (channel >= shape.channels) return;

    float sum = 0.f;
#pragma unroll
    for (int tap = 0; tap < 4; ++tap) {
        const int r = row + tap / 2, s = column + tap % 2;
        if (r < 0 || r >= shape.height || s < 0 || s >= shape.width) continue;
        sum += to_float(x[((1LL * filter * shape.height + r) * shape.width + s) * shape.channels + channel]);
    }
    y[at] = from_float<Element>(sum);
}
