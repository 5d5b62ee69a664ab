// y[n][k][h][w] = finish(sum over c, r, s of x[n][c][h * STRIDE_H + r * DILATION_H - pad_h]
//                                                [w * STRIDE_W + s * DILATION_W - pad_w]
//                                            * weight[k][c][r][s])                              (conv2d/finish.cuh)
//
// TF32 in NCHW, from input to output: no conversion to NHWC before or after it. wgmma reads TF32 operands from smem
// only if channels are adjacent, and in NCHW pixels are. So pixels are the rows of the product and pass through
// registers, where a lane may gather them from anywhere:
//   - one TMA load brings K_STEP planes of a tile's window, padding included;
//   - for each tap the lanes load their rows from it, shifted by the tap: x is copied once, not once per tap;
//   - the BLOCKS of a lane are stacked vertically, so a loaded row serves all taps of a filter's column that
//     reach it: (BLOCKS + 2) / (3 * BLOCKS) of the loads, for 3x3 filters;
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
constexpr int COLUMN_TAPS = 3;          // tiling.column_taps: taps of a filter's column that share rows: all, or 1
constexpr int PART_STEPS = 1;           // tiling.part_steps: steps of 8 channels per stage of weights
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
constexpr bool POOLED = false;          // problem.pools: y are the maxima of 2x2 pixels,
constexpr bool MEAN = false;            // problem.mean: or their means
#endif

#include "common/ping_pong.cuh"
#include "common/ring.cuh"
#include "common/warp.cuh"
#include "conv2d/finish.cuh"
#include "conv2d/planes_phases.cuh"

constexpr int CONSUMERS = 2, THREADS = (CONSUMERS + 1) * 128;
constexpr int TEAMS = PING_PONG ? CONSUMERS : 1;  // that have tiles of their own, of this many consumers:
constexpr int MEMBERS = CONSUMERS / TEAMS;
constexpr int TILE_COLUMNS = 8 * GROUPS, TILE_ROWS = MEMBERS * BLOCKS * 8 / GROUPS;
constexpr int CHUNKS = (CHANNELS + K_STEP - 1) / K_STEP;
constexpr int PLANE_BYTES = WINDOW_ROWS * WINDOW_COLUMNS * 4, WINDOW_BYTES = K_STEP * PLANE_BYTES;
constexpr int WEIGHT_BYTES = COLUMN_TAPS * PART_STEPS * 8 * WGMMA_N * 4;  // of a stage
constexpr int PARTS = K_STEP / 8 / PART_STEPS;  // of a window's channels: rows are loaded while another's are multiplied
constexpr int ROW_GROUPS = FILTER_HEIGHT / COLUMN_TAPS;
constexpr int WEIGHTS_PER_TILE = CHUNKS * ROW_GROUPS * FILTER_WIDTH * PARTS;  // stages
constexpr int UNROLLED_GROUPS = PARTS > 1 ? 1 : ROW_GROUPS, UNROLLED_TAPS = PARTS > 1 ? 1 : FILTER_WIDTH;
constexpr int LOADED_STEP = COLUMN_TAPS > 1 ? 1 : STRIDE_H;  // rows of a window between those that a lane loads, in all:
constexpr int LOADED = COLUMN_TAPS > 1 ? (BLOCKS - 1) * STRIDE_H + COLUMN_TAPS : BLOCKS;
constexpr int PACKED_ROW = 64;                // floats of packed weights in a row of their tensor map
static_assert(GROUPS % 2 == 0 && MEMBERS * 4 % (GROUPS / 2) == 0, "warps hold two adjacent groups, in whole rows");
static_assert((TILE_ROWS - 1) * STRIDE_H + (FILTER_HEIGHT - 1) * DILATION_H < WINDOW_ROWS, "the window holds a tile");
static_assert((TILE_COLUMNS - 1) * STRIDE_W + (FILTER_WIDTH - 1) * DILATION_W + SHIFT < WINDOW_COLUMNS, "likewise");
static_assert(COLUMN_TAPS == 1 || (COLUMN_TAPS == FILTER_HEIGHT && DILATION_H == 1), "taps share adjacent rows");
static_assert(PARTS % 2 == 0 || (PARTS == 1 && CHUNKS == 1), "the two sets of rows alternate from part to part");
static_assert(!POOLED || (BLOCKS % 2 == 0 && PHASES_H * PHASES_W == 1), "a lane has both rows of a window");
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

