// y[n][oh][ow][c] = sum over r, s of weight[r] * weight[s] * x[n][row[r]][column[s]][c]                        (NHWC)
//
// A thread takes VECTOR channels (16 bytes where they divide) of OUTPUT_COLUMNS adjacent outputs, whose rows and
// weights it computes once. Source pixels shared by outputs come from L1. Limiter: memory; with 16 pixels per output
// (bicubic), loads from L1.
//
// Rung: `vectorised`. places.cuh has PyTorch's rules for rows, columns and weights.
#include "common/elements.cuh"
#include "common/ptx.cuh"
#include "upsample2d/places.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;             // problem.dtype
constexpr int VECTOR = 4;          // vector: channels per access
constexpr int OUTPUT_COLUMNS = 4;  // config.columns: outputs per thread
#endif

using Vector = Pack<Element, VECTOR>;

extern "C" __global__ void upsample2d_vectorised(const Element* x, Element* y, PoolShape shape, float row_step,
                                                 float column_step) {
    wait_for_previous_launch();
    const u32 vectors = shape.channels / VECTOR;
    const u32 runs = (shape.output_width + OUTPUT_COLUMNS - 1) / OUTPUT_COLUMNS;
    u32 rest = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 channel = rest % vectors * VECTOR;
    rest /= vectors;
    const int first_column = rest % runs * OUTPUT_COLUMNS;
    rest /= runs;
    const int output_row = rest % static_cast<u32>(shape.output_height);
    const u32 image = rest / static_cast<u32>(shape.output_height);
    if (image >= static_cast<u32>(shape.batch)) return;

    const SourceTaps rows = source_taps(output_row, shape.height, row_step);
    const Element* pixels = x + 1LL * image * shape.height * shape.width * shape.x_step() + channel;
    Element* outputs = y +
                       (1LL * image * shape.output_height + output_row) * shape.output_width * shape.y_step() +
                       channel;
    Vector results[OUTPUT_COLUMNS];  // all before the first store, so that loads are in flight together
#pragma unroll
    for (int j = 0; j < OUTPUT_COLUMNS; ++j) {
        const SourceTaps columns = source_taps(min(first_column + j, shape.output_width - 1), shape.width, column_step);
        Vector& result = results[j];
        if constexpr (TAPS == 1) {  // a bitwise copy
            result = load_pack<Element, VECTOR>(pixels +
                                                (rows.at[0] * shape.width + columns.at[0]) * shape.x_step());
        } else {
            float sums[VECTOR] = {};
#pragma unroll
            for (int r = 0; r < TAPS; ++r) {
                const Element* row = pixels + rows.at[r] * shape.width * shape.x_step();
                Vector seen[TAPS];
#pragma unroll
                for (int s = 0; s < TAPS; ++s)
                    seen[s] = load_pack<Element, VECTOR>(row + columns.at[s] * shape.x_step());
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) {
                    float along = 0.f;
#pragma unroll
                    for (int s = 0; s < TAPS; ++s) along += columns.weight[s] * to_float(seen[s].at[e]);
                    sums[e] += rows.weight[r] * along;
                }
            }
            from_floats(result, sums);
        }
    }
#pragma unroll
    for (int j = 0; j < OUTPUT_COLUMNS; ++j)
        if (first_column + j < shape.output_width)
            store_pack(outputs + (first_column + j) * shape.y_step(), results[j]);
}
