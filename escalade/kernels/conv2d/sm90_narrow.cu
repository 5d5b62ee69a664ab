// y[n][h][w][k] = finish(sum over r, s, c of x[n][h + r * DILATION_H - pad_h][w + s * DILATION_W - pad_w][c]
//                                            * weight[k][r][s][c])                              (conv2d/finish.cuh)
//
// For few filters, stride 1, NHWC. With pixels as rows and 32 filters as columns, an MMA spends longer reading its rows
// from smem than multiplying; with filters as rows, half of the MMA is empty. Here the columns are the filters of all
// FILTER_WIDTH taps of a filter row, and the rows are the pixels of a window, numbered across its rows:
//   part[v][s][k] = sum over r, c of window[v + r * DILATION_H * WINDOW_WIDTH][c] * weight[k][r][s][c]
// So a pixel is read only FILTER_HEIGHT times. The epilogue adds the parts through smem, each shifted by s * DILATION_W
// pixels: y[v][k] = finish(sum over s of part[v + s * DILATION_W][s][k]).
// Persistent CTAs keep all weights of their filters in smem; if those do not fit, FILTER_PARTS adjacent CTAs split the
// filters. Every consumer warpgroup has its own tiles, windows and copying thread, so it never waits for another.
// Limiter: smem reads, 16 + WGMMA_N / 4 cycles per step of WGMMA_N / 2 MMA cycles, plus those of the parts.
//
// Rung: `narrow`. Read finish.cuh (epilogue) and products.cuh first.
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                  // problem.dtype
constexpr int CHANNELS = 8;             // problem.channels
constexpr int FILTERS = 16;             // problem.filters
constexpr bool FILTERS_ALIGNED = true;  // filters_aligned
constexpr bool FILTERS_EVEN = true;     // problem.filters % 2 == 0
constexpr int FILTER_HEIGHT = 3;        // problem.filter_height
constexpr int FILTER_WIDTH = 3;         // problem.filter_width
constexpr int DILATION_H = 1;           // problem.dilation[0]
constexpr int DILATION_W = 1;           // problem.dilation[1]
constexpr int WGMMA_N = 48;             // tiling.width
constexpr int PADDED = 16;              // tiling.padded
constexpr int TILE_ROWS = 9;            // config.rows: output rows per tile
constexpr int TILE_COLUMNS = 1;         // config.columns
constexpr int CONSUMERS = 2;            // config.consumers: consumer warpgroups, each with tiles of its own
constexpr int STAGES = 6;               // config.stages: window stages per consumer, of one k-tile each
constexpr int VECTOR = 4;               // vector
constexpr int Y_STEP = 16;              // problem.y_pitch or problem.filters
using Output = float;                   // problem.dtype
using Bias = float;                     // problem.dtype
constexpr bool HAS_BIAS = true;         // problem.bias
constexpr bool HAS_RESIDUAL = false;    // problem.residual
constexpr bool HAS_RELU = true;         // problem.relu
constexpr bool HAS_MASK = false;        // False
#endif

#include "common/ring.cuh"
#include "common/wgmma_widths.cuh"  // must precede its users
#include "conv2d/finish.cuh"
#include "conv2d/products.cuh"

constexpr int THREADS = CONSUMERS * (128 + 32);  // per consumer: a warpgroup, and a warp that copies
constexpr int ROW_BYTES = 128;                   // channels per pixel or filter tap: the swizzle span
constexpr int STEP_BYTES = 32, STEPS = ROW_BYTES / STEP_BYTES;
constexpr int K_TILE = ROW_BYTES / sizeof(Element), K_TILES = (CHANNELS + K_TILE - 1) / K_TILE;
constexpr int LAST_STEPS = ((CHANNELS - (K_TILES - 1) * K_TILE) * int(sizeof(Element)) + STEP_BYTES - 1) / STEP_BYTES;
// groups of PADDED filters (a multiple of 8), the columns of a tap
constexpr int FILTER_PARTS = (FILTERS + PADDED - 1) / PADDED;
constexpr bool PADS = FILTERS % PADDED != 0;
constexpr int ROW_WEIGHT_BYTES = WGMMA_N * ROW_BYTES, WEIGHT_ROWS = K_TILES * FILTER_HEIGHT;
static_assert(FILTER_WIDTH * PADDED <= WGMMA_N, "a filter row fits one MMA");

