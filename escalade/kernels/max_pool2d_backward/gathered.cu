// dx[n][c][h][w] = sum of dy[n][c][oh][ow] over the windows whose largest is x[n][c][h][w]
//
// One thread per input visits the windows that cover it, recomputes the argmax of each, and adds up, in a fixed order
// and in fp32, the gradients of those where it is the max: no atomics, so every run gives the same bits. Limiter:
// instructions, since every pixel of a window recomputes its max.
//
// Rung: `gathered`. Read gather.cuh (windows of a pixel); max_pool2d/largest_place.cuh has PyTorch's argmax rule.
#include "common/pool_gradient.cuh"
#include "common/ptx.cuh"
#include "max_pool2d/largest_place.cuh"
#include "max_pool2d_backward/gather.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;        // problem.dtype
constexpr bool NHWC = true;   // problem.layout == "nhwc"
constexpr bool MASK = false;  // backward.mask: x is the output of a ReLU
#endif

extern "C" __global__ void max_pool2d_backward_gathered(const Element* gradient, const Element* x, Element* dx,
                                                        PoolShape shape, Windows windows) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= 1LL * shape.batch * shape.channels * shape.height * shape.width) return;

    const PoolPosition pixel = pixel_position<NHWC>(at, shape);
    const Element* plane = x + pool_plane<NHWC>(pixel, shape);
    const Element* gradients = gradient + output_plane<NHWC>(pixel, shape);
    const int step = NHWC ? shape.channels : 1;
    dx[at] = from_float<Element>(gather(pixel, shape, windows, [&](int output_row, int output_column, int tap) {
        const Largest largest = largest_in_window(plane, step, output_row, output_column, shape, windows);
        const bool mine = largest.index == tap && !(MASK && largest.is_inactive());
        return mine ? to_float(gradients[(output_row * shape.output_width + output_column) * step]) : 0.f;
    }));
}
