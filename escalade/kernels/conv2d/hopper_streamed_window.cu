// y[n][h][w][k] = relu(sum over r, s, c of x[n][h + r * DILATION_H - pad_h][w + s * DILATION_W - pad_w][c]
//                                          * weight[k][r][s][c]
//                      + sum over c of shortcut[n][h * stride][w * stride][c] * shortcut_weight[k][c]
//                      + bias[k] + residual[n][h][w][k])
//
// Stride 1, NHWC, any number of channels. As in hopper_window.cu one copy brings the window of a tile, and all taps
// read it in place; but of 64 channels at a time, and weights come after it tap by tap through a ring of their own. For
// every 64 channels a tile of 64 filters and 224 pixels copies 30 + 72 KB where the implicit GEMM copies 324. The
// shortcut's pixels come the same way after x, as windows of one tap: its tensor map leaves out what the stride does.
// Blocks stay, two warpgroups take turns at tiles. With SPLITS, for problems of few tiles, the blocks of a cluster
// share the channels of one tile and add up through each other's shared memory.
// What bounds it: the tensor cores, WGMMA_N columns a step of which TILE_ROWS x TILE_COLUMNS count.
#include "common/ring.cuh"
#include "conv2d/window_tile.cuh"  // with its widths of wgmma, before what uses them
#include "conv2d/products.cuh"

constexpr int TAPS = FILTER_HEIGHT * FILTER_WIDTH;
constexpr int SHORTCUT_BYTES = TILE_ROWS * WINDOW_WIDTH * ROW_BYTES;  // of a slab, numbered like the window's pixels
constexpr int PARTS_BYTES = WGMMA_N / 2 * 128 * 4;  // the sums of a warpgroup

using Windows = Ring<WINDOWS, WINDOW_STAGE_BYTES>;
using Taps = Ring<TAP_STAGES, TAP_BYTES>;
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
        Panel::init(residual_full);
        Turns::init(turns);
    }
};

struct Maps {
    const TensorMap &windows, &weights, &shortcut, &shortcut_weights;
};

// A block's of the slabs of 64 channels that an image has.
struct Slabs {
    int first, last;

    __device__ __forceinline__ Slabs(int channels, u32 rank) {
        const int all = (channels + SLAB - 1) / SLAB;
        first = all * rank / SPLITS;
        last = all * (rank + 1) / SPLITS;
    }
    __device__ __forceinline__ int count() const { return last - first; }
};

struct Work {
    const WindowShape& shape;
    const u32 rank;
    const Slabs slabs, shortcut;
    const int first, step;  // tile

    __device__ __forceinline__ Work(const WindowShape& shape, u32 rank)
        : shape(shape), rank(rank), slabs(shape.channels, rank), shortcut(SHORTCUT ? shape.shortcut_channels : 0, rank),
          first(blockIdx.x / SPLITS), step(gridDim.x / SPLITS) {}

    __device__ __forceinline__ int end() const { return shape.tiles * shape.filter_tiles; }
    // Tiles that see the same pixels follow each other, so that x comes from DRAM once.
    __device__ __forceinline__ Tile tile(int index) const {
        return Tile(shape, index / shape.filter_tiles, index % shape.filter_tiles * FILTERS);
    }
    // Stages that a tile passes through.
    __device__ __forceinline__ int windows() const { return slabs.count() + shortcut.count(); }
    __device__ __forceinline__ int taps() const { return slabs.count() * TAPS + shortcut.count(); }
};

// ------------------------------------------------------------------ copies, by one thread

__device__ __forceinline__ void load_tap(Taps& taps, const TensorMap& map, int channel, int tap, int filter) {
    taps.wait_empty();
    barrier_expect(taps.full(taps.stage), TAP_BYTES);
    tma_load_3d(taps.address(), map, taps.full(taps.stage), channel, tap, filter);
    taps.next();
}