constexpr int REACH_H = (FILTER_HEIGHT - 1) * DILATION_H, REACH_W = (FILTER_WIDTH - 1) * DILATION_W;
constexpr int WINDOW_WIDTH = TILE_COLUMNS + REACH_W;
constexpr int WINDOW_BYTES = (TILE_ROWS + REACH_H) * WINDOW_WIDTH * ROW_BYTES;
constexpr int BLOCKS = (TILE_ROWS * WINDOW_WIDTH + 63) / 64;  // 64-row MMAs per tile
constexpr int READ_BYTES = (BLOCKS * 64 + REACH_H * WINDOW_WIDTH) * ROW_BYTES;
constexpr int STAGE_BYTES = ((READ_BYTES > WINDOW_BYTES ? READ_BYTES : WINDOW_BYTES) + 1023) / 1024 * 1024;

// Parts are staged STAGED filters at a time, VECTOR of a pixel per lane: 16 filters, or all of them where stores are
// short, so that adjacent lanes store adjacent addresses. The pitch avoids bank conflicts between rows written at once.
constexpr int STAGED = VECTOR * sizeof(Output) < 8 || PADDED % 16 ? PADDED : 16;
constexpr int UNITS = (STAGED == PADDED && FILTER_PARTS == 1 ? FILTERS : STAGED) / VECTOR;
constexpr int STAGED_PITCH = FILTER_WIDTH * STAGED + (FILTER_WIDTH * STAGED % 16 ? 0 : 8);
constexpr int STAGED_BYTES = (BLOCKS * 64 * STAGED_PITCH * 4 + 1023) / 1024 * 1024;
static_assert(FILTERS % VECTOR == 0, "stores are aligned");

using Windows = Ring<STAGES, STAGE_BYTES>;
using Accumulators = float[BLOCKS][WGMMA_N / 2];

struct Memory {        // smem addresses
    u32 weights;       // by k-tile, then by filter row
    u32 windows;       // one ring per consumer
    u32 staged;        // parts, one buffer per consumer
    u32 weights_full;  // barriers: one per k-tile and filter row

    static constexpr int WINDOWS_AT = WEIGHT_ROWS * ROW_WEIGHT_BYTES;
    static constexpr int STAGED_AT = WINDOWS_AT + CONSUMERS * STAGES * STAGE_BYTES;
    static constexpr int WEIGHTS_FULL_AT = STAGED_AT + CONSUMERS * STAGED_BYTES;
    static constexpr int RINGS_AT = WEIGHTS_FULL_AT + 8 * WEIGHT_ROWS;

    __device__ __forceinline__ explicit Memory(u32 start)
        : weights(start), windows(start + WINDOWS_AT), staged(start + STAGED_AT),
          weights_full(start + WEIGHTS_FULL_AT) {}

    __device__ __forceinline__ Windows ring(int consumer) const {
        return Windows(windows + consumer * STAGES * STAGE_BYTES, weights + RINGS_AT + consumer * STAGES * 16);
    }
    __device__ __forceinline__ void init_barriers() const {
        for (int row = 0; row < WEIGHT_ROWS; ++row) barrier_init(weights_full + row * 8, 1);
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) ring(consumer).init(4);
    }
};

