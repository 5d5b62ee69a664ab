// y[n][c][oh][ow] = mean of x[n][c] over the window of output (oh, ow)
//
// The foot of the ladder: one thread per output sums its window pixel by pixel. Limiter: load latency; a thread has few
// loads in flight, and with few outputs there are few threads to hide it.
//
// Rung: `naive`. window.cuh has PyTorch's rule for windows.
#include "adaptive_avg_pool2d/window.cuh"
#include "common/quantized_input.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;       // problem.dtype
using Stored = float;        // problem.stored: elements of x
constexpr bool NHWC = true;  // problem.layout == "nhwc"
#endif

extern "C" __global__ void adaptive_avg_pool2d_naive(const Stored* x, Element* y, PoolShape shape,
                                                     const float* __restrict__ scale) {
    wait_for_previous_launch();
    const long long outputs = 1LL * shape.batch * shape.channels * shape.output_height * shape.output_width;
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= outputs) return;

    const PoolPosition position = pool_position<NHWC>(at, shape);
    const Window window = Window::of(position.row, position.column, shape);
    const Stored* plane = x + pool_plane<NHWC>(position, shape);
    const int step = NHWC ? shape.x_step() : 1;
    float sum = 0.f;
    for (int r = 0; r < window.rows; ++r)
        for (int s = 0; s < window.columns; ++s)
            sum += to_float(plane[((window.top + r) * shape.width + window.left + s) * step]);
    y[pool_output<NHWC>(position, at, shape)] = from_float<Element>(scaled<Stored>(sum / window.pixels(), scale));
}
