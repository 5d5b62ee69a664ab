// y[n][h][w][k] = relu(sum over r, s, c of x[n][h + r * DILATION_H - pad_h][w + s * DILATION_W - pad_w][c]
//                                          * weight[k][r][s][c]
//                      + sum over c of shortcut[n][h * stride][w * stride][c] * shortcut_weight[k][c]
//                      + bias[k] + residual[n][h][w][k])
//
// Stride 1, NHWC, any number of channels. As in sm90_window.cu, one TMA load brings the window of a tile and all taps
// read it in place; but 64 channels at a time (32 in TF32), and the weights follow tap by tap through a ring of their
// own. Per 64 channels, a tile of 64 filters by 224 pixels loads 30 + 72 KB; the implicit GEMM loads 324. The
// shortcut's pixels follow x as 1-tap windows; its tensor map applies the stride.
// Persistent CTAs, two warpgroups in ping-pong over tiles. With SPLITS, for problems of few tiles, the CTAs of a
// cluster split the channels of one tile, and each reduces and stores a part of its pixels.
// Limiter: tensor cores; TILE_ROWS x TILE_COLUMNS of WGMMA_N columns per step are useful.
//
// Rung: `streamed_window`. conv2d_input_gradient launches it with HAS_MASK and MN_MAJOR. Read window_tile.cuh (tile and
// window), products.cuh, then shared_sum.cuh (SPLITS).
#include "common/ring.cuh"
#include "conv2d/window_tile.cuh"  // defines the wgmma widths its users need
#include "conv2d/products.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int WINDOWS = 3;        // config.windows: window stages, of one k-tile each
constexpr int TAP_STAGES = 12;    // config.tap_stages: tap stages, of 64 filters each
constexpr int SPLITS = 1;         // config.splits: CTAs that share the channels of one tile
constexpr int Y_PITCH = 0;        // tiling.conv.y_pitch if config.splits > 1 else 0: for stores without TMA
constexpr bool SHORTCUT = false;  // tiling.conv.shortcut is not None
#endif

#include "conv2d/shared_sum.cuh"

constexpr int TAPS = FILTER_HEIGHT * FILTER_WIDTH;
constexpr MNMajor WEIGHTS = MN_MAJOR ? MNMajor::rows : MNMajor::none;
static_assert(!(MN_MAJOR && SHORTCUT), "no gradient has a shortcut");
// Bytes of a k-tile of the shortcut, numbered like the window's pixels.
constexpr int SHORTCUT_BYTES = STACKED ? WINDOW_BYTES : TILE_ROWS * WINDOW_WIDTH * ROW_BYTES;

using Windows = Ring<WINDOWS, WINDOW_STAGE_BYTES>;
using Taps = Ring<TAP_STAGES, TAP_BYTES>;
static_assert(SPLITS == 1 || sizeof(Element) == 2, "a warp's filters are 32 bytes of a pixel");
// A split-K tile is finished in one staging tile, by both warpgroups.
constexpr int STAGING_TILES_HERE = SPLITS > 1 ? 1 : STAGING_TILES;
using Parts = SharedSum<BLOCKS, SPLITS, CONSUMERS>;   // pieces are blocks of 8 pixels

struct Memory {  // smem addresses
    u32 staging_tiles;  // one per consumer, or one shared by both
    Windows windows;
    Taps taps;
    u32 parts;
    u32 residual_full;  // barriers: one per consumer
    u32 turns;          // barriers: one per consumer, or those of the exchange

    // Stages first, for their alignment, then all barriers.
    static constexpr int WINDOWS_AT = STAGING_TILES_HERE * STAGING_BYTES,
                         TAPS_AT = WINDOWS_AT + WINDOWS * WINDOW_STAGE_BYTES;
    static constexpr int PARTS_AT = TAPS_AT + TAP_STAGES * TAP_BYTES;
    static constexpr int BARRIERS_AT = PARTS_AT + (SPLITS > 1 ? Parts::BYTES : 0);
    static constexpr int RESIDUAL_AT = BARRIERS_AT + 16 * (WINDOWS + TAP_STAGES);

