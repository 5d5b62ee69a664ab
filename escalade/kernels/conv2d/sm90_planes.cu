// y[n][k][h][w] = finish(sum over c, r, s of x[n][c][h * STRIDE_H + r * DILATION_H - pad_h]
//                                                [w * STRIDE_W + s * DILATION_W - pad_w]
//                                            * weight[k][c][r][s])                              (conv2d/finish.cuh)
//
// TF32 in NCHW, from input to output: no conversion to NHWC before or after it. wgmma reads TF32 operands from smem
// only if channels are adjacent, and in NCHW pixels are. So pixels are the rows of the product and pass through
// registers, where a lane may gather them from anywhere:
//   - one TMA load brings K_STEP planes of a tile's window, padding included;
//   - for each tap the lanes load their rows from it, shifted by the tap: x is copied once, not once per tap;
//   - eight lanes of a warp hold eight adjacent pixels of a filter, a full sector to store.
// Weights are packed beforehand (conv2d/sm90_planes_weights.cu) and stream through a ring of their own, or stay in smem
// if all of them fit (RESIDENT). Two warpgroups share a tile and its weights; or each has tiles and rings of its own
// (PING_PONG), and stores one while the other multiplies.
// Limiter: tensor cores from 64 filters on; below, smem reads of the rows; with few channels, memory.
//
// A transposed convolution of stride PHASES is one of stride 1 with a filter for every phase (k, a, b), whose result at
// pixel (u, v) is the pixel (PHASES_H * u + a - offset_h, PHASES_W * v + b - offset_w) of plane k: all phases read the
// same pixels of x, so none of the products is wasted if PHASES divides the filter's size.
//
// Rung: `planes` of conv2d and of conv2d_input_gradient. Read finish.cuh (epilogue) first.
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                  // problem.dtype
constexpr int CHANNELS = 64;            // problem.channels
constexpr int FILTERS = 128;            // problem.filters: those of all phases
constexpr int PHASES_H = 1;             // phases[0]: rows of y per row of the convolution
constexpr int PHASES_W = 1;             // phases[1]
constexpr bool FILTERS_ALIGNED = true;  // problem.filters % config.width == 0
constexpr bool FILTERS_EVEN = true;     // problem.filters % 2 == 0
constexpr int FILTER_HEIGHT = 3;        // problem.filter_height
constexpr int FILTER_WIDTH = 3;         // problem.filter_width
constexpr int STRIDE_H = 1;             // problem.stride[0]
constexpr int STRIDE_W = 1;             // problem.stride[1]
constexpr int DILATION_H = 1;           // problem.dilation[0]
constexpr int DILATION_W = 1;           // problem.dilation[1]
constexpr int WGMMA_N = 128;            // config.width: filters per CTA
constexpr int BLOCKS = 2;               // config.blocks: 64-pixel rows of the product per consumer
constexpr bool PING_PONG = false;       // config.ping_pong: consumers have tiles of their own, and multiply in turns
constexpr int GROUPS = 4;               // config.groups: groups of 8 adjacent pixels in a row of a tile
constexpr int STAGES = 2;               // config.stages: windows
constexpr int WEIGHT_STAGES = 4;        // config.weight_stages
constexpr int K_STEP = 32;              // tiling.k_step: channels of a window
constexpr int TAPS_IN_STAGE = 1;        // tiling.taps_in_stage: 1, or those of a filter row
constexpr bool RESIDENT = false;        // resident: the weights of all channels and taps stay in smem
constexpr int WINDOW_ROWS = 10;         // tiling.window[0]
constexpr int WINDOW_COLUMNS = 36;      // tiling.window[1]: padded, so that four planes are in different banks
constexpr int SHIFT = 3;                // tiling.shift: columns of a window before the first that a tile reads
using Output = float;                   // problem.dtype
using Bias = float;                     // problem.dtype
constexpr bool HAS_BIAS = true;         // problem.bias
constexpr bool HAS_RESIDUAL = false;    // problem.residual
constexpr bool HAS_RELU = true;         // problem.relu
constexpr bool HAS_MASK = false;        // mask
#endif

#include "common/ping_pong.cuh"
#include "common/ring.cuh"
#include "conv2d/finish.cuh"

