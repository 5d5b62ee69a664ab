// product[filter][pixel] = sum over k of weight[filter][k] * columns[k][pixel]
//
// Second of three steps: a textbook GEMM, one CTA per TILE x TILE outputs, both operand tiles in smem, 4 x 4 outputs
// per thread, fp32 accumulators and results. Limiter: smem, eight reads per sixteen multiply-adds, and no prefetch
// during the multiplication.
//
// Rung: `im2col_gemm`.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;  // problem.dtype
#endif

#include "common/elements.cuh"

constexpr int TILE = 64;
constexpr int TILE_K = 16;
constexpr int THREADS = TILE / 4 * (TILE / 4);

extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_gemm(const Element* __restrict__ weight, const Element* __restrict__ columns, float* __restrict__ product,
                int filters, int pixels, int depth) {
    __shared__ __align__(16) float weight_tile[TILE_K][TILE + 4];  // padded: stored transposed, k the slow index
    __shared__ __align__(16) float column_tile[TILE_K][TILE];

    const int tiles_filter = (filters + TILE - 1) / TILE;
    const int first_filter = blockIdx.x % tiles_filter * TILE;
    const int first_pixel = blockIdx.x / tiles_filter * TILE;
    const int thread_filter = threadIdx.x / (TILE / 4) * 4;
    const int thread_pixel = threadIdx.x % (TILE / 4) * 4;

    float acc[4][4] = {};
    for (int first_k = 0; first_k < depth; first_k += TILE_K) {
        for (int i = threadIdx.x; i < TILE * TILE_K; i += THREADS) {
            const int filter = i / TILE_K, k = i % TILE_K;
            const bool inside = first_filter + filter < filters && first_k + k < depth;
            const long long at = 1LL * (first_filter + filter) * depth + first_k + k;
            weight_tile[k][filter] = inside ? to_float(weight[at]) : 0.f;
        }
        for (int i = threadIdx.x; i < TILE * TILE_K; i += THREADS) {
            const int k = i / TILE, pixel = i % TILE;
            const bool inside = first_pixel + pixel < pixels && first_k + k < depth;
            const long long at = 1LL * (first_k + k) * pixels + first_pixel + pixel;
            column_tile[k][pixel] = inside ? to_float(columns[at]) : 0.f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < TILE_K; ++k) {
            const Pack<float, 4> a = load_pack<float, 4>(&weight_tile[k][thread_filter]);
            const Pack<float, 4> b = load_pack<float, 4>(&column_tile[k][thread_pixel]);
#pragma unroll
            for (int e = 0; e < 16; ++e) acc[e / 4][e % 4] += a.at[e / 4] * b.at[e % 4];
        }
        __syncthreads();
    }

#pragma unroll
    for (int e = 0; e < 16; ++e) {
        const int filter = first_filter + thread_filter + e / 4;
        const int pixel = first_pixel + thread_pixel + e % 4;
        if (filter < filters && pixel < pixels) product[1LL * filter * pixels + pixel] = acc[e / 4][e % 4];
    }
}
