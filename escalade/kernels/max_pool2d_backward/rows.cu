// dx[n][c][h][w] = dy[n][c][oh][ow] where x[n][c][h][w] is the largest of its one window, else 0               (NCHW)
//
// For non-overlapping windows without padding: a thread takes VECTOR columns (up to 16 bytes) of one row of windows,
// with the argmax as in vectorised.cu: stored (STORED), or recomputed from x. No pixel has two windows, so nothing is
// summed. Limiter: memory.
//
// Rung: `rows`. Read common/rows_of_windows.cuh (rows of a thread); common/placed_maximum.cuh has PyTorch's argmax
// rule.
#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;          // problem.dtype
constexpr bool MASK = false;    // backward.mask: x is the output of a ReLU
constexpr bool STORED = false;  // backward.stored: read the places of maxima instead of x
constexpr int VECTOR = 4;       // vector: columns per access
#endif

#include "common/placed_maximum.cuh"
#include "common/rows_of_windows.cuh"

using Indices = Pack<unsigned char, OUTPUTS>;

__device__ __forceinline__ Indices find(const WindowRow& row, const Element* x) {
    Largest largest[OUTPUTS];
    row.load_windows(x, [&](int o, float value, int tap) {
        if (tap == 0) largest[o] = {value, 0};
        else largest[o].update(value, tap);
    });
    Indices indices;
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) indices.at[o] = stored_index<MASK>(largest[o]);
    return indices;
}

extern "C" __global__ void max_pool2d_backward_rows(const Element* gradient, const Element* x,
                                                    const unsigned char* stored, Element* dx, PoolShape shape) {
    wait_for_previous_launch();
    const WindowRow row(shape);
    if (!row.exists) return;
    Pack<Element, OUTPUTS> gradients = {};
    Indices indices;
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) indices.at[o] = NOWHERE;
    if (row.has_windows()) {
        gradients = load_pack<Element, OUTPUTS>(gradient + row.output);
        indices = STORED ? load_pack<unsigned char, OUTPUTS>(stored + row.output) : find(row, x);
    }
    row.store_pixels(dx,
                     [&](int o, int tap) { return indices.at[o] == tap ? gradients.at[o] : from_float<Element>(0.f); });
}
