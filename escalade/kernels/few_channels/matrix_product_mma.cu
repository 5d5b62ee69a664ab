// product[filter][pixel] = sum over k of weight[filter][k] * columns[k][pixel], on tensor cores
//
// Second of three steps: one CTA per 16 filters x 64 pixels, operands rounded to TF32 on their way into smem. Limiter:
// reading the unrolled matrix, without prefetch during the multiplication.
//
// Rung: `tensor_cores`. Continue in matrix_tiles.cuh.
#include "few_channels/matrix_tiles.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    few_channels_matrix_product_mma(const Element* weight, const Element* columns, float* product, int filters,
                                    long long pixels, int depth) {
    wait_for_previous_launch();
    __shared__ Tiles tiles;
    const int first_filter = blockIdx.y * TILE_FILTERS;
    const long long first_pixel = 1LL * blockIdx.x * TILE_PIXELS;
    const long long pixel = first_pixel + threadIdx.x % TILE_PIXELS;

    float acc[2][4] = {};
    for (int first = 0; first < depth; first += TILE_DEPTH) {
        fill(
            tiles,
            [&](int filter, int k) {
                const bool inside = first_filter + filter < filters && first + k < depth;
                return inside ? to_float(weight[(first_filter + filter) * depth + first + k]) : 0.f;
            },
            [&](int k) {
                const bool inside = pixel < pixels && first + k < depth;
                return inside ? to_float(columns[(first + k) * pixels + pixel]) : 0.f;
            });
        __syncthreads();
        multiply(acc, tiles);
        __syncthreads();
    }
    for_each_accumulator(acc, [&](int filter, int column, float sum) {
        if (first_filter + filter < filters && first_pixel + column < pixels)
            product[(first_filter + filter) * pixels + first_pixel + column] = sum;
    });
}
