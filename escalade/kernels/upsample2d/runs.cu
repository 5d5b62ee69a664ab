// y[n][c][oh][ow] = sum over r, s of weight[r] * weight[s] * x[n][c][row[r]][column[s]]                       (NCHW)
//
// A thread takes ROWS x COLUMNS adjacent outputs of one plane: it computes its position, and each row and column with
// their weights, once for all of them, and stores COLUMNS at once. Source pixels shared by outputs come from L1.
// Limiter: memory for copies; single-element loads if an output has several source pixels.
//
// Rung: `runs`. places.cuh has PyTorch's rules for rows, columns and weights.
#include "common/elements.cuh"
#include "common/ptx.cuh"
#include "upsample2d/places.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;      // problem.dtype
constexpr int ROWS = 4;     // config.rows: outputs per thread
constexpr int COLUMNS = 2;  // config.columns
#endif

extern "C" __global__ void upsample2d_runs(const Element* x, Element* y, PoolShape shape, float row_step,
                                           float column_step) {
    wait_for_previous_launch();
    const u32 runs = shape.output_width / COLUMNS;
    const u32 groups = (shape.output_height + ROWS - 1) / ROWS;
    u32 rest = blockIdx.x * blockDim.x + threadIdx.x;
    const int first_column = rest % runs * COLUMNS;
    rest /= runs;
    const int first_row = rest % groups * ROWS;
    const u32 plane = rest / groups;
    if (plane >= static_cast<u32>(shape.batch) * shape.channels) return;

    const Element* pixels = x + 1LL * plane * shape.height * shape.width;
    Element* outputs = y + 1LL * plane * shape.output_height * shape.output_width + first_column;
    Pack<Element, COLUMNS> results[ROWS];  // all before the first store, so that loads are in flight together
    SourceTaps rows[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        rows[i] = source_taps(min(first_row + i, shape.output_height - 1), shape.height, row_step);
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        const SourceTaps columns = source_taps(first_column + j, shape.width, column_step);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if constexpr (TAPS == 1) {  // a bitwise copy
                results[i].at[j] = pixels[rows[i].at[0] * shape.width + columns.at[0]];
            } else {
                float sum = 0.f;
#pragma unroll
                for (int r = 0; r < TAPS; ++r) {
                    const Element* row = pixels + rows[i].at[r] * shape.width;
                    float along = 0.f;
#pragma unroll
                    for (int s = 0; s < TAPS; ++s) along += columns.weight[s] * to_float(row[columns.at[s]]);
                    sum += rows[i].weight[r] * along;
                }
                results[i].at[j] = from_float<Element>(sum);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        if (first_row + i < shape.output_height)
            store_pack(outputs + 1LL * (first_row + i) * shape.output_width, results[i]);
}
