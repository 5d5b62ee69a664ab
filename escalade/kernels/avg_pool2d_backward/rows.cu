// dx[n][c][h][w] = dy[n][c][oh][ow], divided as the sum of the one window was that covers (h, w), else 0        (NCHW)
//
// For non-overlapping windows without padding: a thread takes VECTOR columns (up to 16 bytes) of one row of windows. No
// pixel has two windows, so nothing is summed. Limiter: memory.
//
// Rung: `rows`. Read common/rows_of_windows.cuh (rows of a thread), avg_pool2d/divisor.cuh (PyTorch's divisor).
#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;     // problem.dtype
constexpr int VECTOR = 4;  // vector: columns per access
#endif

#include "avg_pool2d/divisor.cuh"
#include "common/rows_of_windows.cuh"

extern "C" __global__ void avg_pool2d_backward_rows(const Element* gradient, Element* dx, PoolShape shape) {
    wait_for_previous_launch();
    const WindowRow row(shape);
    if (!row.exists) return;
    Pack<Element, OUTPUTS> shares = {};
    if (row.has_windows()) shares = load_pack<Element, OUTPUTS>(gradient + row.output);
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o)
        shares.at[o] = from_float<Element>(to_float(shares.at[o]) * one_over_divisor(KERNEL_H, KERNEL_W));
    row.store_pixels(dx, [&](int o, int tap) { return tap < 0 ? from_float<Element>(0.f) : shares.at[o]; });
}
