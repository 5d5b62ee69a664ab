// y[n][h][w][k] = relu(sum over r, s, c of x[n][h + r*DILATION_H - pad_h][w + s*DILATION_W - pad_w][c] * weight[k][r][s][c]
//                      + bias[k] + residual[n][h][w][k])
//
// Stride 1, NHWC, any number of channels. As in hopper_window.cu one copy brings the window of a tile, and all taps read
// it in place; but of 64 channels at a time, and weights come after it tap by tap through a ring of their own. For every
// 64 channels a tile of 64 filters and 224 pixels copies 30 + 72 KB where the implicit GEMM copies 324.
// Blocks stay, two warpgroups take turns at tiles. With SPLITS, for problems of few tiles, the blocks of a cluster share
// the channels of one tile and add up through each other's shared memory.
// What bounds it: the tensor cores, WGMMA_N columns a step of which TILE_ROWS x TILE_COLUMNS count.
#include "common/ring.cuh"
#include "conv2d/window_tile.cuh"  // with its widths of wgmma, before what uses them
#include "conv2d/products.cuh"

constexpr int TAPS = FILTER_HEIGHT * FILTER_WIDTH;
constexpr int PARTS_BYTES = WGMMA_N / 2 * 128 * 4;  // the sums of a warpgroup

using Windows = Ring<WINDOWS, WINDOW_STAGE_BYTES>;
using Taps = Ring<TAP_STAGES, TAP_BYTES>;
using Sums = float[WGMMA_N / 2];
static_assert(SPLITS == 1 || PARTS_BYTES <= WINDOWS * WINDOW_STAGE_BYTES, "partial sums lie over the windows");

struct Memory {  // addresses in shared memory
    u32 panels;  // one a consumer
    Windows windows;
    Taps taps;
    u32 residual_full;  // barriers: one a consumer
    u32 turns;          // one a consumer

    // Stages first, for their alignment, then all barriers.
    static constexpr int WINDOWS_AT = CONSUMERS * PANEL_BYTES, TAPS_AT = WINDOWS_AT + WINDOWS * WINDOW_STAGE_BYTES;
    static constexpr int BARRIERS_AT = TAPS_AT + TAP_STAGES * TAP_BYTES;
    static constexpr int RESIDUAL_AT = BARRIERS_AT + 16 * (WINDOWS + TAP_STAGES);

    __device__ __forceinline__ explicit Memory(u32 start)
        : panels(start), windows(start + WINDOWS_AT, start + BARRIERS_AT),
          taps(start + TAPS_AT, start + BARRIERS_AT + 16 * WINDOWS), residual_full(start + RESIDUAL_AT),
          turns(residual_full + 8 * CONSUMERS) {}

    __device__ __forceinline__ void init_barriers() const {
        windows.init(4);
        taps.init(4);
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
            barrier_init(residual_full + consumer * 8, 1);
            barrier_init(turns + consumer * 8, 4);
        }
    }
};

struct Slabs {
    int first, last;

    __device__ __forceinline__ Slabs(const WindowShape& shape, u32 rank) {
        const int all = (shape.channels + SLAB - 1) / SLAB;
        first = all * rank / SPLITS;
        last = all * (rank + 1) / SPLITS;
    }
    __device__ __forceinline__ int count() const { return last - first; }
};

// ------------------------------------------------------------------ copies, by one thread

__device__ __forceinline__ void copy_tiles(const TensorMap& window_map, const TensorMap& weight_map,
                                           const WindowShape& shape, const Slabs& slabs, Windows windows, Taps taps,
                                           int first, int step) {
    for (int index = first; index < shape.tiles * shape.filter_tiles; index += step) {
        const Tile tile(shape, index / shape.filter_tiles);
        const int filter = index % shape.filter_tiles * FILTERS;
        for (int slab = slabs.first; slab < slabs.last; ++slab) {
            windows.wait_empty();
            barrier_expect(windows.full(windows.stage), WINDOW_BYTES);
            tma_load_4d(windows.address(), window_map, windows.full(windows.stage), slab * SLAB,
                        tile.column - shape.pad_w, tile.row - shape.pad_h, tile.image);
            windows.next();
            for (int tap = 0; tap < TAPS; ++tap, taps.next()) {
                taps.wait_empty();
                barrier_expect(taps.full(taps.stage), TAP_BYTES);
                tma_load_3d(taps.address(), weight_map, taps.full(taps.stage), slab * SLAB, tap, filter);
            }
        }
    }
}

// ------------------------------------------------------------------ products, by two warpgroups

