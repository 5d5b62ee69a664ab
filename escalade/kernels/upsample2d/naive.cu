// y[n][c][oh][ow] = sum over r, s of weight[r] * weight[s] * x[n][c][row[r]][column[s]]
//
// The foot of the ladder: one thread per output, its pixels read from global memory. Limiter: the divisions that
// compute an output's position, and the computation of its pixels, per element.
//
// Rung: `naive`. places.cuh has PyTorch's rules for rows, columns and weights.
#include "common/elements.cuh"
#include "common/ptx.cuh"
#include "upsample2d/places.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;       // problem.dtype
constexpr bool NHWC = true;  // problem.layout == "nhwc"
#endif

extern "C" __global__ void upsample2d_naive(const Element* x, Element* y, PoolShape shape, float row_step,
                                            float column_step) {
    wait_for_previous_launch();
    const long long outputs = 1LL * shape.batch * shape.channels * shape.output_height * shape.output_width;
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= outputs) return;

    const PoolPosition position = pool_position<NHWC>(at, shape);
    const Element* plane = x + pool_plane<NHWC>(position, shape);
    const int step = NHWC ? shape.x_step() : 1;
    const SourceTaps rows = source_taps(position.row, shape.height, row_step);
    const SourceTaps columns = source_taps(position.column, shape.width, column_step);
    float sum = 0.f;
#pragma unroll
    for (int r = 0; r < TAPS; ++r) {
        float along = 0.f;
#pragma unroll
        for (int s = 0; s < TAPS; ++s)
            along += columns.weight[s] * to_float(plane[(rows.at[r] * shape.width + columns.at[s]) * step]);
        sum += rows.weight[r] * along;
    }
    y[pool_output<NHWC>(position, at, shape)] = from_float<Element>(sum);
}
