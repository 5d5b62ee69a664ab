// y[n][c][oh][ow] = max over r, s of x[n][c][oh*stride - pad + r][ow*stride - pad + s]                        (NCHW)
//
// A thread takes a run of neighbouring outputs in OUTPUT_ROWS rows. It walks over the rows that their windows see: of
// each a stretch is loaded, 16 bytes at a time where they divide, and reduced along the row, then down the rows. What
// bounds it: memory.
//
// Serves `row_packs`. largest.cuh has the maximum.
#include "common/pool_shape.cuh"
#include "common/row_stretch.cuh"
#include "common/softmax.cuh"
#include "max_pool2d/largest.cuh"

constexpr int ROWS = (OUTPUT_ROWS - 1) * STRIDE_H + KERNEL_H;

extern "C" __global__ void max_pool2d_row_packs(const Element* x, Element* y, PoolShape shape) {
    wait_for_previous_launch();
    const Run run(shape.output_height, shape.output_width);
    if (run.plane >= 1LL * shape.batch * shape.channels) return;

    const int top = run.row * STRIDE_H - PAD_H, left = run.column * STRIDE_W;
    const Element* plane = x + run.plane * shape.height * shape.width;
    const Element least = from_float<Element>(minus_infinity());
    Element largest[OUTPUT_ROWS][OUTPUT_COLUMNS];
#pragma unroll
    for (int i = 0; i < OUTPUT_ROWS; ++i)
#pragma unroll
        for (int j = 0; j < OUTPUT_COLUMNS; ++j) largest[i][j] = least;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (top + r < 0 || top + r >= shape.height) continue;
        Stretch seen;
        seen.load(plane + (top + r) * shape.width, left, shape.width, least);
#pragma unroll
        for (int j = 0; j < OUTPUT_COLUMNS; ++j) {
            Element along = seen.at[j * STRIDE_W];
#pragma unroll
            for (int s = 1; s < KERNEL_W; ++s) along = larger(along, seen.at[j * STRIDE_W + s]);
#pragma unroll
            for (int i = 0; i < OUTPUT_ROWS; ++i)
                if (r >= i * STRIDE_H && r < i * STRIDE_H + KERNEL_H)
                    largest[i][j] = larger(largest[i][j], along);
        }
    }

#pragma unroll
    for (int i = 0; i < OUTPUT_ROWS; ++i)
        if (run.row + i < shape.output_height)
            run.store(y + (run.plane * shape.output_height + run.row + i) * shape.output_width, shape.output_width,
                      largest[i]);
}
