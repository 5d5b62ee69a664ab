// y[n][c][oh][ow] = max over r, s of x[n][c][oh*stride - pad + r*dilation][ow*stride - pad + s*dilation]
//
// The foot of the ladder: one thread an output, every window read from global memory. What bounds it: the divisions
// that find an output's place, and loads of single elements, kernel_h * kernel_w for each output.
//
// Serves `naive`. largest.cuh has the maximum, by two elements at once in 16 bits, windows.cuh the windows' sizes.
#include "common/pool_shape.cuh"
#include "max_pool2d/largest.cuh"
#include "max_pool2d/windows.cuh"

extern "C" __global__ void max_pool2d_naive(const Element* x, Element* y, PoolShape shape, Windows windows) {
    wait_for_previous_launch();
    const long long outputs = 1LL * shape.batch * shape.channels * shape.output_height * shape.output_width;
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= outputs) return;

    const PoolPlace place = pool_place<NHWC>(at, shape);
    const Element* plane = x + pool_plane<NHWC>(place, shape);
    const int step = NHWC ? shape.x_step() : 1;
    const int top = place.row * windows.stride_h - windows.pad_h;
    const int left = place.column * windows.stride_w - windows.pad_w;
    Element largest = from_float<Element>(__int_as_float(0xFF800000));  // -inf
    for (int r = 0; r < windows.kernel_h; ++r) {
        const int row = top + r * windows.dilation_h;
        if (row < 0 || row >= shape.height) continue;
        for (int s = 0; s < windows.kernel_w; ++s) {
            const int column = left + s * windows.dilation_w;
            if (column < 0 || column >= shape.width) continue;
            largest = larger(largest, plane[(row * shape.width + column) * step]);
        }
    }
    y[pool_output<NHWC>(place, at, shape)] = largest;
}
