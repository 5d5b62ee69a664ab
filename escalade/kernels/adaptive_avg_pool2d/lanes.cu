// y[n][c][oh][ow] = mean of x[n][c] over the window of output (oh, ow)                                        (NCHW)
//
// LANES adjacent lanes of a warp share one output: they read its window in order, interleaved, and reduce by shuffles.
// Limiter: memory, with single-element accesses; windows are not aligned.
//
// Rung: `lanes`. window.cuh has PyTorch's rule for windows.
#include "adaptive_avg_pool2d/window.cuh"
#include "common/elements.cuh"
#include "common/ptx.cuh"
#include "common/warp.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;             // problem.dtype
constexpr bool WHOLE_ROWS = true;  // problem.output_width == 1
constexpr int LANES = 32;          // config.lanes: lanes per output
#endif

constexpr int AHEAD = 8;  // loads in flight per lane

extern "C" __global__ void adaptive_avg_pool2d_lanes(const Element* x, Element* y, PoolShape shape) {
    wait_for_previous_launch();
    const u32 outputs = shape.batch * shape.channels * shape.output_height * shape.output_width;
    const u32 asked = (blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    const u32 at = min(asked, outputs - 1);  // lanes past the end repeat the last output: shuffles need all 32
    const int lane = threadIdx.x % LANES;

    const PoolPosition position = pool_position<false>(at, shape);
    const Window window = Window::of(position.row, position.column, shape);
    const Element* corner = x + pool_plane<false>(position, shape) + window.top * shape.width + window.left;
    float sum = 0.f;
    for (int first = lane; first < window.pixels(); first += AHEAD * LANES) {
        Element values[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int pixel = first + i * LANES;
            values[i] = from_float<Element>(0.f);
            if (pixel < window.pixels()) values[i] = corner[window.offset<WHOLE_ROWS>(pixel, shape)];
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) sum += to_float(values[i]);
    }
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    if (lane == 0 && asked == at) y[at] = from_float<Element>(sum / window.pixels());
}