constexpr int CONSUMERS = 2, THREADS = (CONSUMERS + 1) * 128;
constexpr int TEAMS = PING_PONG ? CONSUMERS : 1;  // that have tiles of their own, of this many consumers:
constexpr int MEMBERS = CONSUMERS / TEAMS;
constexpr int TILE_COLUMNS = 8 * GROUPS, TILE_ROWS = MEMBERS * BLOCKS * 8 / GROUPS;
constexpr int CHUNKS = (CHANNELS + K_STEP - 1) / K_STEP;
constexpr int PLANE_BYTES = WINDOW_ROWS * WINDOW_COLUMNS * 4, WINDOW_BYTES = K_STEP * PLANE_BYTES;
constexpr int TAP_BYTES = WGMMA_N * K_STEP * 4, WEIGHT_BYTES = TAPS_IN_STAGE * TAP_BYTES;
constexpr int WEIGHTS_PER_TILE = CHUNKS * FILTER_HEIGHT * FILTER_WIDTH / TAPS_IN_STAGE;  // stages
constexpr int STEPS = K_STEP / 8;             // of a wgmma, per tap
constexpr int PARTS = STEPS > 1 ? 2 : 1;      // of a tap: one is loaded while the other is multiplied
constexpr int PART_STEPS = STEPS / PARTS;
constexpr int UNROLLED_ROWS = PARTS == 2 ? 1 : FILTER_HEIGHT, UNROLLED_TAPS = PARTS == 2 ? 1 : FILTER_WIDTH;
constexpr int PACKED_ROW = 64;                // floats of packed weights in a row of their tensor map
static_assert(TILE_ROWS * GROUPS == MEMBERS * BLOCKS * 8, "a tile is whole rows of groups");
static_assert((TILE_ROWS - 1) * STRIDE_H + (FILTER_HEIGHT - 1) * DILATION_H < WINDOW_ROWS, "the window holds a tile");
static_assert((TILE_COLUMNS - 1) * STRIDE_W + (FILTER_WIDTH - 1) * DILATION_W + SHIFT < WINDOW_COLUMNS, "likewise");
static_assert(TAPS_IN_STAGE == 1 || TAPS_IN_STAGE == FILTER_WIDTH, "a stage is a tap or a filter row");
static_assert(PARTS == 2 || CHUNKS == 1, "the two sets of rows alternate from chunk to chunk");
static_assert(!RESIDENT || WEIGHT_STAGES == WEIGHTS_PER_TILE, "resident weights have a stage each");

using Windows = Ring<STAGES, (WINDOW_BYTES + 1023) / 1024 * 1024>;
using Weights = Ring<WEIGHT_STAGES, (WEIGHT_BYTES + 1023) / 1024 * 1024>;
using Accumulators = float[BLOCKS][WGMMA_N / 2];

struct Memory {  // smem addresses
    static constexpr int WEIGHT_RINGS = RESIDENT ? 1 : TEAMS;
    static constexpr int WEIGHTS_AT = TEAMS * STAGES * Windows::STAGE;
    static constexpr int BARRIERS_AT = WEIGHTS_AT + WEIGHT_RINGS * WEIGHT_STAGES * Weights::STAGE;

    const u32 start;

    __device__ __forceinline__ u32 barriers(int ring) const { return start + BARRIERS_AT + ring * 16 * STAGES; }
    __device__ __forceinline__ u32 weight_barriers(int ring) const {
        return barriers(TEAMS) + ring * 16 * WEIGHT_STAGES;
    }
    __device__ __forceinline__ u32 turns() const { return weight_barriers(WEIGHT_RINGS); }
    __device__ __forceinline__ Windows windows(int team) const {
        return Windows(start + team * STAGES * Windows::STAGE, barriers(team));
    }
    __device__ __forceinline__ Weights weights(int team) const {
        const int ring = RESIDENT ? 0 : team;
        return Weights(start + WEIGHTS_AT + ring * WEIGHT_STAGES * Weights::STAGE, weight_barriers(ring));
    }
    __device__ __forceinline__ void init_barriers() const {
        for (int team = 0; team < TEAMS; ++team) windows(team).init(MEMBERS * 4);
        for (int team = 0; team < WEIGHT_RINGS; ++team) weights(team).init(MEMBERS * 4);
        if (PING_PONG) PingPong::init(turns());
    }
};

