// y[n][h][w][k] = relu(sum over r, s, c of x[n][h + r * DILATION_H - pad_h][w + s * DILATION_W - pad_w][c]
//                                          * weight[k][r][s][c] + bias[k] + residual[n][h][w][k])
//
// 64 channels, stride 1, NHWC. The implicit GEMM copies a pixel once for every tap that sees it, and with 64 channels
// those copies are what it waits for. Here one copy brings the window of a whole tile, padding included, and all taps
// read that: number the pixels of the window across its rows, WINDOW_WIDTH each, and the sum of pixel v needs at tap
// (r, s) pixel v + r * DILATION_H * WINDOW_WIDTH + s * DILATION_W. So the operand of a tap is the same shared memory,
// begun so many pixels later. What that makes of the last columns of a row, where windows run over into the next row,
// is not stored.
//
// Filters are the 64 rows of the product and pixels its WGMMA_N columns, of which TILE_ROWS x TILE_COLUMNS count.
// Blocks stay: all taps of their 64 filters lie in shared memory from the first tile to the last, one thread copies
// windows into a ring of STAGES, and two warpgroups take turns at tiles, so that the end of one's lies under the
// products of the other's. Results leave, and residuals come, through a panel of shared memory, by the copy engine.
// What bounds it: the tensor cores, 64 x WGMMA_N x 16 a step, and the card's power.
#include "common/epilogue.cuh"
#include "common/pairs.cuh"
#include "common/ring.cuh"
#include "common/wgmma_widths.cuh"

constexpr int FILTERS = 64;     // of a block
constexpr int ROW_BYTES = 128;  // the channels of a pixel, or of a filter's tap: what the swizzle spans
static_assert(ROW_BYTES == 64 * sizeof(Element), "64 channels of 16 bits");
constexpr int TAP_BYTES = FILTERS * ROW_BYTES;
constexpr int WEIGHT_BYTES = FILTER_HEIGHT * FILTER_WIDTH * TAP_BYTES;
constexpr int REACH_H = (FILTER_HEIGHT - 1) * DILATION_H, REACH_W = (FILTER_WIDTH - 1) * DILATION_W;
constexpr int WINDOW_WIDTH = TILE_COLUMNS + REACH_W;
constexpr int WINDOW_BYTES = (TILE_ROWS + REACH_H) * WINDOW_WIDTH * ROW_BYTES;
// The last tap of the last columns may lie beyond the window, for what is not stored.
constexpr int READ_BYTES = (WGMMA_N + REACH_H * WINDOW_WIDTH + REACH_W) * ROW_BYTES;
constexpr int STAGE_BYTES = ((READ_BYTES > WINDOW_BYTES ? READ_BYTES : WINDOW_BYTES) + 1023) / 1024 * 1024;
constexpr int PANEL_BYTES = WGMMA_N * ROW_BYTES;
static_assert(PANEL_BYTES % 1024 == 0, "the swizzle repeats every 1024 bytes");
constexpr int BLOCKS = WGMMA_N / 8;  // of 8 pixels

// A tile as wide as the image is stored as one box, whose last columns fall outside of it. A narrower one has
// neighbours there, so that each row is a box of its own, unless windows do not reach beyond their tile.
constexpr int BOX_ROWS = ONE_BOX ? TILE_ROWS : 1;
constexpr int BOX_COLUMNS = ONE_BOX ? WINDOW_WIDTH : TILE_COLUMNS;
constexpr int BOX_BYTES = BOX_ROWS * BOX_COLUMNS * ROW_BYTES;
static_assert((TILE_ROWS - 1) * WINDOW_WIDTH + BOX_COLUMNS <= WGMMA_N, "a tile is one product wide");

constexpr int THREADS = 384;
constexpr int CONSUMERS = 2;

using Stages = Ring<STAGES, STAGE_BYTES>;
using Sums = float[WGMMA_N / 2];

struct WindowShape {  // filled by escalade/ops/conv2d/hopper_window.py, in this order
    int output_height, pad_h, pad_w, row_tiles, column_tiles, tiles, filter_tiles;
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

struct Memory {  // addresses in shared memory
    u32 weights;        // tap after tap
    u32 panels;         // one a consumer
    u32 stages;
    u32 weights_full;   // barriers: one a row of taps
    u32 residual_full;  // one a consumer
    u32 turns;          // one a consumer

    __device__ __forceinline__ explicit Memory(u32 start)
        : weights(start), panels(weights + WEIGHT_BYTES), stages(panels + CONSUMERS * PANEL_BYTES),
          weights_full(stages + Stages::BYTES), residual_full(weights_full + FILTER_HEIGHT * 8),
          turns(residual_full + CONSUMERS * 8) {}

