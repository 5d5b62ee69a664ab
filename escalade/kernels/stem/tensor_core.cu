// y = pool(relu(sum over r, s, c of pixel[row*stride + r][column*stride + s][c] * weight[filter][r][s][c] + bias))
//
// The convolution as filters x pixels by mma.sync: the weights are the rows and stay in registers for the life of a
// CTA; the pixels are the columns, read from image rows staged in smem once, as pixels of four channels. A filter row
// is 4 or 8 pixels, of which a lane reads one or two whole: k is free to be in that order (pack.cu). A warp walks down
// the rows of its band, NB * 8 columns at a time, and pools in registers (tile.cuh). Between bands, rows of the
// convolution are computed twice where pooling windows overlap.
// Limiter: the mma.sync rate; each reads one wavefront of smem.
//
// Rung           switches
//   tensor_core  POOL 0
//   pooled       POOL 2 or 3
// Read tile.cuh (columns, pooling), then staged.cuh (the image in smem).
#include "common/mma_tile.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int FILTER_HEIGHT = 7;  // problem.filter_height
constexpr int FILTER_WIDTH = 7;   // problem.filter_width
constexpr int BANDS = 2;          // config.bands
constexpr int BAND_ROWS = 1;      // config.band_rows: rows of y per band
constexpr int COLUMN_BLOCKS = 2;  // config.column_blocks: 8-column blocks per warp at once
constexpr int FILTER_WARPS = 2;   // filter_warps: warps along the filters
constexpr int WARP_BLOCKS = 2;    // warp_blocks: 16-filter blocks per warp
constexpr int BLOCKS_PER_SM = 2;  // config.blocks_per_sm
#endif

#include "stem/staged.cuh"

constexpr int BAND_CONV_ROWS = POOL == 3 ? 2 * BAND_ROWS + 1 : POOL_STRIDE * BAND_ROWS;
constexpr int THREADS = BANDS * FILTER_WARPS * 32;
constexpr int SEGMENTS = COLUMNS / (8 * COLUMN_BLOCKS);
static_assert(TILE_ROWS == BANDS * BAND_ROWS && COLUMNS == SEGMENTS * 8 * COLUMN_BLOCKS, "whole bands and segments");
constexpr int STAGED_BYTES = STAGED_ROWS * STAGED_COLUMNS * sizeof(Pixel);

using Writer = RowWriter<WARP_BLOCKS, COLUMN_BLOCKS>;

