// y[n][c][oh][ow] = max over r, s of x[n][c][oh*stride - pad + r*dilation][ow*stride - pad + s*dilation]
//
// The foot of the ladder: one thread per output, every window read from global memory. Limiter: the divisions that
// compute an output's position, and single-element loads, kernel_h * kernel_w per output.
//
// Rung: `naive`. Read largest_place.cuh (max and argmax), windows.cuh (window sizes).
#include "common/pool_shape.cuh"
#include "common/ptx.cuh"
#include "max_pool2d/largest_place.cuh"
#include "max_pool2d/windows.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;               // problem.dtype
constexpr bool NHWC = true;          // problem.layout == "nhwc"
constexpr bool PLACES = false;       // problem.places: also store the place of each maximum
constexpr bool BEHIND_RELU = false;  // problem.behind_relu
#endif

extern "C" __global__ void max_pool2d_naive(const Element* x, Element* y, unsigned char* indices, PoolShape shape,
                                            Windows windows) {
    wait_for_previous_launch();
    const long long outputs = 1LL * shape.batch * shape.channels * shape.output_height * shape.output_width;
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= outputs) return;

    const PoolPosition position = pool_position<NHWC>(at, shape);
    const Element* plane = x + pool_plane<NHWC>(position, shape);
    const int step = NHWC ? shape.x_step() : 1;
    const Largest largest = largest_in_window(plane, step, position.row, position.column, shape, windows);
    y[pool_output<NHWC>(position, at, shape)] = from_float<Element>(largest.value);
    if (PLACES) indices[at] = stored_index<BEHIND_RELU>(largest);
}
