// A tile of output pixels whose window lies in shared memory as a whole, for all taps to read in place.
//
// Number the pixels of the window across its rows, WINDOW_WIDTH each: the sum of pixel v needs at tap (r, s) pixel
// v + r * DILATION_H * WINDOW_WIDTH + s * DILATION_W. So the operand of a tap is the same shared memory, begun so many
// pixels later. What that makes of the last columns of a row, where windows run over into the next row, is not stored.
//
// Filters are the 64 rows of the product and pixels its WGMMA_N columns, of which TILE_ROWS x TILE_COLUMNS count.
// Results leave, and residuals come, through a panel of shared memory that the copy engine reads or fills. A mask comes
// in the residual's place, and lets a sum through where it is positive: the gradient of a ReLU.
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
constexpr bool HAS_COMPANION = HAS_RESIDUAL || HAS_MASK;  // an image of y's shape besides
static_assert(!HAS_MASK || !(HAS_BIAS || HAS_RESIDUAL || HAS_RELU), "a mask comes alone");
using Sums = float[WGMMA_N / 2];

// A tile as wide as the image is stored as one box, whose last columns fall outside of it. A narrower one has
// neighbours there, so that each row is a box of its own, unless windows do not reach beyond their tile.
constexpr int BOX_ROWS = ONE_BOX ? TILE_ROWS : 1;
constexpr int BOX_COLUMNS = ONE_BOX ? WINDOW_WIDTH : TILE_COLUMNS;
constexpr int BOX_BYTES = BOX_ROWS * BOX_COLUMNS * ROW_BYTES;
static_assert((TILE_ROWS - 1) * WINDOW_WIDTH + BOX_COLUMNS <= WGMMA_N, "a tile is one product wide");

struct WindowShape {  // filled by escalade/ops/conv2d/window_tiling.py, in this order
    int channels, output_height, output_width, pad_h, pad_w, row_tiles, column_tiles, tiles, filter_tiles,
        shortcut_channels;
};

struct Tile {
    int image, row, column;  // of the first output pixel
    int filter;              // the first

    __device__ __forceinline__ Tile(const WindowShape& shape, int index, int filter) : filter(filter) {
        column = index % shape.column_tiles * TILE_COLUMNS;
        index /= shape.column_tiles;
        row = index % shape.row_tiles * TILE_ROWS;
        image = index / shape.row_tiles;
    }
};

__device__ __forceinline__ void load_window(u32 to, const TensorMap& map, u32 full, const WindowShape& shape,
                                            const Tile& tile, int channel) {
    barrier_expect(full, WINDOW_BYTES);
    tma_load_4d(to, map, full, channel, tile.column - shape.pad_w, tile.row - shape.pad_h, tile.image);
}

// Zeros where no copy arrives but products read, or the epilogue does: copies fill at least FILLED bytes of a stage.
// Nothing of it is stored.
template <int STAGES, int FILLED = WINDOW_BYTES>
__device__ __forceinline__ void clear_gaps(u32 windows, u32 panels) {
    const float4 zeros = make_float4(0.f, 0.f, 0.f, 0.f);
    if (READ_BYTES > FILLED)
        for (int stage = 0; stage < STAGES; ++stage)
            for (int byte = FILLED + threadIdx.x * 16; byte < READ_BYTES; byte += THREADS * 16)
                store_shared(windows + stage * WINDOW_STAGE_BYTES + byte, zeros);
    if (HAS_COMPANION && TILE_ROWS * BOX_COLUMNS < WGMMA_N)
        for (int byte = threadIdx.x * 16; byte < CONSUMERS * PANEL_BYTES; byte += THREADS * 16)
            store_shared(panels + byte, zeros);
    fence_async_proxy();
}

// Two warpgroups take turns at tiles. A turn ends when its stages have been waited for and its products are under way.
struct Turns {
    const u32 barriers;  // one a consumer
    const int consumer;
    u32 parity;

    __device__ __forceinline__ Turns(u32 barriers, int consumer)
        : barriers(barriers), consumer(consumer), parity(consumer == 0) {}  // the first turn is free

    __device__ __forceinline__ static void init(u32 barriers) {
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) barrier_init(barriers + consumer * 8, 4);
    }
    __device__ __forceinline__ void wait() {
        barrier_wait(barriers + consumer * 8, parity);
        parity ^= 1;
    }
    __device__ __forceinline__ void pass() const {
        if (threadIdx.x % 32 == 0) barrier_arrive(barriers + (1 - consumer) * 8);
    }
};

// Of the two filters that a lane has of its warp's 16.
struct Biases {
    float of[2] = {};

