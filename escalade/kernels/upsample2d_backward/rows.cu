// dx[n][c][h][w] = sum of dy[n][c][oh][ow] over the MOST_ROWS x MOST_COLUMNS outputs that are copies of (h, w)  (NCHW)
//
// For nearest interpolation by powers of two: a thread takes VECTOR adjacent pixels (16 bytes where they divide a row).
// Their outputs in a row are contiguous and loaded by packs. Limiter: memory.
//
// Rung: `rows`.
#include "common/elements.cuh"
#include "common/pool_shape.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;            // problem.dtype
constexpr int VECTOR = 4;         // vector: columns per access
constexpr int MOST_ROWS = 2;      // rows: copies of a pixel, down and along
constexpr int MOST_COLUMNS = 2;   // columns
constexpr int UNROLLED_ROWS = 2;  // rows if rows * columns <= 16 else 1: 16 loads at most are unrolled
#endif

extern "C" __global__ void upsample2d_backward_rows(const Element* gradient, Element* dx, PoolShape shape) {
    wait_for_previous_launch();
    const u32 vectors = shape.width / VECTOR;
    const u32 pack = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 row = pack / vectors;  // of all planes
    if (row >= static_cast<u32>(shape.batch) * shape.channels * shape.height) return;

    const Element* outputs = gradient + (1LL * row * MOST_ROWS * shape.width + pack % vectors * VECTOR) * MOST_COLUMNS;
    float sums[VECTOR] = {};
#pragma unroll UNROLLED_ROWS
    for (int i = 0; i < MOST_ROWS; ++i)
#pragma unroll
        for (int part = 0; part < MOST_COLUMNS; ++part) {
            const Pack<Element, VECTOR> seen = load_pack<Element, VECTOR>(
                outputs + 1LL * i * shape.width * MOST_COLUMNS + part * VECTOR);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) sums[(part * VECTOR + e) / MOST_COLUMNS] += to_float(seen.at[e]);
        }
    Pack<Element, VECTOR> result;
    from_floats(result, sums);
    store_pack(dx + 1LL * pack * VECTOR, result);
}