    __device__ __forceinline__ explicit Memory(u32 start)
        : staging_tiles(start), windows(start + WINDOWS_AT, start + BARRIERS_AT),
          taps(start + TAPS_AT, start + BARRIERS_AT + 16 * WINDOWS), parts(start + PARTS_AT),
          residual_full(start + RESIDUAL_AT), turns(residual_full + 8 * CONSUMERS) {}

    __device__ __forceinline__ Parts shared_sum(u32 rank) const { return {parts, turns, rank}; }

    __device__ __forceinline__ void init_barriers(u32 rank) const {
        windows.init(4);
        taps.init(4);
        StagingTile::init(residual_full);
        if (SPLITS > 1) shared_sum(rank).init();
        else PingPong::init(turns);
    }
};

struct Maps {
    const TensorMap &windows, &weights, &shortcut, &shortcut_weights;
};

// K-tiles of an image's channels that one CTA of a split computes.
struct KTileRange {
    int first, last;

    __device__ __forceinline__ KTileRange(int channels, u32 rank) {
        const int all = (channels + K_TILE - 1) / K_TILE;
        first = all * rank / SPLITS;
        last = all * (rank + 1) / SPLITS;
    }
    __device__ __forceinline__ int count() const { return last - first; }
};

struct Work {
    const WindowShape& shape;
    const u32 rank;
    const KTileRange k_tiles, shortcut;
    const int first, step;  // tile

    __device__ __forceinline__ Work(const WindowShape& shape, u32 rank)
        : shape(shape), rank(rank), k_tiles(shape.channels, rank),
          shortcut(SHORTCUT ? shape.shortcut_channels : 0, rank), first(blockIdx.x / SPLITS), step(gridDim.x / SPLITS) {
    }

    __device__ __forceinline__ int end() const { return shape.tiles * shape.filter_tiles; }
    // Tiles over the same pixels are consecutive, so x is read from DRAM once.
    __device__ __forceinline__ Tile tile(int index) const {
        return Tile(shape, index / shape.filter_tiles, index % shape.filter_tiles * FILTERS);
    }
    // Stages per tile.
    __device__ __forceinline__ int windows() const { return k_tiles.count() + shortcut.count(); }
    __device__ __forceinline__ int taps() const { return k_tiles.count() * TAPS + shortcut.count(); }
};

// ------------------------------------------------------------------ producer, one thread

__device__ __forceinline__ void load_tap(Taps& taps, const TensorMap& map, int channel, int tap, int filter) {
    taps.wait_empty();
    barrier_expect(taps.full(taps.stage), TAP_BYTES);
    load_weights(taps.address(), map, taps.full(taps.stage), channel, tap, filter);
    taps.next();
}

// Weights that are ready need not wait for the previous launch (PDL): the first taps of the first k-tile go ahead.
__device__ __forceinline__ void copy_tiles(const Maps& maps, const Work& work, Windows windows, Taps taps,
                                           bool weights_ready) {
    int ahead = weights_ready ? min(TAPS, TAP_STAGES) : 0;
    for (int tap = 0; tap < ahead; ++tap)
        load_tap(taps, maps.weights, work.k_tiles.first * K_TILE, tap, work.tile(work.first).filter);
    wait_for_previous_launch();
    for (int index = work.first; index < work.end(); index += work.step) {
        const Tile tile = work.tile(index);
        for (int k_tile = work.k_tiles.first; k_tile < work.k_tiles.last; ++k_tile, windows.next()) {
            windows.wait_empty();
            load_window(windows.address(), maps.windows, windows.full(windows.stage), work.shape, tile,
                        k_tile * K_TILE);
            for (int tap = ahead; tap < TAPS; ++tap) load_tap(taps, maps.weights, k_tile * K_TILE, tap, tile.filter);
            ahead = 0;
        }
        for (int k_tile = work.shortcut.first; SHORTCUT && k_tile < work.shortcut.last; ++k_tile, windows.next()) {
            windows.wait_empty();
            barrier_expect(windows.full(windows.stage), SHORTCUT_BYTES);
            tma_load_4d(windows.address(), maps.shortcut, windows.full(windows.stage), k_tile * K_TILE, tile.column,
                        tile.row, tile.image);
            load_tap(taps, maps.shortcut_weights, k_tile * K_TILE, 0, tile.filter);
        }
    }
}