    __device__ __forceinline__ Biases(const Element* bias, int first_filter) {
        if (HAS_BIAS)
            for (int half = 0; half < 2; ++half)
                of[half] = to_float(bias[first_filter + threadIdx.x / 32 % 4 * 16 + 8 * half + threadIdx.x % 32 / 4]);
    }
};

// COUNT blocks of 8 pixels by the warp's 16 filters: a matrix has 8 pixels as rows and 8 filters as columns, which a
// lane holds transposed, two pixels of a filter. `address` is the lane's row in the panel.
template <int COUNT>
__device__ __forceinline__ void finish_blocks(const float* sums, u32 address, const Biases& biases) {
    u32 pairs[2 * COUNT];
    if (HAS_COMPANION) load_matrices_transposed(pairs, address);
#pragma unroll
    for (int i = 0; i < 2 * COUNT; ++i) {
        float2 values = {sums[2 * i], sums[2 * i + 1]};
        if (HAS_BIAS) values = {values.x + biases.of[i % 2], values.y + biases.of[i % 2]};
        if (HAS_RESIDUAL) {
            const float2 residuals = unpack_pair<Element>(pairs[i]);
            values = {values.x + residuals.x, values.y + residuals.y};
        }
        if (HAS_MASK) {  // as PyTorch: a NaN lets the gradient through
            const float2 masks = unpack_pair<Element>(pairs[i]);
            values = {masks.x <= 0.f ? 0.f : values.x, masks.y <= 0.f ? 0.f : values.y};
        }
        if (HAS_RELU) values = {relu(values.x), relu(values.y)};
        pairs[i] = pack_pair<Element>(values.x, values.y);
    }
    store_matrices_transposed(address, pairs);
}

// A warpgroup's panel: the residuals of a tile, where there are any, and then its results.
struct Panel {
    const TensorMap &residual_map, &output_map;
    const WindowShape& shape;
    const u32 address, residual_full;
    const int consumer;
    const bool copier = threadIdx.x % 128 == 0;  // starts this warpgroup's copies
    u32 parity = 0;

    __device__ __forceinline__ Panel(const TensorMap& residual_map, const TensorMap& output_map,
                                     const WindowShape& shape, u32 panels, u32 barriers, int consumer)
        : residual_map(residual_map), output_map(output_map), shape(shape), address(panels + consumer * PANEL_BYTES),
          residual_full(barriers + consumer * 8), consumer(consumer) {}

    __device__ __forceinline__ static void init(u32 barriers) {
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) barrier_init(barriers + consumer * 8, 1);
    }

    // The boxes of a tile that have a row in the image.
    __device__ __forceinline__ int boxes(const Tile& tile) const {
        return ONE_BOX ? 1 : min(TILE_ROWS, shape.output_height - tile.row);
    }

    // Before the products: residuals arrive under them.
    __device__ __forceinline__ void begin(const Tile& tile) const {
        if (!copier) return;
        tma_store_wait_read<0>();  // the panel is free again
        if (!HAS_COMPANION) return;
        const int count = boxes(tile);
        barrier_expect(residual_full, count * BOX_BYTES);
        for (int i = 0; i < count; ++i)
            tma_load_4d(address + i * WINDOW_WIDTH * ROW_BYTES, residual_map, residual_full, tile.filter, tile.column,
                        tile.row + i, tile.image);
    }

    __device__ __forceinline__ void wait() {
        if (HAS_COMPANION) {
            barrier_wait(residual_full, parity);
            parity ^= 1;
        } else {
            warpgroup_sync(consumer);  // until the copier has seen that the panel is free
        }
    }

    // Where a lane's row of the first matrices begins.
    __device__ __forceinline__ u32 row() const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        return address + (lane / 16 * 8 + lane % 8) * ROW_BYTES + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
    }

    __device__ __forceinline__ void store(const Sums& sums, const Tile& tile, const Biases& biases) {
        wait();
        const u32 first = row();
#pragma unroll
        for (int block = 0; block + 1 < BLOCKS; block += 2)
            finish_blocks<2>(sums + 4 * block, first + block * 8 * ROW_BYTES, biases);
        if constexpr (BLOCKS % 2)
            finish_blocks<1>(sums + 4 * (BLOCKS - 1), first + (BLOCKS - 1) * 8 * ROW_BYTES, biases);
        fence_async_proxy();
        warpgroup_sync(consumer);
        if (!copier) return;
        const int count = boxes(tile);
        for (int i = 0; i < count; ++i)
            tma_store_4d(output_map, address + i * WINDOW_WIDTH * ROW_BYTES, tile.filter, tile.column, tile.row + i,
                         tile.image);
    }

    __device__ __forceinline__ void close() const {
        if (copier) tma_store_wait_read<0>();
    }
};