// The tiles of a team, all of the same filters. CTAs with the same pixels are adjacent, so x is read from DRAM once.
struct Work {
    const int filter_tile, column_tiles, row_tiles, tiles, first, step;

    struct Tile {
        int image, row, column;  // of the first output pixel
    };

    __device__ __forceinline__ Work(const ConvShape& shape, int team)
        : filter_tile(blockIdx.x % FILTER_TILES), column_tiles((shape.output_width + TILE_COLUMNS - 1) / TILE_COLUMNS),
          row_tiles((shape.output_height + TILE_ROWS - 1) / TILE_ROWS),
          tiles(column_tiles * row_tiles * shape.batch),
          first(team * (gridDim.x / FILTER_TILES) + blockIdx.x / FILTER_TILES),
          step(TEAMS * (gridDim.x / FILTER_TILES)) {}

    __device__ __forceinline__ Tile tile(int index) const {
        return {index / column_tiles / row_tiles, index / column_tiles % row_tiles * TILE_ROWS,
                index % column_tiles * TILE_COLUMNS};
    }

    static constexpr int FILTER_TILES = (FILTERS + WGMMA_N - 1) / WGMMA_N;
};

// ------------------------------------------------------------------ copies, by one thread each

__device__ __forceinline__ void copy_windows(const TensorMap& map, Windows ring, const ConvShape& shape,
                                             const Work& work) {
    wait_for_previous_launch();
    for (int index = work.first; index < work.tiles; index += work.step) {
        const Work::Tile tile = work.tile(index);
        for (int chunk = 0; chunk < CHUNKS; ++chunk, ring.next()) {
            ring.wait_empty();
            barrier_expect(ring.full(ring.stage), WINDOW_BYTES);
            // TMA faults unless the innermost coordinate is a multiple of 16 bytes.
            tma_load_4d(ring.address(), map, ring.full(ring.stage), tile.column * STRIDE_W - shape.pad_w - SHIFT,
                        tile.row * STRIDE_H - shape.pad_h, chunk * K_STEP, tile.image);
        }
    }
}

__device__ __forceinline__ void copy_weights(const TensorMap& map, Weights ring, const Work& work, bool weights_ready) {
    if (!weights_ready) wait_for_previous_launch();
    constexpr int ROWS = WEIGHT_BYTES / 4 / PACKED_ROW;
    for (int index = work.first; index < work.tiles; index += work.step) {
        for (int number = 0; number < WEIGHTS_PER_TILE; ++number, ring.next()) {
            ring.wait_empty();
            barrier_expect(ring.full(ring.stage), WEIGHT_BYTES);
            tma_load_2d(ring.address(), map, ring.full(ring.stage), 0,
                        (work.filter_tile * WEIGHTS_PER_TILE + number) * ROWS);
        }
        if (RESIDENT) return;
    }
}

// ------------------------------------------------------------------ mainloop

// Position of a lane's pixels: of block `block`, the rows lane / 4 and lane / 4 + 8 of its warp. The groups of a warp are
// adjacent, so that it stores whole lines.
struct Pixels {
    const int consumer, warp, lane;

    __device__ __forceinline__ Pixels()
        : consumer(threadIdx.x / 128 % MEMBERS), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {}
    __device__ __forceinline__ int group(int block, int half) const {
        return ((consumer * 4 + warp) * BLOCKS + block) * 2 + half;  // `consumer` of those that share the tile
    }
    __device__ __forceinline__ int row(int block, int half) const { return group(block, half) / GROUPS; }
    __device__ __forceinline__ int column(int block, int half) const {
        return group(block, half) % GROUPS * 8 + lane / 4;
    }
    // Byte offset in a window, of channel lane % 4.
    __device__ __forceinline__ u32 offset(int block, int half) const {
        return lane % 4 * PLANE_BYTES
               + (row(block, half) * STRIDE_H * WINDOW_COLUMNS + column(block, half) * STRIDE_W + SHIFT) * 4;
    }
};