    __device__ __forceinline__ void init_barriers() const {
        for (int r = 0; r < FILTER_HEIGHT; ++r) barrier_init(weights_full + r * 8, 1);
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
            barrier_init(residual_full + consumer * 8, 1);
            barrier_init(turns + consumer * 8, 4);
        }
    }
};

// Zeros where no copy ever arrives but products read, or the epilogue does. Nothing of it is stored.
__device__ __forceinline__ void clear_gaps(const Memory& memory) {
    const float4 zeros = make_float4(0.f, 0.f, 0.f, 0.f);
    if (READ_BYTES > WINDOW_BYTES)
        for (int stage = 0; stage < STAGES; ++stage)
            for (int byte = WINDOW_BYTES + threadIdx.x * 16; byte < READ_BYTES; byte += THREADS * 16)
                store_shared(memory.stages + stage * STAGE_BYTES + byte, zeros);
    if (HAS_RESIDUAL && TILE_ROWS * BOX_COLUMNS < WGMMA_N)
        for (int byte = threadIdx.x * 16; byte < CONSUMERS * PANEL_BYTES; byte += THREADS * 16)
            store_shared(memory.panels + byte, zeros);
    fence_async_proxy();
}

// ------------------------------------------------------------------ copies, by one thread

__device__ __forceinline__ void copy_weights(const TensorMap& map, const Memory& memory, int first_filter) {
    for (int r = 0; r < FILTER_HEIGHT; ++r) {
        const u32 full = memory.weights_full + r * 8;
        barrier_expect(full, FILTER_WIDTH * TAP_BYTES);
        for (int s = 0; s < FILTER_WIDTH; ++s) {
            const int tap = r * FILTER_WIDTH + s;
            tma_load_2d(memory.weights + tap * TAP_BYTES, map, full, tap * 64, first_filter);
        }
    }
}

// The first window comes before the weights: products begin when it and one row of taps have arrived.
__device__ __forceinline__ void copy_windows(const TensorMap& window_map, const TensorMap& weight_map,
                                             const WindowShape& shape, const Memory& memory, Stages ring, int first,
                                             int step, int first_filter) {
    for (int index = first; index < shape.tiles; index += step) {
        const Tile tile(shape, index);
        const u32 full = ring.full(ring.stage);
        ring.wait_empty();
        barrier_expect(full, WINDOW_BYTES);
        tma_load_4d(ring.address(), window_map, full, 0, tile.column - shape.pad_w, tile.row - shape.pad_h, tile.image);
        ring.next();
        if (index == first) copy_weights(weight_map, memory, first_filter);
    }
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
        tma_load_4d(panel + i * WINDOW_WIDTH * ROW_BYTES, map, full, first_filter, tile.column, tile.row + i,
                    tile.image);
}

__device__ __forceinline__ void store_panel(const TensorMap& map, u32 panel, const WindowShape& shape, const Tile& tile,
                                            int first_filter) {
    const int count = boxes(shape, tile);
    for (int i = 0; i < count; ++i)
        tma_store_4d(map, panel + i * WINDOW_WIDTH * ROW_BYTES, first_filter, tile.column, tile.row + i, tile.image);
}

// ------------------------------------------------------------------ products, by two warpgroups

__device__ __forceinline__ void multiply(Sums& sums, const Memory& memory, u32 window) {
#pragma unroll
    for (int r = 0; r < FILTER_HEIGHT; ++r) {
        barrier_wait(memory.weights_full + r * 8, 0);  // passed at once after the first tile
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < FILTER_WIDTH; ++s) {
            const u64 weights = operand_descriptor(memory.weights + (r * FILTER_WIDTH + s) * TAP_BYTES);
            const u64 pixels =
                operand_descriptor(window + (r * DILATION_H * WINDOW_WIDTH + s * DILATION_W) * ROW_BYTES);
#pragma unroll
            for (int step = 0; step < ROW_BYTES / 32; ++step) {
                const bool accumulate = r || s || step;
                if constexpr (BF16) wgmma_bf16(sums, weights + step * 2, pixels + step * 2, accumulate);
                else wgmma(sums, weights + step * 2, pixels + step * 2, accumulate);
            }
        }
    }
    wgmma_commit();
}