// What a product has read is released when the next one has been issued, so that the tensor cores always have work.
__device__ __forceinline__ void multiply_slabs(Sums& sums, Windows& windows, Taps& taps, int slabs) {
    int previous = 0;
    for (int slab = 0; slab < slabs; ++slab) {
        windows.wait_full();
        u64 row = operand_descriptor(windows.address());
        // Not unrolled: 36 products of as many operands as there are sums take seconds to compile.
#pragma unroll 1
        for (int r = 0; r < FILTER_HEIGHT; ++r, row += DILATION_H * WINDOW_WIDTH * ROW_BYTES >> 4)
#pragma unroll 1
            for (int s = 0; s < FILTER_WIDTH; ++s) {
                taps.wait_full();
                const u64 weights = operand_descriptor(taps.address());
                const u64 pixels = row + (s * DILATION_W * ROW_BYTES >> 4);
                const bool begun = slab || r || s;
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < ROW_BYTES / 32; ++k)
                    multiply<Element>(sums, weights + k * 2, pixels + k * 2, begun || k);
                wgmma_commit();
                wgmma_wait<1>();
                if (begun) taps.release(previous);
                if (slab && !r && !s) windows.release((windows.stage + WINDOWS - 1) % WINDOWS);
                previous = taps.stage;
                taps.next();
            }
        windows.next();
    }
}

struct Consumer {
    const TensorMap &residual_map, &output_map;
    const WindowShape& shape;
    const Memory& memory;
    const int number;
    const u32 panel;
    const bool copier = threadIdx.x % 128 == 0;  // starts this warpgroup's copies
    u32 residual_parity = 0;

    // Before the products: residuals arrive under them.
    __device__ __forceinline__ void begin(const Tile& tile, int filter) const {
        if (!copier) return;
        tma_store_wait_read<0>();  // the panel is free again
        if (HAS_RESIDUAL)
            load_residual(residual_map, panel, memory.residual_full + number * 8, shape, tile, filter);
    }

    __device__ __forceinline__ void wait_for_panel() {
        if (HAS_RESIDUAL) {
            barrier_wait(memory.residual_full + number * 8, residual_parity);
            residual_parity ^= 1;
        } else {
            warpgroup_sync(number);  // until the copier has seen that the panel is free
        }
    }

    __device__ __forceinline__ void store(const Sums& sums, const Tile& tile, int filter, const Biases& biases) {
        wait_for_panel();
        const u32 row = row_in_panel(panel);
#pragma unroll
        for (int block = 0; block + 1 < BLOCKS; block += 2)
            finish_blocks<2>(sums + 4 * block, row + block * 8 * ROW_BYTES, biases);
        if constexpr (BLOCKS % 2)
            finish_blocks<1>(sums + 4 * (BLOCKS - 1), row + (BLOCKS - 1) * 8 * ROW_BYTES, biases);
        fence_async_proxy();
        warpgroup_sync(number);
        if (copier) store_panel(output_map, panel, shape, tile, filter);
    }
};

// ------------------------------------------------------------------ a tile's sum shared by the blocks of a cluster

// The first warpgroup of every block lays its sums over its windows, idle by now; then the warpgroups of all blocks add
// up, over all parts in order, sixteen pixels at a time, and store them.
__device__ __forceinline__ void leave_part(const Sums& sums, u32 parts) {
    const u32 own = parts + threadIdx.x % 128 * 16;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
        store_shared(own + block * 128 * 16,
                     make_float4(sums[4 * block], sums[4 * block + 1], sums[4 * block + 2], sums[4 * block + 3]));
}

__device__ __forceinline__ void store_shared_sum(u32 parts, u32 panel, const Tile& tile, int filter, const Biases& biases,
                                                 const WindowShape& shape, Element* y, int consumer, u32 rank) {
    constexpr int PAIRS = BLOCKS / 2, WORKERS = CONSUMERS * SPLITS;
    const int worker = rank * CONSUMERS + consumer;
    const int first = PAIRS * worker / WORKERS, last = PAIRS * (worker + 1) / WORKERS;
    const u32 own = parts + threadIdx.x % 128 * 16, row = row_in_panel(panel);
    for (int pair = first; pair < last; ++pair) {
        float4 values[SPLITS][2];
#pragma unroll
        for (int part = 0; part < SPLITS; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i) values[part][i] = load_cluster(own + (2 * pair + i) * 128 * 16, part);
        float sums[8] = {};
#pragma unroll
        for (int part = 0; part < SPLITS; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                sums[4 * i] += values[part][i].x, sums[4 * i + 1] += values[part][i].y;
                sums[4 * i + 2] += values[part][i].z, sums[4 * i + 3] += values[part][i].w;
            }
        finish_blocks<2>(sums, row + pair * 16 * ROW_BYTES, biases);
    }
    warpgroup_sync(consumer);
    const int chunk = threadIdx.x % 8;  // of 8 filters
    for (int pixel = first * 16 + threadIdx.x % 128 / 8; pixel < last * 16; pixel += 16) {
        const int h = tile.row + pixel / WINDOW_WIDTH, column = pixel % WINDOW_WIDTH, w = tile.column + column;
        if (pixel / WINDOW_WIDTH >= TILE_ROWS || column >= TILE_COLUMNS || h >= shape.output_height ||
            w >= shape.output_width)
            continue;
        const float4 eight = load_shared_16(panel + pixel * ROW_BYTES + (chunk ^ pixel % 8) * 16);
        const long long at = (1LL * tile.image * shape.output_height + h) * shape.output_width + w;
        *reinterpret_cast<float4*>(y + at * (shape.filter_tiles * FILTERS) + filter + chunk * 8) = eight;
    }
}

