// parts[part][k][r][s] = sum over the part's pixels p of gradient[p][k] * x[window(p, r, s)][k]; for the bias, of
// gradient[p][k] alone
//
// Depthwise, NHWC. A CTA owns BLOCK_CHANNELS channels of every step-th tile of the output. TMA brings the gradients of a
// tile and the inputs that they meet, zeros outside the image, STAGES tiles ahead: bytes in flight need no registers. A
// thread owns two channels of a segment of an output row, and walks along it with the inputs of all taps in registers, so
// that it reads an input once per filter row. Sums of all taps stay in registers from tile to tile. At the end, the sums
// of threads with the same channels are added up in smem, in a fixed order.
// Limiter: memory for 3x3; instruction issue for larger filters.
//
// Rung: `depthwise_tile`.
#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;             // problem.dtype
constexpr bool HAS_BIAS = true;    // problem.bias
constexpr int CHANNELS = 8;        // forward.channels
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

__device__ __forceinline__ void load_tile(u32 stage, const TensorMap& x, const TensorMap& gradient, u32 full,
                                          const Tile& tile, int channel) {
    barrier_expect(full, WINDOW_BYTES + GRADIENT_BYTES);
    tma_load_4d(stage, x, full, channel, tile.column * STRIDE_W - PAD_W, tile.row * STRIDE_H - PAD_H, tile.image);
    tma_load_4d(stage + GRADIENT_AT, gradient, full, channel, tile.column, tile.row, tile.image);
}

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
    conv2d_weight_gradient_depthwise_tile(const __grid_constant__ TensorMap x_map,
                                          const __grid_constant__ TensorMap gradient_map, float* __restrict__ parts,
                                          int tiles) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Element* const stages =
        shared_part(reinterpret_cast<Element*>(shared_memory), STAGES * STAGE_BYTES / sizeof(Element));
    const u32 full = shared_address(shared_part(reinterpret_cast<u64*>(shared_memory + BARRIERS_AT), STAGES));
    const int block_channel = blockIdx.x % CHANNEL_BLOCKS * BLOCK_CHANNELS;
    const int part = blockIdx.x / CHANNEL_BLOCKS, step = gridDim.x / CHANNEL_BLOCKS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier_init(full + 8 * i, 1);
        fence_barrier_init();
        prefetch_map(x_map);
        prefetch_map(gradient_map);
        wait_for_previous_launch();
        for (int i = 0; i < STAGES && part + i * step < tiles; ++i)
            load_tile(shared_address(stages) + i * STAGE_BYTES, x_map, gradient_map, full + 8 * i, Tile(part + i * step),
                      block_channel);
    }
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
        barrier_wait(full + 8 * stage, parity);
        if (works && (OUTPUT_HEIGHT % TILE_ROWS == 0 || tile.row + row < OUTPUT_HEIGHT))
            multiply_add(sums, from + window, from + gradient, OUTPUT_WIDTH - tile.column - column);
        __syncthreads();  // all have read the stage
        const int next = index + STAGES * step;
        if (threadIdx.x == 0 && next < tiles)
            load_tile(shared_address(from), x_map, gradient_map, full + 8 * stage, Tile(next), block_channel);
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