using Rows = u32[PART_STEPS][BLOCKS][4];  // of A, as an MMA takes them

__device__ __forceinline__ void load_rows(Rows& rows, const u32 (&pixels)[BLOCKS][2], u32 window, int part) {
#pragma unroll
    for (int step = 0; step < PART_STEPS; ++step)
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int channel = (part * PART_STEPS + step) * 8 + i / 2 * 4;
                rows[step][block][i] =
                    __float_as_uint(load_shared(window + pixels[block][i % 2] + channel * PLANE_BYTES));
            }
}

// Packed weights of a tap: [K_STEP / 4][WGMMA_N][4].
__device__ __forceinline__ void multiply_rows(Accumulators& acc, const Rows& rows, u32 weights, int part, bool begun) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < PART_STEPS; ++step) {
        const u64 columns =
            overlapping_descriptor(weights + (part * PART_STEPS + step) * 2 * WGMMA_N * 16, WGMMA_N * 16, 128);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
            wgmma_tf32_from_registers(acc[block], rows[step][block], columns, begun || step);
    }
    wgmma_commit();
}

// Weight stages of a tile are numbered, so that resident ones are found again.
struct WeightReader {
    Weights ring;

    __device__ __forceinline__ void begin_tile() {
        if (RESIDENT) ring.stage = 0, ring.parity = 0;
    }
    __device__ __forceinline__ void release_previous() const {
        if (!RESIDENT) ring.release((ring.stage + WEIGHT_STAGES - 1) % WEIGHT_STAGES);
    }
};

// Part p of a tap is loaded while the MMAs of the part before it run. Once those of the first part of a tap are issued
// and only they are pending, the stages before it are free.
__device__ __forceinline__ void multiply_chunk(Accumulators& acc, Rows (&rows)[2], const u32 (&pixels)[BLOCKS][2],
                                               Windows& windows, WeightReader& weights, int chunk) {
    windows.wait_full();
    u32 at = 0;
#pragma unroll UNROLLED_ROWS
    for (int r = 0; r < FILTER_HEIGHT; ++r) {
#pragma unroll UNROLLED_TAPS
        for (int s = 0; s < FILTER_WIDTH; ++s) {
            const bool is_first = r == 0 && s == 0, begins_stage = s % TAPS_IN_STAGE == 0;
            if (begins_stage) {
                weights.ring.wait_full();
                at = weights.ring.address();
            } else {
                at += TAP_BYTES;
            }
            const u32 window = windows.address() + (r * DILATION_H * WINDOW_COLUMNS + s * DILATION_W) * 4;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                Rows& own = rows[PARTS == 2 ? part : (r * FILTER_WIDTH + s) % 2];
                load_rows(own, pixels, window, part);
                multiply_rows(acc, own, at, part, chunk || !is_first || part);
                wgmma_wait<1>();
                if (part == 0 && begins_stage && !(chunk == 0 && is_first)) weights.release_previous();
                if (part == 0 && is_first && chunk) windows.release((windows.stage + STAGES - 1) % STAGES);
            }
            if (s % TAPS_IN_STAGE == TAPS_IN_STAGE - 1) weights.ring.next();
        }
    }
    windows.next();
}

__device__ __forceinline__ void multiply_tile(Accumulators& acc, const u32 (&pixels)[BLOCKS][2], Windows& windows,
                                              WeightReader& weights, const PingPong& ping_pong) {
    Rows rows[2];
    weights.begin_tile();
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; ++chunk) multiply_chunk(acc, rows, pixels, windows, weights, chunk);
    if (PING_PONG) ping_pong.pass();
    wgmma_wait<0>();
    weights.release_previous();
    windows.release((windows.stage + STAGES - 1) % STAGES);
}

// ------------------------------------------------------------------ epilogue

struct Result {  // the planes of y
    int height, width, offset_h, offset_w;
};

