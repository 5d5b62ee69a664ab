// y[pixel][filter] = sum over k = (r, s, c) of x[window of pixel at tap (r, s)][c] * weight[filter][k]      (NHWC)
//
// Implicit GEMM on tensor cores: mma.sync on 16x8 blocks, fed by ldmatrix from swizzled smem, while cp.async fills the
// other of two buffers. Accumulators are fp32 and are stored in MMA order, two adjacent elements per store. Bias,
// residual and ReLU are left to a second kernel.
// Limiter: one k-tile of prefetch does not cover the memory latency, and the stores are small.
//
// Rung                 switches
//   tensor_core        Element as x is stored
//   half_storage       Element __half, for x and weights converted by convert.cu
#include "common/conv_tiles.cuh"
#include "common/elements.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Output = float;                // problem.dtype
constexpr bool FILTERS_EVEN = true;  // problem.filters % 2 == 0
constexpr int WARPS_M = 2;           // config.warps_m
constexpr int WARPS_N = 2;           // config.warps_n
#endif

constexpr int THREADS = WARPS_M * WARPS_N * 32;
constexpr int WARP_M = TILE_M / WARPS_M;
constexpr int WARP_N = TILE_N / WARPS_N;
constexpr int BLOCKS_M = WARP_M / 16;
constexpr int BLOCKS_N = WARP_N / 8;

extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_tensor_core(const Element* __restrict__ x, const Element* __restrict__ weight, Output* __restrict__ y,
                       ConvShape shape) {
    using Copier = TileCopier<TILE_M, TILE_N, TILE_K, THREADS>;
    constexpr int ROW_BYTES = Copier::ROW_BYTES;
    constexpr int STAGE_BYTES = Copier::STAGE_BYTES;
    extern __shared__ __align__(1024) unsigned char shared_memory[];

    // CTAs over the same pixels are adjacent, so x is read from DRAM once.
    const int tiles_n = (shape.filters + TILE_N - 1) / TILE_N;
    const int first_pixel = blockIdx.x / tiles_n * TILE_M;
    const int first_filter = blockIdx.x % tiles_n * TILE_N;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int warp_row = warp % WARPS_M * WARP_M;
    const int warp_column = warp / WARPS_M * WARP_N;

    const u32 stages = shared_address(shared_memory);
    const u32 address_a = fragment_address_a<ROW_BYTES>(stages, warp_row, lane);
    const u32 address_b = fragment_address_b<ROW_BYTES>(stages + Copier::BYTES_A, warp_column, lane);
    Copier copier(shape, x, weight, first_pixel, first_filter, 0);
    const int tiles = (copier.depth + TILE_K - 1) / TILE_K;

    copier.copy_a(stages, true);
    copier.copy_b(stages, true);
    copy_async_commit();

    float acc[BLOCKS_M][BLOCKS_N][4] = {};
    for (int tile = 0; tile < tiles; ++tile) {
        copy_async_wait<0>();
        __syncthreads();  // this k-tile has arrived for all, and all are done with the other buffer
        copier.next();
        copier.copy_a(stages + (tile + 1) % 2 * STAGE_BYTES, tile + 1 < tiles);
        copier.copy_b(stages + (tile + 1) % 2 * STAGE_BYTES, tile + 1 < tiles);
        copy_async_commit();
        const u32 stage = tile % 2 * STAGE_BYTES;
#pragma unroll
        for (int step = 0; step < ROW_BYTES / STEP_BYTES; ++step) {
            Fragments<BLOCKS_M, BLOCKS_N> fragments;
            fragments.template load<ROW_BYTES>((address_a + stage) ^ step * STEP_BYTES,
                                               (address_b + stage) ^ step * STEP_BYTES);
            if (sizeof(Element) == 4) fragments.round_to_tf32();
            multiply_add<Element>(acc, fragments.a, fragments.b);
        }
    }

    const int pixels = shape.batch * shape.output_height * shape.output_width;
#pragma unroll
    for (int i = 0; i < BLOCKS_M; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int pixel = first_pixel + warp_row + i * 16 + half * 8 + lane / 4;
            if (pixel >= pixels) continue;
            Output* row = y + 1LL * pixel * shape.filters;
#pragma unroll
            for (int j = 0; j < BLOCKS_N; ++j) {
                const int filter = first_filter + warp_column + j * 8 + lane % 4 * 2;
                const Pack<Output, 2> pair = {from_float<Output>(acc[i][j][half * 2]),
                                              from_float<Output>(acc[i][j][half * 2 + 1])};
                if (FILTERS_EVEN) {
                    if (filter < shape.filters) store_pack(row + filter, pair);
                } else {
                    if (filter < shape.filters) row[filter] = pair.at[0];
                    if (filter + 1 < shape.filters) row[filter + 1] = pair.at[1];
                }
            }
        }
}
