// parts[part][k][r][s] = sum over the part's pixels p of gradient[p][k] * x[window(p, r, s)][k]; for the bias, of
// gradient[p][k] alone
//
// Depthwise, NHWC. A CTA owns BLOCK_CHANNELS channels of every step-th tile of the output. Asynchronous copies bring the
// gradients of a tile and the inputs that they meet, zeros outside the image, STAGES tiles ahead: bytes in flight need no
// registers. A thread owns two channels of a segment of an output row, and walks along it with the inputs of all taps in registers, so
// that it reads an input once per filter row. Sums of all taps stay in registers from tile to tile. At the end, the sums
// of threads with the same channels are added up in smem, in a fixed order.
// Limiter: memory for 3x3; instruction issue for larger filters.
//
// Rung              switches
//   depthwise_staged
//   depthwise_tile  BY_TMA
#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;             // problem.dtype
constexpr bool HAS_BIAS = true;    // problem.bias
constexpr int CHANNELS = 8;        // forward.channels
constexpr int HEIGHT = 5;          // forward.height
constexpr int WIDTH = 10;          // forward.width
constexpr int FILTER_HEIGHT = 3;   // forward.filter_height
constexpr int FILTER_WIDTH = 3;    // forward.filter_width
constexpr int STRIDE_H = 1;        // forward.stride[0]
constexpr int STRIDE_W = 1;        // forward.stride[1]
constexpr int PAD_H = 1;           // forward.padding[0]
constexpr int PAD_W = 1;           // forward.padding[1]
constexpr int OUTPUT_HEIGHT = 5;   // forward.output_height
constexpr int OUTPUT_WIDTH = 10;   // forward.output_width
constexpr int BLOCK_CHANNELS = 8;  // config.channels: channels per CTA
constexpr int SEGMENT = 5;         // config.segment: output columns per thread
constexpr int SEGMENTS = 2;        // config.segments: per row of a tile
constexpr int TILE_ROWS = 4;       // config.rows: output rows per tile
constexpr int STAGES = 2;          // config.stages: tiles in shared memory
constexpr int TILES_DOWN = 2;      // tiling.grid[0]
constexpr int TILES_ACROSS = 1;    // tiling.grid[1]
constexpr int THREADS = 32;        // tiling.threads
constexpr int BLOCKS_PER_SM = 1;   // config.blocks_per_sm
#endif

#include "common/elements.cuh"
#include "common/hopper.cuh"

