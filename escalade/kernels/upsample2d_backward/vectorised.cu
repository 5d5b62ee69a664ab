// dx[n][h][w][c] = sum of row_weight * column_weight * dy[n][oh][ow][c] over the outputs that depend on (h, w)  (NHWC)
//
// A thread takes VECTOR channels (16 bytes where they divide) of one pixel. No pixel has more than MOST_ROWS x
// MOST_COLUMNS outputs: if these are few, the loop is unrolled, all loads are in flight together and each weight is
// computed once. EVEN: every pixel has exactly that many (nearest interpolation by powers of two), and nothing is
// searched. Limiter: memory.
//
// Rung: `vectorised`. Read made_of.cuh (outputs and their weights, by the rules of upsample2d/places.cuh).
#include "common/elements.cuh"
#include "common/pool_gradient.cuh"
#include "common/ptx.cuh"
#include "upsample2d_backward/made_of.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;               // problem.dtype
constexpr int VECTOR = 4;            // vector: channels per access
constexpr bool EVEN = true;          // backward.even is not None: every pixel has the same number of copies
constexpr int MOST_ROWS = 2;         // rows: outputs per pixel, down and along
constexpr int MOST_COLUMNS = 2;      // columns
constexpr int UNROLLED_ROWS = 2;     // rows if rows * columns <= 64 else 1: an output in flight takes 4 registers
constexpr int UNROLLED_COLUMNS = 2;  // columns if columns <= 64 else 1
#endif

using Vector = Pack<Element, VECTOR>;

extern "C" __global__ void upsample2d_backward_vectorised(const Element* gradient, Element* dx, PoolShape shape,
                                                          float row_step, float column_step) {
    wait_for_previous_launch();
    const u32 vectors = shape.channels / VECTOR;
    const u32 pack = blockIdx.x * blockDim.x + threadIdx.x;
    u32 rest = pack;
    const u32 channel = rest % vectors * VECTOR;
    rest /= vectors;
    const int pixel_column = rest % static_cast<u32>(shape.width);
    rest /= static_cast<u32>(shape.width);
    const int pixel_row = rest % static_cast<u32>(shape.height);
    const u32 image = rest / static_cast<u32>(shape.height);
    if (image >= static_cast<u32>(shape.batch)) return;

    DependentOutputs rows, columns;
    if constexpr (EVEN) {
        rows = {pixel_row * MOST_ROWS, (pixel_row + 1) * MOST_ROWS};
        columns = {pixel_column * MOST_COLUMNS, (pixel_column + 1) * MOST_COLUMNS};
    } else {
        rows = dependent_outputs(pixel_row, shape.height, shape.output_height, row_step);
        columns = dependent_outputs(pixel_column, shape.width, shape.output_width, column_step);
    }
    const Element* gradients =
        gradient + 1LL * image * shape.output_height * shape.output_width * shape.channels + channel;
    float sums[VECTOR] = {};
#pragma unroll UNROLLED_ROWS
    for (int i = 0; i < MOST_ROWS; ++i)
#pragma unroll UNROLLED_COLUMNS
        for (int j = 0; j < MOST_COLUMNS; ++j) {
            const int row = rows.first + i, column = columns.first + j;
            const Vector seen = load_pack_if<Element, VECTOR>(
                EVEN || (row < rows.end && column < columns.end),
                gradients + (row * shape.output_width + column) * shape.channels);
            float weight = 1.f;
            if constexpr (TAPS > 1)
                weight = weight_in(row, pixel_row, shape.height, row_step) *
                         weight_in(column, pixel_column, shape.width, column_step);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) sums[e] += weight * to_float(seen.at[e]);
        }
    Vector result;
    from_floats(result, sums);
    store_pack(dx + 1LL * pack * VECTOR, result);
}