// A lane stores one pixel at a time: eight lanes have adjacent pixels of one filter. All pixels of a filter are finished
// before the first is stored, without a branch in between, so that their functions overlap.
__device__ __forceinline__ void store_tile(const Accumulators& acc, const Pixels& pixels, const Finish& finish,
                                           const Result& result, const Work::Tile& tile, int first_filter,
                                           Output* y) {
    constexpr int PHASES = PHASES_H * PHASES_W, PLANES = FILTERS / PHASES;
    const int filter = first_filter + pixels.lane % 4 * 2, plane = result.height * result.width;
    const long long image = 1LL * tile.image * PLANES * plane;
    int rows[BLOCKS][2], columns[BLOCKS][2];
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            rows[block][half] = (tile.row + pixels.row(block, half)) * PHASES_H - result.offset_h;
            columns[block][half] = (tile.column + pixels.column(block, half)) * PHASES_W - result.offset_w;
        }
#pragma unroll
    for (int j = 0; j < WGMMA_N / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int own = filter + j * 8 + e, k = own / PHASES;
            const int a = own / PHASES_W % PHASES_H, b = own % PHASES_W;
            const bool exists = FILTERS_ALIGNED || own < FILTERS;
            const long long start = image + 1LL * k * plane;
            // __ldg: a plain load could not move ahead of the stores to y.
            const float bias = HAS_BIAS && exists ? to_float(__ldg(finish.bias + k)) : 0.f;
            const FilterPair pair{make_float2(bias, bias), make_float2(1.f, 1.f)};
            float results[BLOCKS][2];
            int at[BLOCKS][2];
            bool is_inside[BLOCKS][2];
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                float aux_values[2] = {};
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int h = rows[block][half] + a, w = columns[block][half] + b;
                    // as unsigned: neither negative
                    is_inside[block][half] = exists && u32(h) < u32(result.height) && u32(w) < u32(result.width);
                    at[block][half] = h * result.width + w;
                    if (HAS_AUX && is_inside[block][half])
                        aux_values[half] = to_float(__ldg(finish.residual + start + at[block][half]));
                }
                const float* sums = &acc[block][4 * j + e];
                const float2 two = finish.values(make_float2(sums[0], sums[2]), pair,
                                                 make_float2(aux_values[0], aux_values[1]));
                results[block][0] = two.x, results[block][1] = two.y;
            }
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    if (is_inside[block][half]) y[start + at[block][half]] = from_float<Output>(results[block][half]);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv2d_sm90_planes(const __grid_constant__ TensorMap window_map, const __grid_constant__ TensorMap weight_map,
                       const Bias* __restrict__ bias, const Element* __restrict__ aux, Output* __restrict__ y,
                       ConvShape shape, Result result, int weights_ready, int release_dependents) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const Memory memory{shared_address(shared_memory)};
    if (threadIdx.x == 0) {
        memory.init_barriers();
        fence_barrier_init();
        prefetch_map(window_map);
        prefetch_map(weight_map);
    }
    __syncthreads();

    if (threadIdx.x >= CONSUMERS * 128) {
        release_registers<56>();
        const int warp = threadIdx.x / 32 - CONSUMERS * 4, team = warp / 2;
        if (threadIdx.x % 32 || team >= TEAMS) return;
        const Work work(shape, team);
        if (warp % 2 == 0) {
            copy_windows(window_map, memory.windows(team), shape, work);
            if (release_dependents && team == 0) let_next_launch_start();
        } else if (!RESIDENT || team == 0) {
            copy_weights(weight_map, memory.weights(team), work, weights_ready);
        }
    } else {
        claim_registers<224>();
        const int consumer = threadIdx.x / 128, team = consumer / MEMBERS;
        const Work work(shape, team);
        const Pixels pixels;
        u32 offsets[BLOCKS][2];
        for (int block = 0; block < BLOCKS; ++block)
            for (int half = 0; half < 2; ++half) offsets[block][half] = pixels.offset(block, half);
        const Finish finish{bias, nullptr, nullptr, aux, FILTERS};
        Windows windows = memory.windows(team);
        WeightReader weights{memory.weights(team)};
        PingPong ping_pong(memory.turns(), consumer);
        wait_for_previous_launch();
        for (int index = work.first; index < work.tiles; index += work.step) {
            Accumulators acc;
            if (PING_PONG) ping_pong.wait();
            multiply_tile(acc, offsets, windows, weights, ping_pong);
            store_tile(acc, pixels, finish, result, work.tile(index), work.filter_tile * WGMMA_N, y);
        }
    }
}
