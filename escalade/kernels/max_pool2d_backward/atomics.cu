// sums[n][c][h][w] += dy[n][c][oh][ow], where x[n][c][h][w] is the largest of the window at (oh, ow)
//
// The foot of the ladder: one thread per output finds the argmax of its window, in x or as stored by the forward pass
// (STORED), and adds to the sum there. Where windows overlap, the order of additions, and with it the last bit, varies
// from run to run. Sums are fp32; a second launch rounds them. Limiter: atomics, and single-element loads.
//
// Rung: `atomics`. max_pool2d/largest_place.cuh has PyTorch's argmax rule.
#include "common/pool_gradient.cuh"
#include "common/ptx.cuh"
#include "max_pool2d/largest_place.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;          // problem.dtype
constexpr bool NHWC = true;     // problem.layout == "nhwc"
constexpr bool MASK = false;    // backward.mask: x is the output of a ReLU
constexpr bool STORED = false;  // backward.stored: read the places of maxima instead of x
#endif

extern "C" __global__ void max_pool2d_backward_atomics(const Element* gradient, const Element* x,
                                                       const unsigned char* indices, float* sums, PoolShape shape,
                                                       Windows windows) {
    wait_for_previous_launch();
    const long long outputs = 1LL * shape.batch * shape.channels * shape.output_height * shape.output_width;
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= outputs) return;

    const PoolPosition position = pool_position<NHWC>(at, shape);
    const long long plane = pool_plane<NHWC>(position, shape);
    const int step = NHWC ? shape.channels : 1;
    int from;
    if constexpr (STORED) {
        from = indices[at];
        if (from == NOWHERE) return;
    } else {
        const Largest largest = largest_in_window(x + plane, step, position.row, position.column, shape, windows);
        if (MASK && largest.is_inactive()) return;
        from = largest.index;
    }
    const int row = position.row * windows.stride_h - windows.pad_h + from / windows.kernel_w * windows.dilation_h;
    const int column =
        position.column * windows.stride_w - windows.pad_w + from % windows.kernel_w * windows.dilation_w;
    atomicAdd(sums + plane + (row * shape.width + column) * step, to_float(gradient[at]));
}
