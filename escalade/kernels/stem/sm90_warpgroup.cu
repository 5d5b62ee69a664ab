// y = pool(relu(sum over r, s, c of pixel[row*2 + r][column*2 + s][c] * weight[filter][r][s][c] + bias))
//
// The stem's GEMM, filters x pixels, by wgmma: 64 filters in the registers of a warpgroup, and a whole row of COLUMNS
// pixels directly from the staged image. With a stride of two pixels of four channels, adjacent windows start 16 bytes
// apart, as wgmma expects of the rows of an operand; overlapping windows are allowed:
//
//   8 rows of 16 bytes each, 16 bytes apart | the next two taps 16 bytes on | the next 8 windows 128 bytes on
//
// So a convolution row is FILTER_HEIGHT * STEPS_IN_ROW instructions, without other loads. A CTA is one warpgroup;
// several share an SM, so that one stages or stores while another multiplies.
// Limiter: tensor cores, 64 x COLUMNS x 16 per step; a quarter of the channels and an eighth of the taps are padding
// (7x7).
//
// Rung: `warpgroup`. Read tile.cuh (columns, pooling), staged.cuh (the image in smem), then row_product.cuh.
#include "common/mma_tile.cuh"
#include "stem/row_product.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int FILTER_HEIGHT = 7;  // problem.filter_height
constexpr int FILTER_WIDTH = 7;   // problem.filter_width
constexpr int BLOCKS_PER_SM = 4;  // config.blocks_per_sm
#endif

#include "stem/staged.cuh"

constexpr int THREADS = 128;
constexpr int ROW_BYTES = STAGED_COLUMNS * sizeof(Pixel);
static_assert(STRIDE_W == 2, "windows begin 16 bytes apart");

using Writer = RowWriter<1, COLUMN_BLOCKS>;

// Product for tiles with an infinite or NaN pixel: skips the padding taps, which wgmma would multiply by zero. `row` is
// the first staged row of the windows.
__device__ __forceinline__ void multiply_existing_taps(Writer::Accumulators& acc, const u32 (&weights)[STEPS][4],
                                                       const Pixel* row) {
    const int lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
#pragma unroll
    for (int j = 0; j < COLUMN_BLOCKS; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[j][0][e] = 0.f;
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int j = 0; j < COLUMN_BLOCKS; ++j) {
            u32 b[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int tap = step % STEPS_IN_ROW * 4 + i * 2 + member / 2;
                const Pixel* pixel = row + step / STEPS_IN_ROW * STAGED_COLUMNS + (j * 8 + group) * STRIDE_W + tap;
                b[i] = tap < FILTER_WIDTH ? pixel->at[member % 2] : 0;
            }
            multiply_add<Element>(acc[j][0], weights[step], b);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    stem_sm90_warpgroup(const Source* __restrict__ x, const u32* __restrict__ packed, const Element* __restrict__ bias,
                        const float* __restrict__ scale, const float* __restrict__ shift, Output* __restrict__ y,
                        StemShape shape) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Pixel* staged = reinterpret_cast<Pixel*>(shared_memory);

    const int first_block = blockIdx.y * 4 + threadIdx.x / 32;  // of 16 filters
    const Tile tile = tile_of_block(shape);
    if (tile.image >= shape.batch) return;  // empty batch
    wait_for_previous_launch();

    u32 weights[STEPS][4];
    load_weights(weights, packed, first_block, shape.filters / 16);
    Writer writer(shape, tile, y, bias, first_block * 16);
    const bool non_finite = stage<THREADS / 32>(staged, x, scale, shift, tile, shape);
    fence_async_proxy();
    const bool has_non_finite = DEAD_TAPS && MAY_OVERFLOW ? __syncthreads_or(non_finite) : (__syncthreads(), false);

    writer.move_to(tile.conv_column);
    const int rows = min(TILE_ROWS, shape.output_height - tile.row);
    const u64 pixels = overlapping_descriptor(shared_address(staged), 16, 128);
    Writer::Accumulators acc;
#pragma unroll 1
    for (int local = 0; local < conv_rows(rows); ++local) {
        const int row = tile.row + completed(local);
        if (!inside(tile.conv_row + local, shape.conv_height)) {
            writer.add_missing_row(completes(local), row);
            continue;
        }
        if (has_non_finite) {
            multiply_existing_taps(acc, weights, staged + local * STRIDE_H * STAGED_COLUMNS);
        } else {
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const int offset = step / STEPS_IN_ROW * ROW_BYTES + step % STEPS_IN_ROW * 4 * sizeof(Pixel);
                multiply(Element{}, reinterpret_cast<Flat&>(acc), weights[step],
                         pixels + ((local * STRIDE_H * ROW_BYTES + offset) >> 4), step > 0);
            }
            wgmma_commit();
            wgmma_wait<0>();
        }
        u32 edge[1] = {LOWEST};
        writer.add(acc, edge, completes(local), row);
    }
}