// ------------------------------------------------------------------ mainloop, two warpgroups

// A stage is released once the MMAs of the next are issued, so the tensor cores never run dry.
__device__ __forceinline__ void multiply_k_tiles(Accumulators& acc, Windows& windows, Taps& taps, const Work& work) {
    int previous = 0;
    for (int k_tile = 0; k_tile < work.windows(); ++k_tile, windows.next()) {
        const bool shortcut = SHORTCUT && k_tile >= work.k_tiles.count();
        const int height = shortcut ? 1 : FILTER_HEIGHT, width = shortcut ? 1 : FILTER_WIDTH;
        windows.wait_full();
        u64 row = operand_descriptor(windows.address());
        // Not unrolled: 36 MMAs with WGMMA_N / 2 operands each take seconds to compile.
#pragma unroll 1
        for (int r = 0; r < height; ++r, row += DILATION_H * WINDOW_WIDTH * ROW_BYTES >> 4)
#pragma unroll 1
            for (int s = 0; s < width; ++s, taps.next()) {
                taps.wait_full();
                const u64 weights = k_tile_descriptor<MN_MAJOR>(taps.address());
                const u64 pixels = row + (s * DILATION_W * ROW_BYTES >> 4);
                const bool begun = k_tile || r || s;
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < ROW_BYTES / 32; ++k)
                    multiply<Element, WEIGHTS>(acc, weights + k * STEP<MN_MAJOR>, pixels + k * STEP<false>, begun || k);
                wgmma_commit();
                wgmma_wait<1>();
                if (begun) taps.release(previous);
                if (k_tile && !r && !s) windows.release((windows.stage + WINDOWS - 1) % WINDOWS);
                previous = taps.stage;
            }
    }
}

__device__ __forceinline__ void multiply_tiles(StagingTile& staging, const Element* bias, const Memory& memory,
                                               const Work& work) {
    PingPong ping_pong(memory.turns, staging.consumer);
    Windows windows = memory.windows;
    Taps taps = memory.taps;
    if (staging.consumer == 1) {
        windows.skip(work.windows());
        taps.skip(work.taps());
    }
    for (int index = work.first + staging.consumer * work.step; index < work.end(); index += CONSUMERS * work.step) {
        const Tile tile = work.tile(index);
        if (!SHARED_STAGING || index == work.first) staging.begin(tile);
        ping_pong.wait();
        Accumulators acc;
        multiply_k_tiles(acc, windows, taps, work);
        ping_pong.pass();
        wgmma_wait<0>();
        taps.release((taps.stage + TAP_STAGES - 1) % TAP_STAGES);
        windows.release((windows.stage + WINDOWS - 1) % WINDOWS);
        windows.skip(work.windows());
        taps.skip(work.taps());
        staging.store(acc, tile, Biases(bias, tile.filter));
        if (SHARED_STAGING && index + work.step < work.end()) staging.begin(work.tile(index + work.step), true);
    }
}

// ------------------------------------------------------------------ split-K: one tile per cluster

