// dx[n][c][h][w] = sum of dy[n][c][oh][ow] over the windows whose stored argmax is (h, w)
//
// Like gathered.cu, but the forward pass stored the argmax of each window, one byte per output: x is not read, and no
// max is recomputed. Limiter: the divisions that compute a pixel's position, and single-element loads.
//
// Rung: `stored`. Read gather.cuh (windows of a pixel).
#include "common/elements.cuh"
#include "common/pool_gradient.cuh"
#include "common/ptx.cuh"
#include "max_pool2d_backward/gather.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;       // problem.dtype
constexpr bool NHWC = true;  // problem.layout == "nhwc"
#endif

extern "C" __global__ void max_pool2d_backward_stored(const Element* gradient, const unsigned char* indices,
                                                      Element* dx, PoolShape shape, Windows windows) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= 1LL * shape.batch * shape.channels * shape.height * shape.width) return;

    const PoolPosition pixel = pixel_position<NHWC>(at, shape);
    const long long outputs = output_plane<NHWC>(pixel, shape);
    const int step = NHWC ? shape.channels : 1;
    dx[at] = from_float<Element>(gather(pixel, shape, windows, [&](int output_row, int output_column, int tap) {
        const long long output = outputs + (output_row * shape.output_width + output_column) * step;
        return indices[output] == tap ? to_float(gradient[output]) : 0.f;
    }));
}