// Zero-fills the bytes that MMAs read but no copy writes.
__device__ __forceinline__ void clear_gaps(const Memory& memory) {
    const float4 zeros = make_float4(0.f, 0.f, 0.f, 0.f);
    if (READ_BYTES > WINDOW_BYTES)
        for (int stage = 0; stage < CONSUMERS * STAGES; ++stage)
            for (int byte = WINDOW_BYTES + threadIdx.x * 16; byte < READ_BYTES; byte += THREADS * 16)
                store_shared(memory.windows + stage * STAGE_BYTES + byte, zeros);
    constexpr int FILLED = FILTER_WIDTH * PADDED * ROW_BYTES;
    if (ROW_WEIGHT_BYTES > FILLED)
        for (int row = 0; row < WEIGHT_ROWS; ++row)
            for (int byte = FILLED + threadIdx.x * 16; byte < ROW_WEIGHT_BYTES; byte += THREADS * 16)
                store_shared(memory.weights + row * ROW_WEIGHT_BYTES + byte, zeros);
    fence_async_proxy();
}

// The tiles of one consumer. The consumer is the slow index, so few tiles spread over as many CTAs.
struct Work {
    const ConvShape& shape;
    const int column_tiles, row_tiles, tiles, first, step;

    struct Tile {
        int image, row, column;  // of the first output pixel
    };

    __device__ __forceinline__ Work(const ConvShape& shape, int consumer)
        : shape(shape), column_tiles((shape.output_width + TILE_COLUMNS - 1) / TILE_COLUMNS),
          row_tiles((shape.output_height + TILE_ROWS - 1) / TILE_ROWS),
          tiles(column_tiles * row_tiles * shape.batch),
          first(consumer * (gridDim.x / FILTER_PARTS) + blockIdx.x / FILTER_PARTS),
          step(CONSUMERS * (gridDim.x / FILTER_PARTS)) {}

    __device__ __forceinline__ static int first_filter() { return blockIdx.x % FILTER_PARTS * PADDED; }
    __device__ __forceinline__ Tile tile(int index) const {
        return {index / column_tiles / row_tiles, index / column_tiles % row_tiles * TILE_ROWS,
                index % column_tiles * TILE_COLUMNS};
    }
};

// ------------------------------------------------------------------ copies, by one thread of each copying warp

__device__ __forceinline__ void copy_weights(const TensorMap& map, const Memory& memory) {
    for (int row = 0; row < WEIGHT_ROWS; ++row) {
        const u32 full = memory.weights_full + row * 8;
        barrier_expect(full, FILTER_WIDTH * PADDED * ROW_BYTES);
        for (int s = 0; s < FILTER_WIDTH; ++s)
            tma_load_3d(memory.weights + row * ROW_WEIGHT_BYTES + s * PADDED * ROW_BYTES, map, full,
                        row / FILTER_HEIGHT * K_TILE, row % FILTER_HEIGHT * FILTER_WIDTH + s, Work::first_filter());
    }
}

// Weights that are ready need not wait for the previous launch (PDL); otherwise the first window is copied before them.
__device__ __forceinline__ void copy_windows(const TensorMap& window_map, const TensorMap& weight_map,
                                             const Memory& memory, const Work& work, int consumer,
                                             bool weights_ready) {
    const bool has_weights = consumer == 0;
    if (has_weights && weights_ready) copy_weights(weight_map, memory);
    wait_for_previous_launch();
    Windows ring = memory.ring(consumer);
    for (int index = work.first; index < work.tiles; index += work.step) {
        const Work::Tile tile = work.tile(index);
        for (int k_tile = 0; k_tile < K_TILES; ++k_tile, ring.next()) {
            ring.wait_empty();
            barrier_expect(ring.full(ring.stage), WINDOW_BYTES);
            tma_load_4d(ring.address(), window_map, ring.full(ring.stage), k_tile * K_TILE,
                        tile.column - work.shape.pad_w, tile.row - work.shape.pad_h, tile.image);
            if (has_weights && !weights_ready && index == work.first && k_tile == 0) copy_weights(weight_map, memory);
        }
    }
}

// ------------------------------------------------------------------ mainloop