// Position of a lane's pixels: of block `block`, the rows lane / 4 and lane / 4 + 8 of its warp. The two groups of a
// warp are adjacent, and its blocks are stacked vertically.
struct Pixels {
    const int warp, lane;  // of those that share the tile

    __device__ __forceinline__ Pixels() : warp(threadIdx.x / 32 % (MEMBERS * 4)), lane(threadIdx.x % 32) {}
    __device__ __forceinline__ int row(int block) const { return warp / (GROUPS / 2) * BLOCKS + block; }
    __device__ __forceinline__ int column(int half) const {
        return (warp % (GROUPS / 2) * 2 + half) * 8 + lane / 4;
    }
    // Byte offset in a window, of channel lane % 4 and block 0.
    __device__ __forceinline__ u32 offset(int half) const {
        return lane % 4 * PLANE_BYTES
               + (row(0) * STRIDE_H * WINDOW_COLUMNS + column(half) * STRIDE_W + SHIFT) * 4;
    }
};

using Rows = u32[PART_STEPS][LOADED][4];  // of A, as an MMA takes them

__device__ __forceinline__ void load_rows(Rows& rows, const u32 (&at)[2], int part) {
#pragma unroll
    for (int step = 0; step < PART_STEPS; ++step)
#pragma unroll
        for (int row = 0; row < LOADED; ++row)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int channel = (part * PART_STEPS + step) * 8 + i / 2 * 4;
                const int offset = channel * PLANE_BYTES + row * LOADED_STEP * WINDOW_COLUMNS * 4;
                rows[step][row][i] = __float_as_uint(load_shared(at[i % 2] + offset));
            }
}

// A stage of packed weights: [COLUMN_TAPS][PART_STEPS * 2][WGMMA_N][4].
__device__ __forceinline__ void multiply_rows(Accumulators& acc, const Rows& rows, u32 weights, bool begun) {
    wgmma_fence();
#pragma unroll
    for (int r = 0; r < COLUMN_TAPS; ++r)
#pragma unroll
        for (int step = 0; step < PART_STEPS; ++step) {
            const u64 columns =
                overlapping_descriptor(weights + (r * PART_STEPS + step) * 2 * WGMMA_N * 16, WGMMA_N * 16, 128);
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                const int row = COLUMN_TAPS > 1 ? block * STRIDE_H + r : block;
                wgmma_tf32_from_registers(acc[block], rows[step][row], columns, begun || r || step);
            }
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

// Rows of a part are loaded while the MMAs of the part before it run. Once its own are issued and only they are
// pending, the stages before it are free.
__device__ __forceinline__ void multiply_chunk(Accumulators& acc, Rows (&rows)[2], const u32 (&pixels)[2],
                                               Windows& windows, WeightReader& weights, int chunk) {
    windows.wait_full();
#pragma unroll UNROLLED_GROUPS
    for (int group = 0; group < ROW_GROUPS; ++group) {
#pragma unroll UNROLLED_TAPS
        for (int s = 0; s < FILTER_WIDTH; ++s) {
            const u32 window = windows.address() + (group * DILATION_H * WINDOW_COLUMNS + s * DILATION_W) * 4;
            const u32 at[2] = {window + pixels[0], window + pixels[1]};
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const bool begins_chunk = group == 0 && s == 0 && part == 0, begins_tile = begins_chunk && chunk == 0;
                Rows& own = rows[PARTS > 1 ? part % 2 : (group * FILTER_WIDTH + s) % 2];
                load_rows(own, at, part);
                weights.ring.wait_full();
                multiply_rows(acc, own, weights.ring.address(), !begins_tile);
                wgmma_wait<1>();
                if (!begins_tile) weights.release_previous();
                if (begins_chunk && chunk) windows.release((windows.stage + STAGES - 1) % STAGES);
                weights.ring.next();
            }
        }
    }
    windows.next();
}