// COUNT blocks of 8 pixels by the warp's 16 filters: a matrix has 8 pixels as rows and 8 filters as columns, which a
// lane holds transposed, two pixels of a filter. `address` is the lane's row in the panel.
template <int COUNT>
__device__ __forceinline__ void finish_blocks(const float* sums, u32 address, const float (&biases)[2]) {
    u32 pairs[2 * COUNT];
    if (HAS_RESIDUAL) load_matrices_transposed(pairs, address);
#pragma unroll
    for (int i = 0; i < 2 * COUNT; ++i) {
        float2 values = {sums[2 * i], sums[2 * i + 1]};
        if (HAS_BIAS) values = {values.x + biases[i % 2], values.y + biases[i % 2]};
        if (HAS_RESIDUAL) {
            const float2 residuals = unpack_pair<Element>(pairs[i]);
            values = {values.x + residuals.x, values.y + residuals.y};
        }
        if (HAS_RELU) values = {relu(values.x), relu(values.y)};
        pairs[i] = pack_pair<Element>(values.x, values.y);
    }
    store_matrices_transposed(address, pairs);
}

__device__ __forceinline__ void multiply_tiles(const TensorMap& residual_map, const TensorMap& output_map,
                                               const Element* bias, const WindowShape& shape, const Memory& memory,
                                               Stages ring, int consumer, int first, int step, int first_filter) {
    const bool copier = threadIdx.x % 128 == 0;  // starts this warpgroup's copies
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const u32 panel = memory.panels + consumer * PANEL_BYTES;
    const u32 residual_full = memory.residual_full + consumer * 8;
    const int chunk = 2 * warp + lane / 8 % 2;  // of 8 filters
    const u32 row_in_panel = panel + (lane / 16 * 8 + lane % 8) * ROW_BYTES + (chunk ^ lane % 8) * 16;
    float biases[2] = {};
    if (HAS_BIAS)
        for (int half = 0; half < 2; ++half)
            biases[half] = to_float(bias[first_filter + 16 * warp + 8 * half + lane / 4]);

    u32 turn = consumer == 0, residual_parity = 0;  // the first turn is free
    ring.skip(consumer);
    for (int index = first + consumer * step; index < shape.tiles; index += CONSUMERS * step, ring.skip(CONSUMERS)) {
        const Tile tile(shape, index);
        if (copier) {
            tma_store_wait_read<0>();  // the panel is free again
            if (HAS_RESIDUAL) load_residual(residual_map, panel, residual_full, shape, tile, first_filter);
        }
        // A turn ends when its stage has been waited for and its products are under way.
        barrier_wait(memory.turns + consumer * 8, turn);
        turn ^= 1;
        ring.wait_full();
        Sums sums;
        multiply(sums, memory, ring.address());
        if (lane == 0) barrier_arrive(memory.turns + (1 - consumer) * 8);
        wgmma_wait<0>();
        ring.release(ring.stage);

        if (HAS_RESIDUAL) {
            barrier_wait(residual_full, residual_parity);
            residual_parity ^= 1;
        } else {
            named_barrier_sync(1 + consumer, 128);  // until the copier has seen that the panel is free
        }
#pragma unroll
        for (int block = 0; block + 1 < BLOCKS; block += 2)
            finish_blocks<2>(sums + 4 * block, row_in_panel + block * 8 * ROW_BYTES, biases);
        if constexpr (BLOCKS % 2) {
            constexpr int LAST = BLOCKS - 1;
            finish_blocks<1>(sums + 4 * LAST, row_in_panel + LAST * 8 * ROW_BYTES, biases);
        }
        fence_async_proxy();
        named_barrier_sync(1 + consumer, 128);
        if (copier) store_panel(output_map, panel, shape, tile, first_filter);
    }
    if (copier) tma_store_wait_read<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv2d_hopper_window(const __grid_constant__ TensorMap window_map, const __grid_constant__ TensorMap weight_map,
                         const __grid_constant__ TensorMap residual_map, const __grid_constant__ TensorMap output_map,
                         const Element* __restrict__ bias, WindowShape shape) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const Memory memory(shared_address(shared_memory));
    const Stages ring(memory.stages);
    if (threadIdx.x == 0) {
        ring.init(4);  // the warps of the one consumer whose tile it is
        memory.init_barriers();
        fence_barrier_init();
        prefetch_map(window_map);
        prefetch_map(weight_map);
        prefetch_map(output_map);
    }
    clear_gaps(memory);
    wait_for_previous_launch();
    __syncthreads();

    // Blocks with the same tiles and other filters run side by side, so that x comes from DRAM once.
    const int first_filter = blockIdx.x % shape.filter_tiles * FILTERS;
    const int first = blockIdx.x / shape.filter_tiles, step = gridDim.x / shape.filter_tiles;
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == CONSUMERS) {
        release_registers<40>();
        if (threadIdx.x % 128 == 0) {
            copy_windows(window_map, weight_map, shape, memory, ring, first, step, first_filter);
            if (EARLY) let_next_launch_start();
        }
    } else {
        claim_registers<232>();
        multiply_tiles(residual_map, output_map, bias, shape, memory, ring, warpgroup, first, step, first_filter);
    }
}