// One filter row of 8 pixels, the operands of STEPS_IN_ROW steps. The first and second step have the even and odd taps.
__device__ __forceinline__ void load_pixels(u32 (&b)[STEPS_IN_ROW][2], const Pixel* first_tap) {
    if constexpr (STEPS_IN_ROW == 2 && STRIDE_W % 2 == 0) {
        const Pack<u32, 4> two = load_pack<u32, 4>(first_tap->at);
        b[0][0] = two.at[0], b[0][1] = two.at[1], b[1][0] = two.at[2], b[1][1] = two.at[3];
    } else {
#pragma unroll
        for (int step = 0; step < STEPS_IN_ROW; ++step) {
            const Pixel pixel = first_tap[step];
            b[step][0] = pixel.at[0], b[step][1] = pixel.at[1];
        }
    }
    if (DEAD_TAPS && MAY_OVERFLOW) {
        const int member = threadIdx.x % 4;
#pragma unroll
        for (int step = 0; step < STEPS_IN_ROW; ++step)
            if (STEPS_IN_ROW * 3 + step >= FILTER_WIDTH) {
                const u32 alive = STEPS_IN_ROW * member + step < FILTER_WIDTH ? ~0u : 0u;
                b[step][0] &= alive, b[step][1] &= alive;
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    stem_tensor_core(const Source* __restrict__ x, const u32* __restrict__ packed, const Element* __restrict__ bias,
                     const float* __restrict__ scale, const float* __restrict__ shift, Output* __restrict__ y,
                     StemShape shape, int release_dependents) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Pixel* staged = shared_part(reinterpret_cast<Pixel*>(shared_memory), STAGED_ROWS * STAGED_COLUMNS);

    const int lane = threadIdx.x % 32, group = lane / 4, member = lane % 4, warp = threadIdx.x / 32;
    const int filter_warp = warp % FILTER_WARPS, band = warp / FILTER_WARPS;
    const Tile tile = tile_of_block(shape);
    if (tile.image >= shape.batch) return;  // empty batch
    wait_for_previous_launch();
    if (release_dependents) let_next_launch_start();

    u32 weights[STEPS][WARP_BLOCKS][4];
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int b = 0; b < WARP_BLOCKS; ++b) {
            const int block = (step * FILTER_WARPS + filter_warp) * WARP_BLOCKS + b;
            const Pack<u32, 4> four = load_pack<u32, 4>(packed + (block * 32 + lane) * 4);
#pragma unroll
            for (int i = 0; i < 4; ++i) weights[step][b][i] = four.at[i];
        }
    Writer writer(shape, tile, y, bias, filter_warp * WARP_BLOCKS * 16);
    stage<THREADS / 32>(staged, x, scale, shift, tile, shape);
    __syncthreads();

    // Values that lanes of member 3 pass from one segment to the next, row by row; private to the lane.
    u32* edges = shared_part(reinterpret_cast<u32*>(shared_memory + STAGED_BYTES), REST)
                 + (warp * BAND_CONV_ROWS * 8 + group) * WARP_BLOCKS;

    const int first_row = tile.row + band * BAND_ROWS;
    const int rows = min(BAND_ROWS, shape.output_height - first_row);
    if (rows <= 0) return;
    const int first_conv_row = tile.conv_row + band * BAND_ROWS * POOL_STRIDE;
    const Pixel* band_pixels = staged + band * BAND_ROWS * POOL_STRIDE * STRIDE_H * STAGED_COLUMNS + group * STRIDE_W +
                               member * STEPS_IN_ROW;
    for (int segment = 0; segment < SEGMENTS; ++segment) {
        const int column = segment * 8 * COLUMN_BLOCKS;
        if (SEGMENTS > 1 && tile.conv_column + column >= shape.conv_width) break;
        writer.move_to(tile.conv_column + column);
        const Pixel* pixels = band_pixels + column * STRIDE_W;
#pragma unroll 1
        for (int local = 0; local < conv_rows(rows); ++local, pixels += STRIDE_H * STAGED_COLUMNS) {
            const int row = first_row + completed(local);
            if (!inside(first_conv_row + local, shape.conv_height)) {
                writer.add_missing_row(completes(local), row);
                continue;
            }
            Writer::Accumulators acc = {};
#pragma unroll
            for (int r = 0; r < FILTER_HEIGHT; ++r)
#pragma unroll
                for (int j = 0; j < COLUMN_BLOCKS; ++j) {
                    u32 b[STEPS_IN_ROW][2];
                    load_pixels(b, pixels + r * STAGED_COLUMNS + j * 8 * STRIDE_W);
#pragma unroll
                    for (int step = 0; step < STEPS_IN_ROW; ++step)
#pragma unroll
                        for (int block = 0; block < WARP_BLOCKS; ++block)
                            multiply_add<Element>(acc[j][block], weights[r * STEPS_IN_ROW + step][block], b[step]);
                }
            u32 edge[WARP_BLOCKS];
#pragma unroll
            for (int b = 0; b < WARP_BLOCKS; ++b)
                edge[b] = SEGMENTS > 1 && segment > 0 && member == 3 ? edges[local * 8 * WARP_BLOCKS + b] : LOWEST;
            writer.add(acc, edge, completes(local), row);
            if (SEGMENTS > 1 && POOL == 3 && member == 3) {
#pragma unroll
                for (int b = 0; b < WARP_BLOCKS; ++b) edges[local * 8 * WARP_BLOCKS + b] = edge[b];
            }
        }
    }
}
