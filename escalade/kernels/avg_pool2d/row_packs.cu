// y[n][c][oh][ow] = sum over r, s of x[n][c][oh*stride - pad + r][ow*stride - pad + s], divided               (NCHW)
//
// A thread takes a run of adjacent outputs in OUTPUT_ROWS rows. For each row that their windows cover it loads the
// inputs, 16 bytes at a time where they divide, and sums along the row, then down the rows, in fp32. Limiter: memory.
//
// Rung: `row_packs`. Read divisor.cuh (PyTorch's divisor).
#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;             // problem.dtype
constexpr int OUTPUT_ROWS = 2;     // config.rows: outputs per thread
constexpr int OUTPUT_COLUMNS = 4;  // config.columns
constexpr int VECTOR = 4;          // vector: columns per load
constexpr int STORED = 4;          // stored: columns per store
#endif

#include "avg_pool2d/divisor.cuh"
#include "common/prologue.cuh"
#include "common/row_stretch.cuh"

constexpr int ROWS = (OUTPUT_ROWS - 1) * STRIDE_H + KERNEL_H;

extern "C" __global__ void avg_pool2d_row_packs(const Element* x, Element* y, const float* gains, const float* shifts,
                                                const Element* gates, RunShape shape) {
    const Run run(shape);
    wait_for_previous_launch();
    if (run.task >= shape.tasks) return;

    const int top = run.row * STRIDE_H - PAD_H, left = run.column * STRIDE_W;
    const Element* plane = x + run.plane * shape.height * shape.width;
    const PrologueOperands<Element, 1> operands(gains, shifts, gates, run.plane % shape.channels, run.plane);
    float sums[OUTPUT_ROWS][OUTPUT_COLUMNS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (!INSIDE && (top + r < 0 || top + r >= shape.height)) continue;
        RowInputs seen;
        seen.load(plane + 1LL * (top + r) * shape.width, left, shape.width, from_float<Element>(0.f));
#ifdef PROLOGUE
#pragma unroll
        for (int i = 0; i < BEFORE + BODY + BEHIND; ++i)
            if (left - BEFORE + i >= 0 && left - BEFORE + i < shape.width)
                seen.at[i] = operands.prepared({seen.at[i]}).at[0];
#endif
#pragma unroll
        for (int j = 0; j < OUTPUT_COLUMNS; ++j) {
            float along = 0.f;
#pragma unroll
            for (int s = 0; s < KERNEL_W; ++s) along += to_float(seen.at[j * STRIDE_W + s]);
#pragma unroll
            for (int i = 0; i < OUTPUT_ROWS; ++i)
                if (r >= i * STRIDE_H && r < i * STRIDE_H + KERNEL_H) sums[i][j] += along;
        }
    }

#pragma unroll
    for (int i = 0; i < OUTPUT_ROWS; ++i) {
        if (!INSIDE && run.row + i >= shape.output_height) return;
        const int rows = counted(top + i * STRIDE_H, KERNEL_H, shape.height, PAD_H);
        Element means[OUTPUT_COLUMNS];
#pragma unroll
        for (int j = 0; j < OUTPUT_COLUMNS; ++j)
            means[j] = from_float<Element>(
                sums[i][j] * one_over_divisor(rows, counted(left + j * STRIDE_W - PAD_W, KERNEL_W, shape.width, PAD_W)));
        run.store(y + (run.plane * shape.output_height + run.row + i) * shape.output_width, shape.output_width, means);
    }
}