// The first taps of the first slab need not wait for the launch in front if weights are settled.
__device__ __forceinline__ void copy_tiles(const Maps& maps, const Work& work, Windows windows, Taps taps,
                                           bool weights_settled) {
    int ahead = weights_settled ? min(TAPS, TAP_STAGES) : 0;
    for (int tap = 0; tap < ahead; ++tap)
        load_tap(taps, maps.weights, work.slabs.first * SLAB, tap, work.tile(work.first).filter);
    wait_for_previous_launch();
    for (int index = work.first; index < work.end(); index += work.step) {
        const Tile tile = work.tile(index);
        for (int slab = work.slabs.first; slab < work.slabs.last; ++slab, windows.next()) {
            windows.wait_empty();
            load_window(windows.address(), maps.windows, windows.full(windows.stage), work.shape, tile, slab * SLAB);
            for (int tap = ahead; tap < TAPS; ++tap) load_tap(taps, maps.weights, slab * SLAB, tap, tile.filter);
            ahead = 0;
        }
        for (int slab = work.shortcut.first; SHORTCUT && slab < work.shortcut.last; ++slab, windows.next()) {
            windows.wait_empty();
            barrier_expect(windows.full(windows.stage), SHORTCUT_BYTES);
            tma_load_4d(windows.address(), maps.shortcut, windows.full(windows.stage), slab * SLAB, tile.column,
                        tile.row, tile.image);
            load_tap(taps, maps.shortcut_weights, slab * SLAB, 0, tile.filter);
        }
    }
}

// ------------------------------------------------------------------ products, by two warpgroups

// What a product has read is released when the next one has been issued, so that the tensor cores always have work.
__device__ __forceinline__ void multiply_slabs(Sums& sums, Windows& windows, Taps& taps, const Work& work) {
    int previous = 0;
    for (int slab = 0; slab < work.windows(); ++slab, windows.next()) {
        const bool shortcut = SHORTCUT && slab >= work.slabs.count();
        const int height = shortcut ? 1 : FILTER_HEIGHT, width = shortcut ? 1 : FILTER_WIDTH;
        windows.wait_full();
        u64 row = operand_descriptor(windows.address());
        // Not unrolled: 36 products of as many operands as there are sums take seconds to compile.
#pragma unroll 1
        for (int r = 0; r < height; ++r, row += DILATION_H * WINDOW_WIDTH * ROW_BYTES >> 4)
#pragma unroll 1
            for (int s = 0; s < width; ++s, taps.next()) {
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
            }
    }
}

__device__ __forceinline__ void multiply_tiles(Panel& panel, const Element* bias, const Memory& memory,
                                               const Work& work) {
    Turns turns(memory.turns, panel.consumer);
    Windows windows = memory.windows;
    Taps taps = memory.taps;
    if (panel.consumer == 1) {
        windows.skip(work.windows());
        taps.skip(work.taps());
    }
    for (int index = work.first + panel.consumer * work.step; index < work.end(); index += CONSUMERS * work.step) {
        const Tile tile = work.tile(index);
        panel.begin(tile);
        turns.wait();
        Sums sums;
        multiply_slabs(sums, windows, taps, work);
        turns.pass();
        wgmma_wait<0>();
        taps.release((taps.stage + TAP_STAGES - 1) % TAP_STAGES);
        windows.release((windows.stage + WINDOWS - 1) % WINDOWS);
        windows.skip(work.windows());
        taps.skip(work.taps());
        panel.store(sums, tile, Biases(bias, tile.filter));
    }
}

// ------------------------------------------------------------------ a tile's sum shared by the blocks of a cluster

// The first warpgroup of every block lays its sums over its windows, idle by now; then the warpgroups of all blocks add
// up, over all parts in order, sixteen pixels at a time, and store them.
struct Meeting {
    static constexpr int PAIRS = BLOCKS / 2, WORKERS = CONSUMERS * SPLITS;  // pairs of blocks of 8 pixels

    const u32 own;          // where the parts of this thread's sums lie in every block
    const int first, last;  // pair of this warpgroup

    __device__ __forceinline__ Meeting(u32 parts, int worker)
        : own(parts + threadIdx.x % 128 * 16), first(PAIRS * worker / WORKERS), last(PAIRS * (worker + 1) / WORKERS) {}

    __device__ __forceinline__ void leave(const Sums& sums) const {
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
            store_shared(own + block * 128 * 16,
                         make_float4(sums[4 * block], sums[4 * block + 1], sums[4 * block + 2], sums[4 * block + 3]));
    }