// The first warpgroup of every CTA multiplies. The second, otherwise idle, takes the first of the pieces that the CTA
// owns. Both finish their pixels in the same staging tile.
__device__ __forceinline__ void multiply_split_k(StagingTile& staging, int consumer, const Element* bias, Element* y,
                                                 const Memory& memory, const Work& work) {
    const Tile tile = work.tile(work.first);
    const Parts parts = memory.shared_sum(work.rank);
    const int sharer = 1 - consumer, count = parts.count(sharer);
    if (sharer == 0 && parts.count_of_all(0)) staging.begin(tile);
    if (consumer == 0) {
        Windows windows = memory.windows;
        Taps taps = memory.taps;
        Accumulators acc;
        multiply_k_tiles(acc, windows, taps, work);
        wgmma_wait<0>();
        parts.push(acc, work.rank);
    }
    if (!count) return;
    // By warp (its 16 filters are 32 bytes of a pixel) and by pixel (the pixels do not form a TMA box), two pieces at a
    // time. Addresses and biases are computed while the parts are in flight.
    const int half = threadIdx.x % 32 / 16, chunk = threadIdx.x / 32 % 4 * 2 + threadIdx.x / 8 % 2;  // of 8 filters
    const auto pixel_of = [&](int number) { return parts.piece(sharer, number) * 8 + threadIdx.x % 8; };
    const auto place_of = [&](int pixel) -> Element* {  // nullptr: not stored
        const WindowShape& shape = staging.shape;
        const int n = tile.image + (STACKED ? pixel / WINDOW_PIXELS : 0), within = STACKED ? pixel % WINDOW_PIXELS : pixel;
        const int row = within / WINDOW_WIDTH, column = within % WINDOW_WIDTH;
        const int h = tile.row + row, w = tile.column + column;
        if (row >= TILE_ROWS || column >= TILE_COLUMNS || h >= shape.output_height || w >= shape.output_width)
            return nullptr;
        if (STACKED && (n >= tile.image + TILE_IMAGES || n >= shape.batch)) return nullptr;
        const long long at = (1LL * n * shape.output_height + h) * shape.output_width + w;
        return y + at * (Y_PITCH ? Y_PITCH : shape.filter_tiles * FILTERS) + tile.filter + chunk * 8;
    };
    Element* to = place_of(pixel_of(half));
    const Biases biases(bias, tile.filter);
    if (HAS_AUX) staging.wait();
    parts.wait(sharer);
    const u32 row = staging.row();
    for (int start = 0; start < count; start += Parts::AT_ONCE) {
        float acc[Parts::AT_ONCE][4];
        parts.add_up(acc, sharer, start);
#pragma unroll
        for (int i = 0; i < Parts::AT_ONCE; ++i)
            if (start + i < count)
                finish_blocks<1>(acc[i], row + parts.piece(sharer, start + i) * 8 * ROW_BYTES, biases);
    }
    __syncwarp();
    for (int number = half; number < count; number += 2, to = place_of(pixel_of(number))) {
        if (!to) continue;
        const int pixel = pixel_of(number);
        *reinterpret_cast<float4*>(to) = load_shared_16(staging.address + pixel * ROW_BYTES + (chunk ^ pixel % 8) * 16);
    }
}

// ------------------------------------------------------------------ kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv2d_sm90_streamed_window(const __grid_constant__ TensorMap window_map,
                                const __grid_constant__ TensorMap weight_map,
                                const __grid_constant__ TensorMap shortcut_map,
                                const __grid_constant__ TensorMap shortcut_weight_map,
                                const __grid_constant__ TensorMap residual_map,
                                const __grid_constant__ TensorMap output_map, const Element* __restrict__ bias,
                                Element* __restrict__ y, WindowShape shape, int weights_ready, int release_dependents) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const Memory memory(shared_address(shared_memory));
    const u32 rank = SPLITS > 1 ? cluster_rank() : 0;
    if (threadIdx.x == 0) {
        memory.init_barriers(rank);
        fence_barrier_init();
        prefetch_map(window_map);
        prefetch_map(weight_map);
    }
    if (SPLITS > 1) cluster_arrive_relaxed();  // only consumers access the other CTAs' barriers, so only they wait
    clear_gaps<WINDOWS, SHORTCUT ? SHORTCUT_BYTES : WINDOW_BYTES, STAGING_TILES_HERE>(memory.windows.stages,
                                                                                      memory.staging_tiles);
    __syncthreads();

    const Work work(shape, rank);
    const int consumer = threadIdx.x / 128;
    if (consumer == CONSUMERS) {
        release_registers<40>();
        if (threadIdx.x % 128 == 0) {
            copy_tiles({window_map, weight_map, shortcut_map, shortcut_weight_map}, work, memory.windows, memory.taps,
                       weights_ready);
            if (release_dependents) let_next_launch_start();
        }
        if (SPLITS > 1) cluster_wait();
    } else {
        claim_registers<232>();
        if (SPLITS > 1) cluster_wait();
        wait_for_previous_launch();
        StagingTile staging(residual_map, output_map, shape, memory.staging_tiles, memory.residual_full,
                            SPLITS > 1 ? 0 : consumer);
        if constexpr (SPLITS > 1) multiply_split_k(staging, consumer, bias, y, memory, work);
        else multiply_tiles(staging, bias, memory, work);
        staging.close();
    }
}
