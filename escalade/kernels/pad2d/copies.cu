// y[n][c][oh][ow] = x[n][c][oh - top][ow - left], padded according to MODE
//
// A thread takes VECTOR channels of ROWS vertically adjacent outputs, all in flight: one element, or in NHWC 16 bytes
// where they divide. Limiter: memory; with single elements the divisions that compute an output's position.
//
// A gradient is the image without its padding, plus what was cut off: a few more loads, near the border only.
//
// Rungs: `naive`; `vectorised` with a larger VECTOR and several ROWS. Read beyond.cuh (padding).
#include "common/elements.cuh"
#include "common/pool_shape.cuh"
#include "common/ptx.cuh"
#include "pad2d/beyond.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;       // problem.dtype
constexpr bool NHWC = true;  // problem.layout == "nhwc"
constexpr int MODE = 0;      // problem.mode_number: place in MODES, or 3 more for a gradient
constexpr int VECTOR = 4;    // vector: channels per thread
constexpr int ROWS = 4;      // rows: outputs per thread
#endif

using Values = Pack<Element, VECTOR>;

extern "C" __global__ void pad2d_copies(const Element* x, Element* y, PoolShape shape, int top, int left,
                                        float value) {
    wait_for_previous_launch();
    const u32 vectors = shape.channels / VECTOR;
    const u32 bands = (shape.output_height + ROWS - 1) / ROWS;
    u32 rest = blockIdx.x * blockDim.x + threadIdx.x;
    u32 vector = 0;
    if (NHWC) vector = rest % vectors, rest /= vectors;
    const int output_column = rest % shape.output_width;
    rest /= shape.output_width;
    const int first_row = rest % bands * ROWS;
    rest /= bands;
    if (!NHWC) vector = rest % vectors, rest /= vectors;
    const u32 image = rest;
    if (image >= static_cast<u32>(shape.batch)) return;

    const int column = source(output_column - left, shape.width);
    const long long plane = NHWC ? image : 1LL * image * shape.channels + vector;  // of pixels
    const int channel = NHWC ? vector * VECTOR : 0;
    const int x_step = NHWC ? shape.x_step() : 1, y_step = NHWC ? shape.y_step() : 1;
    const Element* pixels = x + plane * shape.height * shape.width * x_step + column * x_step + channel;
    Element* outputs = y + plane * shape.output_height * shape.output_width * y_step +
                       (first_row * shape.output_width + output_column) * y_step + channel;
    Values values[ROWS];
    bool inside[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int output_row = first_row + i;
        const int row = source(min(output_row, shape.output_height - 1) - top, shape.height);
        inside[i] = MODE != CONSTANT || (row >= 0 && column >= 0);
        if (inside[i]) values[i] = load_pack<Element, VECTOR>(pixels + row * shape.width * x_step);
    }
    if constexpr (ADDS) {
        const int output_height = shape.output_height, output_width = shape.output_width;
        const Copies columns(output_column, output_width, -left, shape.width - output_width + left);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int output_row = first_row + i;
            const Copies rows(output_row, output_height, -top, shape.height - output_height + top);
            if (output_row >= output_height || (rows.count() == 0 && columns.count() == 0)) continue;
            float sums[VECTOR];
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) sums[e] = to_float(values[i].at[e]);
            for (int r = -1; r < rows.count(); ++r) {  // -1: the element itself, as for columns
                const int row = r < 0 ? output_row - top : rows[r];
                for (int c = r < 0 ? 0 : -1; c < columns.count(); ++c) {
                    const int shift = c < 0 ? 0 : columns[c] - column;
                    const Values more = load_pack<Element, VECTOR>(pixels + (row * shape.width + shift) * x_step);
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e) sums[e] += to_float(more.at[e]);
                }
            }
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) values[i].at[e] = from_float<Element>(sums[e]);
        }
    }
    Values constant;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) constant.at[e] = from_float<Element>(value);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (first_row + i >= shape.output_height) return;
        Element* to = outputs + i * shape.output_width * y_step;
        store_pack(to, inside[i] ? values[i] : constant);
    }
}