    __device__ __forceinline__ void add_up(const Panel& panel, const Biases& biases) const {
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
            finish_blocks<2>(sums, panel.row() + pair * 16 * ROW_BYTES, biases);
        }
        warpgroup_sync(panel.consumer);
    }

    // Pixel by pixel: those of a warpgroup are no box.
    __device__ __forceinline__ void store(const Panel& panel, const Tile& tile, Element* y) const {
        const WindowShape& shape = panel.shape;
        const int chunk = threadIdx.x % 8;  // of 8 filters
        for (int pixel = first * 16 + threadIdx.x % 128 / 8; pixel < last * 16; pixel += 16) {
            const int row = pixel / WINDOW_WIDTH, column = pixel % WINDOW_WIDTH;
            const int h = tile.row + row, w = tile.column + column;
            if (row >= TILE_ROWS || column >= TILE_COLUMNS || h >= shape.output_height || w >= shape.output_width)
                continue;
            const float4 eight = load_shared_16(panel.address + pixel * ROW_BYTES + (chunk ^ pixel % 8) * 16);
            const long long at = (1LL * tile.image * shape.output_height + h) * shape.output_width + w;
            *reinterpret_cast<float4*>(y + at * (shape.filter_tiles * FILTERS) + tile.filter + chunk * 8) = eight;
        }
    }
};

__device__ __forceinline__ void multiply_together(Panel& panel, const Element* bias, Element* y, const Memory& memory,
                                                  const Work& work) {
    const Tile tile = work.tile(work.first);
    const Meeting meeting(memory.windows.stages, work.rank * CONSUMERS + panel.consumer);
    panel.begin(tile);
    if (panel.consumer == 0) {
        Windows windows = memory.windows;
        Taps taps = memory.taps;
        Sums sums;
        multiply_slabs(sums, windows, taps, work);
        wgmma_wait<0>();
        warpgroup_sync(panel.consumer);  // the other warps' products read the windows too
        meeting.leave(sums);
    }
    cluster_sync();
    panel.wait();
    meeting.add_up(panel, Biases(bias, tile.filter));
    meeting.store(panel, tile, y);
}

// ------------------------------------------------------------------ kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv2d_hopper_streamed_window(const __grid_constant__ TensorMap window_map,
                                  const __grid_constant__ TensorMap weight_map,
                                  const __grid_constant__ TensorMap shortcut_map,
                                  const __grid_constant__ TensorMap shortcut_weight_map,
                                  const __grid_constant__ TensorMap residual_map,
                                  const __grid_constant__ TensorMap output_map, const Element* __restrict__ bias,
                                  Element* __restrict__ y, WindowShape shape, int weights_settled, int relayed) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const Memory memory(shared_address(shared_memory));
    if (threadIdx.x == 0) {
        memory.init_barriers();
        fence_barrier_init();
        prefetch_map(window_map);
        prefetch_map(weight_map);
    }
    clear_gaps<WINDOWS, SHORTCUT ? SHORTCUT_BYTES : WINDOW_BYTES>(memory.windows.stages, memory.panels);
    __syncthreads();
    const u32 rank = SPLITS > 1 ? cluster_rank() : 0;
    if (SPLITS > 1) cluster_sync();

    const Work work(shape, rank);
    const int consumer = threadIdx.x / 128;
    if (consumer == CONSUMERS) {
        release_registers<40>();
        if (threadIdx.x % 128 == 0) {
            copy_tiles({window_map, weight_map, shortcut_map, shortcut_weight_map}, work, memory.windows, memory.taps,
                       weights_settled);
            if (relayed) let_next_launch_start();
        }
        if (SPLITS > 1) cluster_sync();
    } else {
        claim_registers<232>();
        wait_for_previous_launch();
        Panel panel(residual_map, output_map, shape, memory.panels, memory.residual_full, consumer);
        if constexpr (SPLITS > 1) multiply_together(panel, bias, y, memory, work);
        else multiply_tiles(panel, bias, memory, work);
        panel.close();
    }
    if (SPLITS > 1) cluster_sync();  // nobody leaves while another may reach into its shared memory
}
