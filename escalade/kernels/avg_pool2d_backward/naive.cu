// dx[n][c][h][w] = sum of dy[n][c][oh][ow], divided as that window's sum was, over the windows that cover (h, w)
//
// The foot of the ladder: one thread per input adds up the windows that cover it, in a fixed order and in fp32.
// Limiter: the divisions that compute a pixel's position and a window's divisor, per element.
//
// Rung: `naive`. Read avg_pool2d/divisor.cuh (PyTorch's divisor).
#include "avg_pool2d/divisor.cuh"
#include "avg_pool2d/windows.cuh"
#include "common/elements.cuh"
#include "common/pool_gradient.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;       // problem.dtype
constexpr bool NHWC = true;  // problem.layout == "nhwc"
#endif

extern "C" __global__ void avg_pool2d_backward_naive(const Element* gradient, Element* dx, PoolShape shape,
                                                     Windows windows) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= 1LL * shape.batch * shape.channels * shape.height * shape.width) return;

    const PoolPosition pixel = pixel_position<NHWC>(at, shape);
    const Element* gradients = gradient + output_plane<NHWC>(pixel, shape);
    const int step = NHWC ? shape.channels : 1;
    const CoveringRange rows =
        covering(pixel.row, windows.kernel_h, windows.stride_h, windows.pad_h, shape.output_height);
    const CoveringRange columns =
        covering(pixel.column, windows.kernel_w, windows.stride_w, windows.pad_w, shape.output_width);
    float sum = 0.f;
    for (int row = rows.first; row < rows.end; ++row) {
        const int high =
            counted(row * windows.stride_h - windows.pad_h, windows.kernel_h, shape.height, windows.pad_h);
        for (int column = columns.first; column < columns.end; ++column) {
            const int wide =
                counted(column * windows.stride_w - windows.pad_w, windows.kernel_w, shape.width, windows.pad_w);
            sum += to_float(gradients[(row * shape.output_width + column) * step]) * one_over_divisor(high, wide);
        }
    }
    dx[at] = from_float<Element>(sum);
}