__device__ __forceinline__ void multiply_tile(Accumulators& acc, const u32 (&pixels)[2], Windows& windows,
                                              WeightReader& weights, const PingPong& ping_pong) {
    Rows rows[2];
    weights.begin_tile();
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; ++chunk) multiply_chunk(acc, rows, pixels, windows, weights, chunk);
    if (PING_PONG) ping_pong.pass();
    wgmma_wait<0>();
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) hold(acc[block]);
    weights.release_previous();
    windows.release((windows.stage + STAGES - 1) % STAGES);
}

// ------------------------------------------------------------------ epilogue

struct Result {  // the planes of y
    int height, width, offset_h, offset_w;
};

struct Vectors {  // of the activation, per filter
    const float *a, *b;
};

__device__ __forceinline__ float combined(float a, float b) { return MEAN ? a + b : max_nan(a, b); }

// The maximum or mean of two rows of pixels in both halves of a warp's columns, and of adjacent columns, which are lane
// % 8 < 4 and the four lanes after it: lanes of even columns receive the first half's, the others the second's.
__device__ __forceinline__ float pooled(float2 upper, float2 lower, bool is_odd) {
    const float first = combined(upper.x, lower.x), second = combined(upper.y, lower.y);
    const float both = combined(is_odd ? second : first, __shfl_xor_sync(ALL_LANES, is_odd ? first : second, 4));
    return MEAN ? 0.25f * both : both;
}

// Stores a tile. Eight lanes store adjacent pixels of one filter. Two warps per scheduler hide no latency, so nothing
// branches, addresses are a constant number of planes apart, and operands are loaded one filter ahead.
struct TileStore {
    static constexpr int PHASES = PHASES_H * PHASES_W, PLANES = FILTERS / PHASES;
    static constexpr int SIDE = POOLED ? 2 : 1;          // of the pixels that are pooled
    static constexpr bool IS_REGULAR = 8 % PHASES == 0;  // the filters of all steps have the same two phases

    struct Place {
        int plane, row, column;  // of y, for the tile's first pixel
        long long start;         // its offset
    };

    struct Operands {
        float bias, a, b, aux[BLOCKS][2];
    };

    const Pixels& pixels;
    const Finish& finish;
    const Vectors& vectors;
    const Result& result;
    const Work::Tile tile;
    Output* const y;
    const int filter, plane;  // of the lane's first filter, and size of a plane
    const Place first[2];
    int at[BLOCKS][2];  // pixels, from `start` on

    __device__ __forceinline__ TileStore(const Pixels& pixels, const Finish& finish, const Vectors& vectors,
                                         const Result& result, const Work::Tile& tile, int first_filter, Output* y)
        : pixels(pixels), finish(finish), vectors(vectors), result(result), tile(tile), y(y),
          filter(first_filter + pixels.lane % 4 * 2), plane(result.height * result.width),
          first{place_of(filter), place_of(filter + 1)} {
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                at[block][half] =
                    pixels.row(block) * PHASES_H / SIDE * result.width + pixels.column(half) * PHASES_W / SIDE;
    }

    // Filters NUMBER and on. A template, because the compiler does not unroll a loop this long, and would index the
    // accumulators in local memory.
    template <int NUMBER = 0>
    __device__ __forceinline__ void store(const Accumulators& acc, const Operands& own) const {
        constexpr int NEXT = NUMBER + 1;
        Operands next{};
        if constexpr (NEXT < WGMMA_N / 4) next = load(NEXT / 2, NEXT % 2);
        const Place to = place(NUMBER / 2, NUMBER % 2);
#pragma unroll
        for (int block = 0; block < BLOCKS; block += SIDE) {
            const float2 both = results<NUMBER>(acc[block], own, block);
            if constexpr (POOLED) {
                const bool is_odd = pixels.lane / 4 % 2;
                const float one = pooled(both, results<NUMBER>(acc[block + 1], own, block + 1), is_odd);
                store_if(is_odd ? is_result(to, block, 1) : is_result(to, block, 0), y + to.start,
                         is_odd ? at[block][1] : at[block][0], one);
            } else {
                store_if(is_result(to, block, 0), y + to.start, at[block][0], both.x);
                store_if(is_result(to, block, 1), y + to.start, at[block][1], both.y);
            }
        }
        if constexpr (NEXT < WGMMA_N / 4) store<NEXT>(acc, next);
    }

