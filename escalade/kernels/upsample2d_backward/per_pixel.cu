// dx[n][c][h][w] = sum of row_weight * column_weight * dy[n][c][oh][ow] over the outputs that depend on (h, w)
//
// The foot of the ladder: one thread per input finds the outputs that depend on it, and adds them up in a fixed order
// and in fp32: no atomics, so every run gives the same bits. Limiter: the search for outputs and weights, per element.
//
// Rung: `per_pixel`. Read made_of.cuh (outputs and their weights, by the rules of upsample2d/places.cuh).
#include "common/elements.cuh"
#include "common/pool_gradient.cuh"
#include "common/ptx.cuh"
#include "upsample2d_backward/made_of.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;       // problem.dtype
constexpr bool NHWC = true;  // problem.layout == "nhwc"
#endif

extern "C" __global__ void upsample2d_backward_per_pixel(const Element* gradient, Element* dx, PoolShape shape,
                                                         float row_step, float column_step) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= 1LL * shape.batch * shape.channels * shape.height * shape.width) return;

    const PoolPosition pixel = pixel_position<NHWC>(at, shape);
    const Element* gradients = gradient + output_plane<NHWC>(pixel, shape);
    const int step = NHWC ? shape.channels : 1;
    const DependentOutputs rows = dependent_outputs(pixel.row, shape.height, shape.output_height, row_step);
    const DependentOutputs columns = dependent_outputs(pixel.column, shape.width, shape.output_width, column_step);
    float sum = 0.f;
    for (int row = rows.first; row < rows.end; ++row) {
        float along = 0.f;
        for (int column = columns.first; column < columns.end; ++column)
            along += weight_in(column, pixel.column, shape.width, column_step) *
                     to_float(gradients[(row * shape.output_width + column) * step]);
        sum += weight_in(row, pixel.row, shape.height, row_step) * along;
    }
    dx[at] = from_float<Element>(sum);
}
