// A tile of output pixels whose window lies in shared memory as a whole, for all taps to read in place.
//
// Number the pixels of the window across its rows, WINDOW_WIDTH each: the sum of pixel v needs at tap (r, s) pixel
// v + r * DILATION_H * WINDOW_WIDTH + s * DILATION_W. So the operand of a tap is the same shared memory, begun so many
// pixels later. What that makes of the last columns of a row, where windows run over into the next row, is not stored.
//
// Filters are the 64 rows of the product and pixels its WGMMA_N columns, of which TILE_ROWS x TILE_COLUMNS count. Results
// leave, and residuals come, through a panel of shared memory that the copy engine reads or fills.
#pragma once

#include "common/epilogue.cuh"
#include "common/pairs.cuh"
#include "common/hopper.cuh"
#include "common/wgmma_widths.cuh"

constexpr int THREADS = 384;
constexpr int CONSUMERS = 2;
constexpr int FILTERS = 64;     // of a tile
constexpr int ROW_BYTES = 128;  // channels of a pixel, or of a filter's tap: what the swizzle spans
constexpr int SLAB = ROW_BYTES / sizeof(Element);
constexpr int TAP_BYTES = FILTERS * ROW_BYTES;
constexpr int REACH_H = (FILTER_HEIGHT - 1) * DILATION_H, REACH_W = (FILTER_WIDTH - 1) * DILATION_W;
constexpr int WINDOW_WIDTH = TILE_COLUMNS + REACH_W;
constexpr int WINDOW_BYTES = (TILE_ROWS + REACH_H) * WINDOW_WIDTH * ROW_BYTES;
// The last tap of the last columns may lie beyond the window, for what is not stored.
constexpr int READ_BYTES = (WGMMA_N + REACH_H * WINDOW_WIDTH + REACH_W) * ROW_BYTES;
constexpr int WINDOW_STAGE_BYTES = ((READ_BYTES > WINDOW_BYTES ? READ_BYTES : WINDOW_BYTES) + 1023) / 1024 * 1024;
constexpr int PANEL_BYTES = WGMMA_N * ROW_BYTES;
static_assert(PANEL_BYTES % 1024 == 0, "the swizzle repeats every 1024 bytes");
constexpr int BLOCKS = WGMMA_N / 8;  // of 8 pixels

// A tile as wide as the image is stored as one box, whose last columns fall outside of it. A narrower one has neighbours
// there, so that each row is a box of its own.
constexpr int BOX_ROWS = ONE_BOX ? TILE_ROWS : 1;
constexpr int BOX_COLUMNS = ONE_BOX ? WINDOW_WIDTH : TILE_COLUMNS;
constexpr int BOX_BYTES = BOX_ROWS * BOX_COLUMNS * ROW_BYTES;
static_assert((TILE_ROWS - 1) * WINDOW_WIDTH + BOX_COLUMNS <= WGMMA_N, "a tile is one product wide");

struct WindowShape {  // filled by escalade/ops/conv2d/window_tiling.py, in this order
    int channels, output_height, output_width, pad_h, pad_w, row_tiles, column_tiles, tiles, filter_tiles;
};

struct Tile {
    int image, row, column;  // of the first output pixel

    __device__ __forceinline__ Tile(const WindowShape& shape, int index) {
        column = index % shape.column_tiles * TILE_COLUMNS;
        index /= shape.column_tiles;
        row = index % shape.row_tiles * TILE_ROWS;
        image = index / shape.row_tiles;
    }
};

// Zeros where no copy ever arrives but products read, or the epilogue does. Nothing of it is stored.
template <int STAGES>
__device__ __forceinline__ void clear_gaps(u32 windows, u32 panels) {
    const float4 zeros = make_float4(0.f, 0.f, 0.f, 0.f);
    if (READ_BYTES > WINDOW_BYTES)
        for (int stage = 0; stage < STAGES; ++stage)
            for (int byte = WINDOW_BYTES + threadIdx.x * 16; byte < READ_BYTES; byte += THREADS * 16)
                store_shared(windows + stage * WINDOW_STAGE_BYTES + byte, zeros);
    if (HAS_RESIDUAL && TILE_ROWS * BOX_COLUMNS < WGMMA_N)
        for (int byte = threadIdx.x * 16; byte < CONSUMERS * PANEL_BYTES; byte += THREADS * 16)
            store_shared(panels + byte, zeros);
    fence_async_proxy();
}

// The boxes of a tile that have a row in the image.
__device__ __forceinline__ int boxes(const WindowShape& shape, const Tile& tile) {
    return ONE_BOX ? 1 : min(TILE_ROWS, shape.output_height - tile.row);
}

__device__ __forceinline__ void load_residual(const TensorMap& map, u32 panel, u32 full, const WindowShape& shape,
                                              const Tile& tile, int first_filter) {
    const int count = boxes(shape, tile);
    barrier_expect(full, count * BOX_BYTES);
    for (int i = 0; i < count; ++i)
        tma_load_4d(panel + i * WINDOW_WIDTH * ROW_BYTES, map, full, first_filter, tile.column, tile.row + i, tile.image);
}

__device__ __forceinline__ void store_panel(const TensorMap& map, u32 panel, const WindowShape& shape, const Tile& tile,
                                            int first_filter) {
    const int count = boxes(shape, tile);
    for (int i = 0; i < count; ++i)
        tma_store_4d(map, panel + i * WINDOW_WIDTH * ROW_BYTES, first_filter, tile.column, tile.row + i, tile.image);
}

// Of the two filters that a lane has of its warp's 16.
struct Biases {
    float of[2] = {};

    __device__ __forceinline__ Biases(const Element* bias, int first_filter) {
        if (HAS_BIAS)
            for (int half = 0; half < 2; ++half)
                of[half] = to_float(bias[first_filter + threadIdx.x / 32 % 4 * 16 + 8 * half + threadIdx.x % 32 / 4]);
    }
};

// Where a lane's row of the first matrices begins.
__device__ __forceinline__ u32 row_in_panel(u32 panel) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    return panel + (lane / 16 * 8 + lane % 8) * ROW_BYTES + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
}

// COUNT blocks of 8 pixels by the warp's 16 filters: a matrix has 8 pixels as rows and 8 filters as columns, which a lane
// holds transposed, two pixels of a filter. `address` is the lane's row in the panel.
template <int COUNT>
__device__ __forceinline__ void finish_blocks(const float* sums, u32 address, const Biases& biases) {
    u32 pairs[2 * COUNT];
    if (HAS_RESIDUAL) load_matrices_transposed(pairs, address);
#pragma unroll
    for (int i = 0; i < 2 * COUNT; ++i) {
        float2 values = {sums[2 * i], sums[2 * i + 1]};
        if (HAS_BIAS) values = {values.x + biases.of[i % 2], values.y + biases.of[i % 2]};
        if (HAS_RESIDUAL) {
            const float2 residuals = unpack_pair<Element>(pairs[i]);
            values = {values.x + residuals.x, values.y + residuals.y};
        }
        if (HAS_RELU) values = {relu(values.x), relu(values.y)};
        pairs[i] = pack_pair<Element>(values.x, values.y);
    }
    store_matrices_transposed(address, pairs);
}