template <int COUNT>
__device__ __forceinline__ void multiply_k_tile(Accumulators& acc, const Memory& memory, u32 window, int k_tile) {
    u64 pixels = operand_descriptor(window);
    u64 weights = operand_descriptor(memory.weights + k_tile * FILTER_HEIGHT * ROW_WEIGHT_BYTES);
#pragma unroll 1
    for (int r = 0; r < FILTER_HEIGHT; ++r) {
        // Returns at once after the first tile.
        barrier_wait(memory.weights_full + (k_tile * FILTER_HEIGHT + r) * 8, 0);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < COUNT; ++k)
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block)
                multiply<Element>(acc[block], pixels + (block * 64 * ROW_BYTES >> 4) + k * STEP<false>,
                                  weights + k * STEP<false>, k_tile || r || k);
        wgmma_commit();
        pixels += DILATION_H * WINDOW_WIDTH * ROW_BYTES >> 4;
        weights += ROW_WEIGHT_BYTES >> 4;
    }
}

// A k-tile is released once the MMAs of the next are issued, so the tensor cores never run dry.
__device__ __forceinline__ void multiply_window(Accumulators& acc, const Memory& memory, Windows& ring) {
    constexpr int WHOLE_K_TILES = LAST_STEPS == STEPS ? K_TILES : K_TILES - 1;
    constexpr int K_TILE_GROUPS = FILTER_HEIGHT < 7 ? FILTER_HEIGHT : 7;  // wgmma_wait counts up to 7 groups
#pragma unroll 1
    for (int k_tile = 0; k_tile < WHOLE_K_TILES; ++k_tile, ring.next()) {
        ring.wait_full();
        multiply_k_tile<STEPS>(acc, memory, ring.address(), k_tile);
        wgmma_wait<K_TILE_GROUPS>();
        if (k_tile) ring.release((ring.stage + STAGES - 1) % STAGES);
    }
    if constexpr (WHOLE_K_TILES < K_TILES) {
        ring.wait_full();
        multiply_k_tile<LAST_STEPS>(acc, memory, ring.address(), WHOLE_K_TILES);
        wgmma_wait<K_TILE_GROUPS>();
        if (WHOLE_K_TILES) ring.release((ring.stage + STAGES - 1) % STAGES);
        ring.next();
    }
    wgmma_wait<0>();
    ring.release((ring.stage + STAGES - 1) % STAGES);
}

// ------------------------------------------------------------------ epilogue: parts to results

// Stages two adjacent columns of a lane's rows, for STAGED filters of every tap from `first` on.
__device__ __forceinline__ void stage_parts(float* staged, const Accumulators& acc, int first) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    float* const to = staged + (16 * warp + lane / 4) * STAGED_PITCH + lane % 4 * 2;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
        for (int s = 0; s < FILTER_WIDTH; ++s)
#pragma unroll
            for (int j = 0; j < STAGED / 8; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float* pair = &acc[block][4 * ((s * PADDED + first) / 8 + j) + 2 * half];
                    store_pack(to + (64 * block + 8 * half) * STAGED_PITCH + s * STAGED + j * 8,
                               Pack<float, 2>{pair[0], pair[1]});
                }
}

// Sums of VECTOR filters of a pixel. If these are two 16-byte reads, odd lanes begin with the second to avoid bank
// conflicts.
__device__ __forceinline__ void add_parts(float (&acc)[VECTOR], const float* from, bool other) {
    constexpr int WORDS = VECTOR < 4 ? VECTOR : 4, READS = VECTOR / WORDS;
    Pack<float, WORDS> parts[READS] = {};
#pragma unroll
    for (int s = 0; s < FILTER_WIDTH; ++s)
#pragma unroll
        for (int read = 0; read < READS; ++read) {
            const int at = READS == 2 && other ? (1 - read) * WORDS : read * WORDS;
            const Pack<float, WORDS> part =
                load_pack<float, WORDS>(from + s * (DILATION_W * STAGED_PITCH + STAGED) + at);
#pragma unroll
            for (int e = 0; e < WORDS; ++e) parts[read].at[e] += part.at[e];
        }
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {  // select, do not index: keeps parts in registers
        const int read = e / WORDS;
        acc[e] = READS == 2 && other ? parts[READS - 1 - read].at[e % WORDS] : parts[read].at[e % WORDS];
    }
}

