// y[n][c][oh][ow] = max over r, s of x[n][c][oh*stride - pad + r][ow*stride - pad + s]                        (NCHW)
//
// A thread takes a run of adjacent outputs in OUTPUT_ROWS rows. For each row that their windows cover it loads the
// inputs, 16 bytes at a time where they divide, and reduces along the row, then down the rows; with PLACES pixel by
// pixel, and the argmax is stored too, one byte each. Limiter: memory.
//
// Rung: `row_packs`. Read largest.cuh (max), largest_place.cuh (max and argmax).
#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;               // problem.dtype
constexpr bool PLACES = false;       // problem.places: also store the place of each maximum
constexpr bool BEHIND_RELU = false;  // problem.behind_relu
constexpr int OUTPUT_ROWS = 2;       // config.rows: outputs per thread
constexpr int OUTPUT_COLUMNS = 4;    // config.columns
constexpr int VECTOR = 4;            // vector: columns per load
constexpr int STORED = 4;            // stored: columns per store
#endif

#include "common/pool_shape.cuh"
#include "common/row_stretch.cuh"
#include "common/softmax.cuh"
#include "max_pool2d/largest.cuh"
#include "max_pool2d/largest_place.cuh"

constexpr int ROWS = (OUTPUT_ROWS - 1) * STRIDE_H + KERNEL_H;

// Maxima and argmax of a row.
struct PlacedRow {
    Largest at[OUTPUT_COLUMNS];

    __device__ __forceinline__ void begin(int top, int left) {
#pragma unroll
        for (int j = 0; j < OUTPUT_COLUMNS; ++j)
            at[j] = {minus_infinity(), first_inside(top, 1) * KERNEL_W + first_inside(left + j * STRIDE_W, 1)};
    }
    __device__ __forceinline__ void update(const RowInputs& seen, int r) {
#pragma unroll
        for (int j = 0; j < OUTPUT_COLUMNS; ++j)
#pragma unroll
            for (int s = 0; s < KERNEL_W; ++s) at[j].update(to_float(seen.at[j * STRIDE_W + s]), r * KERNEL_W + s);
    }
    __device__ __forceinline__ void store(const Run& run, Element* y, unsigned char* indices, int width) const {
        Element values[OUTPUT_COLUMNS];
        unsigned char from[OUTPUT_COLUMNS];
#pragma unroll
        for (int j = 0; j < OUTPUT_COLUMNS; ++j)
            values[j] = from_float<Element>(at[j].value), from[j] = stored_index<BEHIND_RELU>(at[j]);
        run.store(y, width, values);
        run.store(indices, width, from);
    }
};

extern "C" __global__ void max_pool2d_row_packs(const Element* x, Element* y, unsigned char* indices, RunShape shape) {
    const Run run(shape);
    wait_for_previous_launch();
    if (run.task >= shape.tasks) return;

    const int top = run.row * STRIDE_H - PAD_H, left = run.column * STRIDE_W;
    const Element* plane = x + run.plane * shape.height * shape.width;
    const Element least = from_float<Element>(minus_infinity());
    const long long outputs = (run.plane * shape.output_height + run.row) * shape.output_width;
    if constexpr (PLACES) {
        PlacedRow largest[OUTPUT_ROWS];
#pragma unroll
        for (int i = 0; i < OUTPUT_ROWS; ++i) largest[i].begin(top + i * STRIDE_H, left - PAD_W);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (!INSIDE && (top + r < 0 || top + r >= shape.height)) continue;
            RowInputs seen;
            seen.load(plane + 1LL * (top + r) * shape.width, left, shape.width, least);
#pragma unroll
            for (int i = 0; i < OUTPUT_ROWS; ++i)
                if (r >= i * STRIDE_H && r < i * STRIDE_H + KERNEL_H) largest[i].update(seen, r - i * STRIDE_H);
        }
#pragma unroll
        for (int i = 0; i < OUTPUT_ROWS; ++i)
            if (INSIDE || run.row + i < shape.output_height)
                largest[i].store(run, y + outputs + i * shape.output_width, indices + outputs + i * shape.output_width,
                                 shape.output_width);
        return;
    }
    Element largest[OUTPUT_ROWS][OUTPUT_COLUMNS];
#pragma unroll
    for (int i = 0; i < OUTPUT_ROWS; ++i)
#pragma unroll
        for (int j = 0; j < OUTPUT_COLUMNS; ++j) largest[i][j] = least;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (!INSIDE && (top + r < 0 || top + r >= shape.height)) continue;
        RowInputs seen;
        seen.load(plane + 1LL * (top + r) * shape.width, left, shape.width, least);
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
        if (INSIDE || run.row + i < shape.output_height)
            run.store(y + outputs + i * shape.output_width, shape.output_width, largest[i]);
}
