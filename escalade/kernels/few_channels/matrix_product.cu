// product[filter][pixel] = sum over k of weight[filter][k] * columns[k][pixel]
//
// Second of three steps, the textbook GEMM: one CTA per 16 x 16 outputs, one per thread, tiles of both matrices in
// smem. Limiter: smem, two reads per multiply-add; with four filters twelve of sixteen are wasted.
//
// Rungs: `matrix_unroll`, `streams`.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;  // problem.storage
#endif

#include "common/elements.cuh"
#include "common/ptx.cuh"

constexpr int TILE = 16;

extern "C" __global__ void __launch_bounds__(TILE* TILE)
    few_channels_matrix_product(const Element* weight, const Element* columns, float* product, int filters,
                                long long pixels, int depth) {
    wait_for_previous_launch();
    __shared__ float weights[TILE][TILE];
    __shared__ float values[TILE][TILE];
    const int i = threadIdx.x / TILE, j = threadIdx.x % TILE;
    const int filter = blockIdx.y * TILE + i;
    const long long pixel = 1LL * blockIdx.x * TILE + j;

    float sum = 0.f;
    for (int first = 0; first < depth; first += TILE) {
        weights[i][j] = filter < filters && first + j < depth ? to_float(weight[filter * depth + first + j]) : 0.f;
        values[i][j] = pixel < pixels && first + i < depth ? to_float(columns[(first + i) * pixels + pixel]) : 0.f;
        __syncthreads();
        for (int k = 0; k < TILE; ++k) sum += weights[i][k] * values[k][j];
        __syncthreads();
    }
    if (filter < filters && pixel < pixels) product[filter * pixels + pixel] = sum;
}