struct Store {
    const Finish& finish;
    Output* y;
    const ConvShape& shape;

    // VECTOR filters of one pixel.
    __device__ __forceinline__ void unit(const float (&acc)[VECTOR], int filter, long long pixel) const {
        Pack<Bias, VECTOR> bias = {};
        Pack<Element, VECTOR> residual = {};
        if (HAS_BIAS) bias = load_pack<Bias, VECTOR>(finish.bias + filter);
        if (HAS_RESIDUAL) residual = load_pack<Element, VECTOR>(finish.residual + pixel * FILTERS + filter);
        float results[VECTOR];
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
            results[e] = finish.value(acc[e], to_float(bias.at[e]), 1.f, to_float(residual.at[e]));
        Pack<Output, VECTOR> pack;
        from_floats(pack, results);
        store_pack(y + pixel * Y_STEP + filter, pack);
    }

    __device__ __forceinline__ void tile(const Accumulators& acc, float* staged, const Work::Tile& tile,
                                         int consumer) const {
#pragma unroll
        for (int first = 0; first < PADDED; first += STAGED) {
            warpgroup_sync(consumer);  // the previous parts have been read
            stage_parts(staged, acc, first);
            warpgroup_sync(consumer);
            for (int i = threadIdx.x % 128; i < TILE_ROWS * TILE_COLUMNS * UNITS; i += 128) {
                const int within = i % UNITS * VECTOR, filter = Work::first_filter() + first + within;
                const int row = i / UNITS / TILE_COLUMNS, column = i / UNITS % TILE_COLUMNS;
                if (PADS && filter >= FILTERS) continue;
                if (tile.row + row >= shape.output_height || tile.column + column >= shape.output_width) continue;
                float all[VECTOR];
                add_parts(all, staged + (row * WINDOW_WIDTH + column) * STAGED_PITCH + within, i % 2);
                const long long image_row = 1LL * tile.image * shape.output_height + tile.row + row;
                unit(all, filter, image_row * shape.output_width + tile.column + column);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv2d_sm90_narrow(const __grid_constant__ TensorMap window_map, const __grid_constant__ TensorMap weight_map,
                       const Bias* __restrict__ bias, const Element* __restrict__ residual, Output* __restrict__ y,
                       ConvShape shape, int weights_ready, int release_dependents) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const Memory memory(shared_address(shared_memory));
    if (threadIdx.x == 0) {
        memory.init_barriers();
        fence_barrier_init();
        prefetch_map(window_map);
        prefetch_map(weight_map);
    }
    clear_gaps(memory);
    __syncthreads();

    if (threadIdx.x >= CONSUMERS * 128) {
        const int consumer = threadIdx.x / 32 - CONSUMERS * 4;
        if (threadIdx.x % 32 == 0) {
            copy_windows(window_map, weight_map, memory, Work(shape, consumer), consumer, weights_ready);
            if (release_dependents && consumer == 0) let_next_launch_start();
        }
    } else {
        const int consumer = threadIdx.x / 128;
        const Work work(shape, consumer);
        const Finish finish{bias, nullptr, nullptr, residual, FILTERS};
        const Store store{finish, y, shape};
        float* const staged = reinterpret_cast<float*>(shared_memory + Memory::STAGED_AT + consumer * STAGED_BYTES);
        Windows ring = memory.ring(consumer);
        wait_for_previous_launch();
        for (int index = work.first; index < work.tiles; index += work.step) {
            Accumulators acc;
            multiply_window(acc, memory, ring);
            store.tile(acc, staged, work.tile(index), consumer);
        }
    }
}