// ------------------------------------------------------------------ kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv2d_hopper_streamed_window(const __grid_constant__ TensorMap window_map,
                                  const __grid_constant__ TensorMap weight_map,
                                  const __grid_constant__ TensorMap residual_map,
                                  const __grid_constant__ TensorMap output_map, const Element* __restrict__ bias,
                                  Element* __restrict__ y, WindowShape shape) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const Memory memory(shared_address(shared_memory));
    if (threadIdx.x == 0) {
        memory.init_barriers();
        fence_barrier_init();
        prefetch_map(window_map);
        prefetch_map(weight_map);
    }
    clear_gaps<WINDOWS>(memory.windows.stages, memory.panels);
    __syncthreads();
    const u32 rank = SPLITS > 1 ? cluster_rank() : 0;
    if (SPLITS > 1) cluster_sync();
    wait_for_previous_launch();

    const Slabs slabs(shape, rank);
    const int first = blockIdx.x / SPLITS, step = gridDim.x / SPLITS;
    const int consumer = threadIdx.x / 128;
    if (consumer == CONSUMERS) {
        release_registers<40>();
        if (threadIdx.x % 128 == 0) {
            copy_tiles(window_map, weight_map, shape, slabs, memory.windows, memory.taps, first, step);
            if (EARLY) let_next_launch_start();
        }
        if (SPLITS > 1) cluster_sync();
    } else {
        claim_registers<232>();
        Windows windows = memory.windows;
        Taps taps = memory.taps;
        Consumer me{residual_map, output_map, shape, memory, consumer, memory.panels + consumer * PANEL_BYTES};
        if constexpr (SPLITS > 1) {
            const Tile tile(shape, first / shape.filter_tiles);
            const int filter = first % shape.filter_tiles * FILTERS;
            me.begin(tile, filter);
            if (consumer == 0) {
                Sums sums;
                multiply_slabs(sums, windows, taps, slabs.count());
                wgmma_wait<0>();
                leave_part(sums, memory.windows.stages);
            }
            cluster_sync();
            me.wait_for_panel();
            store_shared_sum(memory.windows.stages, me.panel, tile, filter, Biases(bias, filter), shape, y, consumer, rank);
        } else {
            u32 turn = consumer == 0;  // the first turn is free
            if (consumer == 1) {
                windows.skip(slabs.count());
                taps.skip(slabs.count() * TAPS);
            }
            for (int index = first + consumer * step; index < shape.tiles * shape.filter_tiles;
                 index += CONSUMERS * step) {
                const Tile tile(shape, index / shape.filter_tiles);
                const int filter = index % shape.filter_tiles * FILTERS;
                me.begin(tile, filter);
                // A turn ends when its stages have been waited for and its products are under way.
                barrier_wait(memory.turns + consumer * 8, turn);
                turn ^= 1;
                Sums sums;
                multiply_slabs(sums, windows, taps, slabs.count());
                if (threadIdx.x % 32 == 0) barrier_arrive(memory.turns + (1 - consumer) * 8);
                wgmma_wait<0>();
                taps.release((taps.stage + TAP_STAGES - 1) % TAP_STAGES);
                windows.release((windows.stage + WINDOWS - 1) % WINDOWS);
                windows.skip(slabs.count());
                taps.skip(slabs.count() * TAPS);
                me.store(sums, tile, filter, Biases(bias, filter));
            }
        }
        if (me.copier) tma_store_wait_read<0>();
    }
    if (SPLITS > 1) cluster_sync();  // nobody leaves while another may reach into its shared memory
}
