// y[n][c][oh][ow] = sum over r, s of x[n][c][oh*stride - pad + r][ow*stride - pad + s], divided
//
// The foot of the ladder: one thread per output, every window read from global memory. Limiter: the divisions that
// compute an output's position, and single-element loads, kernel_h * kernel_w per output.
//
// Rung: `naive`. Read divisor.cuh (PyTorch's divisor), windows.cuh (window sizes).
#include "avg_pool2d/divisor.cuh"
#include "avg_pool2d/windows.cuh"
#include "common/elements.cuh"
#include "common/prologue.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;       // problem.dtype
constexpr bool NHWC = true;  // problem.layout == "nhwc"
#endif

extern "C" __global__ void avg_pool2d_naive(const Element* x, Element* y, const float* gains, const float* shifts,
                                            const Element* gates, PoolShape shape, Windows windows) {
    wait_for_previous_launch();
    const long long outputs = 1LL * shape.batch * shape.channels * shape.output_height * shape.output_width;
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= outputs) return;

    const PoolPosition position = pool_position<NHWC>(at, shape);
    const Element* plane = x + pool_plane<NHWC>(position, shape);
    const int step = NHWC ? shape.x_step() : 1;
    const int top = position.row * windows.stride_h - windows.pad_h;
    const int left = position.column * windows.stride_w - windows.pad_w;
    const int bottom = min(top + windows.kernel_h, shape.height);
    const int right = min(left + windows.kernel_w, shape.width);
    float sum = 0.f;
    for (int row = max(top, 0); row < bottom; ++row)
        for (int column = max(left, 0); column < right; ++column) {
            const Element value = plane[(row * shape.width + column) * step];
            sum += to_float(prepared(value, gains, shifts, gates, position.channel,
                                     1LL * position.image * shape.channels + position.channel));
        }
    const float scale = one_over_divisor(counted(top, windows.kernel_h, shape.height, windows.pad_h),
                                         counted(left, windows.kernel_w, shape.width, windows.pad_w));
    y[pool_output<NHWC>(position, at, shape)] = from_float<Element>(sum * scale);
}
