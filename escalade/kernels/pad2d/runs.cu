// y[n][c][oh][ow] = x[n][c][oh - top][ow - left], padded according to MODE                                    (NCHW)
//
// A thread takes ROWS outputs of one column, all loaded at once. Its column of x is located once; the rows are uniform.
// Lanes have adjacent columns: rows of x and y are not aligned to each other, so wider accesses would not be either.
// Limiter: memory.
//
// Rung: `runs`. Read common/strips.cuh (outputs of a thread), beyond.cuh (padding).
#include "common/elements.cuh"
#include "common/strips.cuh"
#include "pad2d/beyond.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;    // problem.dtype
constexpr int MODE = 0;   // ("constant", "reflect", "replicate", "circular").index(problem.mode)
constexpr int ROWS = 16;  // config.rows: outputs per thread
#endif

extern "C" __global__ void pad2d_runs(const Element* x, Element* y, PoolShape shape, int top, int left, float value,
                                      StripShape strips) {
    wait_for_previous_launch();
    const Strip<ROWS, 1> strip(shape, strips);
    if (!strip.there) return;

    const int column = source(strip.first_column - left, shape.width), first = strip.first_row - top;
    const bool has_column = MODE != CONSTANT || column >= 0;
    const Element outside = from_float<Element>(value);
    const Element* pixels = x + 1LL * strip.plane * shape.height * shape.width + column;
    Element* to = y + strip.output(shape);
    Element values[ROWS];
    if (first >= 0 && first + ROWS <= shape.height && strip.rows == ROWS) {  // rows in order
        pixels += 1LL * first * shape.width;
#pragma unroll
        for (int i = 0; i < ROWS; ++i, pixels += shape.width) values[i] = has_column ? *pixels : outside;
#pragma unroll
        for (int i = 0; i < ROWS; ++i, to += shape.output_width) *to = values[i];
        return;
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int row = i < strip.rows ? source(first + i, shape.height) : -1;
        values[i] = row >= 0 && has_column ? pixels[row * shape.width] : outside;
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        if (i < strip.rows) to[i * shape.output_width] = values[i];
}