    __device__ __forceinline__ Operands load(int step, int e) const {
        Operands loaded{};
        const Place from = place(step, e);
        const int k = FILTERS_ALIGNED ? from.plane : min(from.plane, PLANES - 1);
        // __ldg: a plain load could not move ahead of the stores to y.
        if (HAS_BIAS) loaded.bias = to_float(__ldg(finish.bias + k));
        if (HAS_A) loaded.a = __ldg(vectors.a + k);
        if (HAS_B) loaded.b = __ldg(vectors.b + k);
        if (HAS_AUX)
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    loaded.aux[block][half] =
                        load_if(is_result(from, block, half), finish.residual + from.start, at[block][half]);
        return loaded;
    }

private:
    template <int NUMBER>
    __device__ __forceinline__ float2 results(const float (&sums)[WGMMA_N / 2], const Operands& own, int block) const {
        constexpr int AT = 4 * (NUMBER / 2) + NUMBER % 2;
        const FilterPair pair{make_float2(own.bias, own.bias), make_float2(1.f, 1.f), make_float2(own.a, own.a),
                              make_float2(own.b, own.b)};
        return finish.values(make_float2(sums[AT], sums[AT + 2]), pair,
                             make_float2(own.aux[block][0], own.aux[block][1]));
    }

    __device__ __forceinline__ Place place_of(int filter) const {
        const Phase phase = phase_of(filter);
        const int row = tile.row * PHASES_H - result.offset_h + phase.row;
        const int column = tile.column * PHASES_W - result.offset_w + phase.column;
        const long long start = (1LL * tile.image * PLANES + phase.plane) * plane;
        return {phase.plane, row, column, start + row / SIDE * result.width + column / SIDE};
    }

    __device__ __forceinline__ Place place(int step, int e) const {
        if (!IS_REGULAR) return place_of(filter + step * 8 + e);
        const int more = step * (8 / PHASES);
        return {first[e].plane + more, first[e].row, first[e].column, first[e].start + 1LL * more * plane};
    }

    __device__ __forceinline__ bool is_result(const Place& place, int block, int half) const {
        const int row = (place.row + pixels.row(block) * PHASES_H) / SIDE;
        const int column = (place.column + pixels.column(half) * PHASES_W) / SIDE;
        return (FILTERS_ALIGNED || place.plane < PLANES) && u32(row) < u32(result.height)  // as unsigned: nor negative
               && u32(column) < u32(result.width);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv2d_sm90_planes(const __grid_constant__ TensorMap window_map, const __grid_constant__ TensorMap weight_map,
                       const Bias* __restrict__ bias, const Element* __restrict__ aux,
                       const float* __restrict__ a, const float* __restrict__ b, Output* __restrict__ y,
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
        const u32 offsets[2] = {pixels.offset(0), pixels.offset(1)};
        const Finish finish{bias, nullptr, nullptr, aux, FILTERS};
        const Vectors vectors{a, b};
        Windows windows = memory.windows(team);
        WeightReader weights{memory.weights(team)};
        PingPong ping_pong(memory.turns(), consumer);
        wait_for_previous_launch();
        for (int index = work.first; index < work.tiles; index += work.step) {
            Accumulators acc;
            if (PING_PONG) ping_pong.wait();
            multiply_tile(acc, offsets, windows, weights, ping_pong);
            const TileStore tile(pixels, finish, vectors, result, work.tile(index), work.filter_tile * WGMMA_N, y);
            tile.store(acc, tile.load(0, 0));
        }
    }
}