constexpr int LANES = BLOCK_CHANNELS / 2;
constexpr int GROUPS = TILE_ROWS * SEGMENTS;  // threads with the same channels
constexpr int TILE_COLUMNS = SEGMENT * SEGMENTS;
constexpr int WINDOW_HEIGHT = (TILE_ROWS - 1) * STRIDE_H + FILTER_HEIGHT;
constexpr int WINDOW_WIDTH = (TILE_COLUMNS - 1) * STRIDE_W + FILTER_WIDTH;
constexpr int WINDOW_BYTES = WINDOW_HEIGHT * WINDOW_WIDTH * BLOCK_CHANNELS * sizeof(Element);
constexpr int GRADIENT_BYTES = TILE_ROWS * TILE_COLUMNS * BLOCK_CHANNELS * sizeof(Element);
constexpr int GRADIENT_AT = (WINDOW_BYTES + 127) / 128 * 128;  // in a stage, behind the window
constexpr int STAGE_BYTES = GRADIENT_AT + (GRADIENT_BYTES + 127) / 128 * 128;
constexpr int CHANNEL_BLOCKS = (CHANNELS + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS;
constexpr int TAPS = FILTER_HEIGHT * FILTER_WIDTH;
constexpr int SUMS = TAPS + HAS_BIAS;  // per channel
constexpr int SCRATCH_BYTES = GROUPS * SUMS * LANES * sizeof(float2);  // instead of the stages, at the end
constexpr int BARRIERS_AT = STAGES * STAGE_BYTES > SCRATCH_BYTES ? STAGES * STAGE_BYTES : SCRATCH_BYTES;
static_assert(LANES * GROUPS <= THREADS, "one thread per segment and pair of channels");

struct Tile {
    int image, row, column;  // of its first output

    __device__ __forceinline__ explicit Tile(int index)
        : image(index / (TILES_ACROSS * TILES_DOWN)), row(index / TILES_ACROSS % TILES_DOWN * TILE_ROWS),
          column(index % TILES_ACROSS * TILE_COLUMNS) {}
};

// Copies a tile into a stage: `load` issues them, `wait` waits for the oldest stage of all. Called by all threads.
#ifdef BY_TMA
struct Copies {
    const TensorMap &x, &gradient;
    u32 stages, full;  // of each stage, its barrier

    __device__ __forceinline__ void begin() const {
        if (threadIdx.x) return;
        for (int i = 0; i < STAGES; ++i) barrier_init(full + 8 * i, 1);
        fence_barrier_init();
        prefetch_map(x);
        prefetch_map(gradient);
    }
    __device__ __forceinline__ void load(int stage, const Tile& tile, bool exists, int channel) const {
        if (threadIdx.x || !exists) return;
        const u32 to = stages + stage * STAGE_BYTES, barrier = full + 8 * stage;
        barrier_expect(barrier, WINDOW_BYTES + GRADIENT_BYTES);
        tma_load_4d(to, x, barrier, channel, tile.column * STRIDE_W - PAD_W, tile.row * STRIDE_H - PAD_H, tile.image);
        tma_load_4d(to + GRADIENT_AT, gradient, barrier, channel, tile.column, tile.row, tile.image);
    }
    __device__ __forceinline__ void wait(int stage, u32 parity) const { barrier_wait(full + 8 * stage, parity); }
};
#else
struct Copies {
    static constexpr int ROW_BYTES = CHANNELS * sizeof(Element);
    static constexpr int BYTES = ROW_BYTES % 16 == 0 ? 16 : ROW_BYTES % 8 == 0 ? 8 : 4;  // per copy
    static constexpr int UNIT = BYTES / sizeof(Element), UNITS = BLOCK_CHANNELS / UNIT;
    const Element *x, *gradient;
    u32 stages;

    __device__ __forceinline__ void begin() const {}
    __device__ __forceinline__ void load(int stage, const Tile& tile, bool exists, int channel) const {
        const u32 to = stages + stage * STAGE_BYTES;
        if (exists) {
            copy<WINDOW_HEIGHT, WINDOW_WIDTH, HEIGHT, WIDTH>(to, x, tile.image, tile.row * STRIDE_H - PAD_H,
                                                             tile.column * STRIDE_W - PAD_W, channel);
            copy<TILE_ROWS, TILE_COLUMNS, OUTPUT_HEIGHT, OUTPUT_WIDTH>(to + GRADIENT_AT, gradient, tile.image, tile.row,
                                                                       tile.column, channel);
        }
        copy_async_commit();
    }
    __device__ __forceinline__ void wait(int, u32) const {
        copy_async_wait<STAGES - 1>();
        __syncthreads();
    }

private:
    // A box of ROWS by COLUMNS pixels, whose corner may be outside the image.
    template <int ROWS, int COLUMNS, int IMAGE_HEIGHT, int IMAGE_WIDTH>
    __device__ __forceinline__ void copy(u32 to, const Element* from, int image, int first_row, int first_column,
                                         int first_channel) const {
        for (int i = threadIdx.x; i < ROWS * COLUMNS * UNITS; i += THREADS) {
            const int row = first_row + i / (COLUMNS * UNITS), column = first_column + i / UNITS % COLUMNS;
            const int channel = first_channel + i % UNITS * UNIT;
            const bool inside = 0 <= row && row < IMAGE_HEIGHT && 0 <= column && column < IMAGE_WIDTH &&
                                channel < CHANNELS;
            const long long pixel = (1LL * image * IMAGE_HEIGHT + row) * IMAGE_WIDTH + column;
            const Element* at = from + (inside ? pixel * CHANNELS + channel : 0);
            if constexpr (BYTES == 16) copy_async_16(to + i * BYTES, at, inside);
            else if constexpr (BYTES == 8) copy_async_8(to + i * BYTES, at, inside);
            else copy_async_4(to + i * BYTES, at, inside);
        }
    }
};
#endif

__device__ __forceinline__ float2 two_at(const Element* address) {
    const Pack<Element, 2> pair = load_pack<Element, 2>(address);
    return make_float2(to_float(pair.at[0]), to_float(pair.at[1]));
}

// Both point to the thread's first channel, of the segment's first gradient and of the first tap of its window. The image
// ends after `columns`: zeros beside it would turn an infinite input into NaN.
__device__ __forceinline__ void multiply_add(float2 (&sums)[SUMS], const Element* x, const Element* gradient,
                                             int columns) {
    float2 window[FILTER_HEIGHT][FILTER_WIDTH];
#pragma unroll
    for (int column = 0; column < SEGMENT; ++column) {
        if (OUTPUT_WIDTH % TILE_COLUMNS && column >= columns) break;
        const float2 g = two_at(gradient + column * BLOCK_CHANNELS);
        if (HAS_BIAS) sums[SUMS - 1].x += g.x, sums[SUMS - 1].y += g.y;
#pragma unroll
        for (int r = 0; r < FILTER_HEIGHT; ++r)
#pragma unroll
            for (int s = 0; s < FILTER_WIDTH; ++s) {
                float2& input = window[r][s];
                if (column > 0 && s + STRIDE_W < FILTER_WIDTH) input = window[r][s + STRIDE_W];
                else input = two_at(x + (r * WINDOW_WIDTH + column * STRIDE_W + s) * BLOCK_CHANNELS);
                float2& sum = sums[r * FILTER_WIDTH + s];
                sum.x += g.x * input.x, sum.y += g.y * input.y;
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
#ifdef BY_TMA
    conv2d_weight_gradient_depthwise_tile(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap gradients,
                                          float* __restrict__ parts, int tiles) {
#else
    conv2d_weight_gradient_depthwise_tile(const Element* x, const Element* gradients, float* __restrict__ parts,
                                          int tiles) {
#endif
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Element* const stages =
        shared_part(reinterpret_cast<Element*>(shared_memory), STAGES * STAGE_BYTES / sizeof(Element));
#ifdef BY_TMA
    const Copies copies{x, gradients, shared_address(stages),
                        shared_address(shared_part(reinterpret_cast<u64*>(shared_memory + BARRIERS_AT), STAGES))};
#else
    const Copies copies{x, gradients, shared_address(stages)};
#endif
    const int block_channel = blockIdx.x % CHANNEL_BLOCKS * BLOCK_CHANNELS;
    const int part = blockIdx.x / CHANNEL_BLOCKS, step = gridDim.x / CHANNEL_BLOCKS;
    copies.begin();
    wait_for_previous_launch();
    for (int i = 0; i < STAGES; ++i) copies.load(i, Tile(part + i * step), part + i * step < tiles, block_channel);
    __syncthreads();

    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const int row = group / SEGMENTS, column = group % SEGMENTS * SEGMENT;
    const bool works = group < GROUPS;
    const int window = (row * STRIDE_H * WINDOW_WIDTH + column * STRIDE_W) * BLOCK_CHANNELS + lane * 2;
    const int gradient = GRADIENT_AT / int(sizeof(Element)) + (row * TILE_COLUMNS + column) * BLOCK_CHANNELS + lane * 2;
    float2 sums[SUMS] = {};
    int stage = 0;
    u32 parity = 0;
#pragma unroll 1
    for (int index = part; index < tiles; index += step) {
        const Element* const from = stages + stage * (STAGE_BYTES / sizeof(Element));
        const Tile tile(index);
        copies.wait(stage, parity);
        if (works && (OUTPUT_HEIGHT % TILE_ROWS == 0 || tile.row + row < OUTPUT_HEIGHT))
            multiply_add(sums, from + window, from + gradient, OUTPUT_WIDTH - tile.column - column);
        __syncthreads();  // all have read the stage
        const int next = index + STAGES * step;
        copies.load(stage, Tile(next), next < tiles, block_channel);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }

    float2* const scratch = shared_part(reinterpret_cast<float2*>(shared_memory), GROUPS * SUMS * LANES);
    if (works) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) scratch[(group * SUMS + i) * LANES + lane] = sums[i];
    }
    __syncthreads();
    float* const own = parts + 1LL * part * CHANNELS * SUMS;
    for (int i = threadIdx.x; i < SUMS * LANES; i += THREADS) {
        const int channel = block_channel + i % LANES * 2, tap = i / LANES;
        if (channel >= CHANNELS) continue;
        float2 total = scratch[i];
#pragma unroll 4
        for (int other = 1; other < GROUPS; ++other) {
            const float2 added = scratch[other * SUMS * LANES + i];
            total.x += added.x, total.y += added.y;
        }
        if (HAS_BIAS && tap == TAPS) {
            own[CHANNELS * TAPS + channel] = total.x;
            own[CHANNELS * TAPS + channel + 1] = total.y;
        } else {
            own[channel * TAPS + tap] = total.x;
            own[(channel + 1) * TAPS + tap] = total.y;
        }
    }
}
