// y[n][oh][ow][c] = activated(sum over r, s of x[n][oh + r*dilation - pad][ow + s*dilation - pad][c] * w[c][r][s] +
// bias[c])
//
// Depthwise convolution on tensor cores: NHWC, 16 bits, stride 1. For one channel and one filter row, 8 adjacent
// outputs are the product of 16 inputs with a band matrix, B[input][output] = w[r][(input - output) / dilation], which
// each lane builds from its channel's weights once per launch. The rows of the other operand are 16 strips: ROWS rows
// of 8 outputs each, anywhere in the tile. A strip's inputs are read once for all filter rows. Both operands need
// planes, where a channel's pixels are contiguous: TMA loads a window with channels contiguous, as in global memory,
// and ldmatrix transposes it. Results leave by TMA.
// A zero of the band times a NaN or infinity beside the filter's taps is NaN, so every NaN result is recomputed.
// Limiter: smem bandwidth, about a quarter of a clock per output.
//
// Rung: `depthwise_mma`. conv2d_input_gradient launches it over a gradient, with flipped filters.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = __half;                // problem.dtype
constexpr int CHANNELS = 8;            // problem.channels
constexpr int CHANNEL_BLOCKS = 1;      // tiling.channel_blocks
constexpr int FILTER_HEIGHT = 5;       // problem.filter_height
constexpr int FILTER_WIDTH = 5;        // problem.filter_width
constexpr int DILATION_H = 1;          // problem.dilation[0]
constexpr int DILATION_W = 1;          // problem.dilation[1]
constexpr int PAD_H = 2;               // problem.padding[0]
constexpr int PAD_W = 2;               // problem.padding[1]
constexpr int CHANNELS_OF_BLOCK = 16;  // config.channels: channels per CTA
constexpr int TOGETHER = 4;            // together
constexpr int ROWS = 1;                // config.rows: output rows per strip
constexpr int TILE_IMAGES = 1;         // config.images: images per tile
constexpr int TILE_ROWS = 1;           // config.tile_rows
constexpr int TILE_COLUMNS = 8;        // config.tile_columns
constexpr int TILES_DOWN = 10;         // tiling.grid[0]
constexpr int TILES_ACROSS = 2;        // tiling.grid[1]
constexpr int THREADS = 256;           // threads
constexpr int BLOCKS_PER_SM = 3;       // config.blocks_per_sm
constexpr bool HAS_BIAS = true;        // problem.bias
constexpr bool HAS_RELU = false;       // problem.relu
#endif

#include "common/epilogue.cuh"
#include "common/hopper.cuh"
#include "common/mma_tile.cuh"

constexpr int BLOCK = 8, DEPTH = 16;  // outputs and inputs of one MMA
constexpr int PIXEL_BYTES = CHANNELS_OF_BLOCK * 2;
constexpr int CHUNKS = PIXEL_BYTES / 16;
constexpr int WINDOW_HEIGHT = TILE_ROWS + (FILTER_HEIGHT - 1) * DILATION_H;
constexpr int WINDOW_WIDTH = TILE_COLUMNS + DEPTH - BLOCK;
constexpr int WINDOW_BYTES = TILE_IMAGES * WINDOW_HEIGHT * WINDOW_WIDTH * PIXEL_BYTES;
constexpr int STAGE_BYTES = (WINDOW_BYTES + 1023) / 1024 * 1024;
constexpr int OUTPUT_BYTES = (TILE_IMAGES * TILE_ROWS * TILE_COLUMNS * PIXEL_BYTES + 1023) / 1024 * 1024;
constexpr int SEGMENTS = TILE_ROWS / ROWS, ACROSS = TILE_COLUMNS / BLOCK;
constexpr int STRIPS = TILE_IMAGES * SEGMENTS * ACROSS, GROUPS = (STRIPS + 15) / 16;
constexpr int INPUT_ROWS = ROWS + (FILTER_HEIGHT - 1) * DILATION_H;
// A plane in octets of pixels, 16 bytes each. Segments and planes are an odd number of octets apart, so that eight of
// either cover all banks.
constexpr int ROW_OCTETS = WINDOW_WIDTH / 8, GAP = ROWS * ROW_OCTETS % 2 ? 0 : 1;
__device__ __forceinline__ constexpr int octets_above(int row) { return row * ROW_OCTETS + row / ROWS * GAP; }
constexpr int IMAGE_OCTETS = octets_above(WINDOW_HEIGHT);
constexpr int PLANE_BYTES = (TILE_IMAGES * IMAGE_OCTETS | 1) * 16;
constexpr int OCTETS = TILE_IMAGES * WINDOW_HEIGHT * ROW_OCTETS;  // per window
constexpr int PARTS = CHANNELS_OF_BLOCK / TOGETHER;               // channel groups, one per warp
constexpr int WARPS = THREADS / 32, SHARES = WARPS / PARTS;  // warps that share the strip groups of the same channels
constexpr int TAPS = FILTER_HEIGHT * FILTER_WIDTH, TAP_PITCH = FILTER_WIDTH + 1;  // each filter row ends with a zero
constexpr int BIAS_AT = STAGE_BYTES + OUTPUT_BYTES + CHANNELS_OF_BLOCK * PLANE_BYTES;  // smem offset
constexpr int TAPS_AT = BIAS_AT + CHANNELS_OF_BLOCK * 4;
constexpr int BARRIER = TAPS_AT + (CHANNELS_OF_BLOCK * FILTER_HEIGHT * TAP_PITCH * 2 + 7) / 8 * 8;
static_assert(WARPS % PARTS == 0 && TILE_ROWS % ROWS == 0 && TILE_COLUMNS % BLOCK == 0, "whole warps and strips");
static_assert(TOGETHER == 4, "channels that are stored as 8 bytes");
static_assert(BLOCK + (FILTER_WIDTH - 1) * DILATION_W <= DEPTH, "an MMA covers all taps");

struct Tile {
    int image, row, column;  // of its first output

    __device__ __forceinline__ explicit Tile(u32 index)
        : image(index / (TILES_ACROSS * TILES_DOWN) * TILE_IMAGES),
          row(index / TILES_ACROSS % TILES_DOWN * TILE_ROWS), column(index % TILES_ACROSS * TILE_COLUMNS) {}
};

__device__ __forceinline__ void load_window(u32 stage, const TensorMap& map, u32 full, const Tile& tile, int channel) {
    barrier_expect(full, WINDOW_BYTES);
    tma_load_4d(stage, map, full, channel, tile.column - PAD_W, tile.row - PAD_H, tile.image);
}

// Transposes a window from channels-contiguous to planes: four octets of pixels at a time, eight channels per ldmatrix.
__device__ __forceinline__ void transpose_window(u32 stage, unsigned char* planes) {
    const int lane = thread_number() % 32;
    for (int first = thread_number() / 32 * 4; first < OCTETS; first += WARPS * 4) {
        const int pixel = min(first + lane / 8, OCTETS - 1) * 8 + lane % 8;
        unsigned char* to[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 octet = first + i, row = octet / ROW_OCTETS;
            to[i] = planes + lane / 4 * PLANE_BYTES + lane % 4 * 4 +
                    (row / WINDOW_HEIGHT * IMAGE_OCTETS + octets_above(row % WINDOW_HEIGHT) + octet % ROW_OCTETS) * 16;
        }
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            u32 transposed[4];
            load_matrices_transposed(transposed, stage + swizzled<PIXEL_BYTES>(pixel, chunk * 16));
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (OCTETS % 4 == 0 || first + i < OCTETS)
                    *reinterpret_cast<u32*>(to[i] + chunk * 8 * PLANE_BYTES) = transposed[i];
        }
    }
}

// Weights of the CTA's channels, with a zero after every filter row, and their biases.
__device__ __forceinline__ void load_weights(Element* taps, float* biases, const Element* weight, const Element* bias,
                                             int channel) {
    for (int i = threadIdx.x; i < CHANNELS_OF_BLOCK; i += THREADS)
        biases[i] = HAS_BIAS && channel + i < CHANNELS ? to_float(bias[channel + i]) : 0.f;
    for (int i = threadIdx.x; i < CHANNELS_OF_BLOCK * FILTER_HEIGHT * TAP_PITCH; i += THREADS) {
        const int row = i / TAP_PITCH, s = i % TAP_PITCH;
        const bool is_tap = s < FILTER_WIDTH && channel + row / FILTER_HEIGHT < CHANNELS;
        taps[i] = is_tap ? weight[1LL * channel * TAPS + row * FILTER_WIDTH + s] : from_float<Element>(0.f);
    }
}

// A lane's fragments of the band matrices of its warp's channels.
__device__ __forceinline__ void make_bands(u32 (&bands)[TOGETHER][FILTER_HEIGHT][2], const Element* taps) {
    const int lane = threadIdx.x % 32;
    int tap[2][2];  // at this lane's positions in the matrix
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int reach = lane % 4 * 2 + e + half * 8 - lane / 4;
            const bool is_tap = reach >= 0 && reach % DILATION_W == 0 && reach / DILATION_W < FILTER_WIDTH;
            tap[half][e] = is_tap ? reach / DILATION_W : FILTER_WIDTH;
        }
    const u16* const words = reinterpret_cast<const u16*>(taps);
#pragma unroll
    for (int c = 0; c < TOGETHER; ++c)
#pragma unroll
        for (int r = 0; r < FILTER_HEIGHT; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u16* const row = words + (c * FILTER_HEIGHT + r) * TAP_PITCH;
                bands[c][r][half] = row[tap[half][0]] | static_cast<u32>(row[tap[half][1]]) << 16;
            }
}

struct Strip {
    int image, segment, block;

    __device__ __forceinline__ explicit Strip(u32 index)
        : image(index / (SEGMENTS * ACROSS)), segment(index / ACROSS % SEGMENTS), block(index % ACROSS) {}
    __device__ __forceinline__ int octet() const {  // of its first input
        return image * IMAGE_OCTETS + octets_above(segment * ROWS) + block;
    }
    __device__ __forceinline__ int output() const {  // first output in the tile
        return (image * TILE_ROWS + segment * ROWS) * TILE_COLUMNS + block * BLOCK;
    }
};

// Addresses of a lane's outputs: 2 columns of two strips. Lanes of every other strip begin with the second column,
// because the first columns of all strips share half of the banks. Rows are multiples of 8 pixels, the period of the
// swizzle.
struct Outputs {
    u32 at[2][2];
    bool exists[2];
    bool second_first;

    __device__ __forceinline__ Outputs(u32 group, int channel) {
        const u32 lane = thread_number() % 32;
        second_first = lane / 4 % 2;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 index = group * 16 + lane / 4 + i * 8;
            exists[i] = STRIPS % 16 == 0 || index < STRIPS;
#pragma unroll
            for (int e = 0; e < 2; ++e)
                at[i][e] = swizzled<PIXEL_BYTES>(Strip(index).output() + lane % 4 * 2 + (e ^ second_first), channel * 2);
        }
    }
};

// Epilogue of one row of a lane's outputs, stored to the tile that TMA writes out.
__device__ __forceinline__ void stage_row(const float (&acc)[TOGETHER][4], int row, const Outputs& to,
                                          unsigned char* outputs) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        u32 words[2][TOGETHER / 2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            Pack<Element, TOGETHER> finished;
#pragma unroll
            for (int c = 0; c < TOGETHER; ++c)
                finished.at[c] = from_float<Element>(activated<HAS_RELU>(acc[c][i * 2 + e]));
            memcpy(words[e], &finished, sizeof finished);
        }
        if (!to.exists[i]) continue;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const uint2 value = make_uint2(to.second_first ? words[1 - e][0] : words[e][0],
                                           to.second_first ? words[1 - e][1] : words[e][1]);
            *reinterpret_cast<uint2*>(outputs + to.at[i][e] + row * TILE_COLUMNS * PIXEL_BYTES) = value;
        }
    }
}

// First channel of a warp, within the CTA's.
__device__ __forceinline__ int channel_of(int thread) { return thread / 32 % PARTS * TOGETHER; }

// Recomputes a lane's NaN outputs. Everything is derived anew, so the common path keeps no registers for it.
__device__ __forceinline__ void recompute_nans(u32 group, const unsigned char* planes, const Element* taps,
                                               const float* biases, unsigned char* outputs) {
    const u32 lane = thread_number() % 32;
    const int channel = channel_of(thread_number());
#pragma unroll 1
    for (int i = 0; i < ROWS * 4 * TOGETHER; ++i) {
        const int c = channel + i % TOGETHER, e = i / TOGETHER % 4, row = i / TOGETHER / 4;
        const int column = lane % 4 * 2 + e % 2;
        const u32 index = group * 16 + lane / 4 + e / 2 * 8;
        if (index >= STRIPS) continue;
        const Strip strip(index);
        const u32 at = swizzled<PIXEL_BYTES>(strip.output() + row * TILE_COLUMNS + column, c * 2);
        Element& output = *reinterpret_cast<Element*>(outputs + at);
        if (to_float(output) == to_float(output)) continue;
        const Element* const inputs = reinterpret_cast<const Element*>(planes + c * PLANE_BYTES + strip.octet() * 16);
        float sum = biases[c];
#pragma unroll 1
        for (int r = 0; r < FILTER_HEIGHT; ++r)
#pragma unroll 1
            for (int s = 0; s < FILTER_WIDTH; ++s)
                sum += to_float(inputs[octets_above(row + r * DILATION_H) * 8 + column + s * DILATION_W]) *
                       to_float(taps[(c * FILTER_HEIGHT + r) * TAP_PITCH + s]);
        output = from_float<Element>(activated<HAS_RELU>(sum));
    }
}

// Products of 16 strips for TOGETHER channels: down the input rows, each for all filter rows.
__device__ __forceinline__ void multiply_group(u32 group, const u32 (&bands)[TOGETHER][FILTER_HEIGHT][2],
                                               const unsigned char* planes, const Element* taps, const float* biases,
                                               unsigned char* outputs) {
    const u32 lane = thread_number() % 32;
    const int channel = channel_of(thread_number());
    const Strip strip(min(group * 16 + lane % 16, static_cast<u32>(STRIPS - 1)));
    const u32 first = shared_address(planes) + channel * PLANE_BYTES + (strip.octet() + lane / 16) * 16;
    const Outputs to(group, channel);
    float acc[ROWS][TOGETHER][4], total = 0.f;
#pragma unroll
    for (int i = 0; i < INPUT_ROWS; ++i) {
#pragma unroll
        for (int c = 0; c < TOGETHER; ++c) {
            u32 a[4];
            load_matrices(a, first + c * PLANE_BYTES + octets_above(i) * 16);
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const int reach = i - row;
                if (reach < 0 || reach % DILATION_H || reach / DILATION_H >= FILTER_HEIGHT) continue;
                if (reach == 0) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) acc[row][c][e] = HAS_BIAS ? biases[channel + c] : 0.f;
                }
                multiply_add<Element>(acc[row][c], a, bands[c][reach / DILATION_H]);
            }
        }
        const int complete = i - (FILTER_HEIGHT - 1) * DILATION_H;
        if (complete < 0) continue;
        stage_row(acc[complete], complete, to, outputs);
#pragma unroll
        for (int e = 0; e < TOGETHER * 4; ++e) total += acc[complete][e / 4][e % 4];
    }
    if (total != total) recompute_nans(group, planes, taps, biases, outputs);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    conv2d_depthwise_mma(const __grid_constant__ TensorMap input_map, const __grid_constant__ TensorMap output_map,
                         const Element* weight, const Element* bias, int tiles, int weights_ready) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    unsigned char* const stage = shared_part(shared_memory, STAGE_BYTES);
    unsigned char* const outputs = shared_part(shared_memory + STAGE_BYTES, OUTPUT_BYTES);
    unsigned char* const planes =
        shared_part(shared_memory + STAGE_BYTES + OUTPUT_BYTES, CHANNELS_OF_BLOCK * PLANE_BYTES);
    float* const biases = shared_part(reinterpret_cast<float*>(shared_memory + BIAS_AT), CHANNELS_OF_BLOCK);
    Element* const taps = shared_part(reinterpret_cast<Element*>(shared_memory + TAPS_AT),
                                      CHANNELS_OF_BLOCK * FILTER_HEIGHT * TAP_PITCH);
    u64* const barrier = shared_part(reinterpret_cast<u64*>(shared_memory + BARRIER), 1);
    const u32 full = shared_address(barrier);

    const int block_channel = blockIdx.x % CHANNEL_BLOCKS * CHANNELS_OF_BLOCK;
    const int first = blockIdx.x / CHANNEL_BLOCKS, step = gridDim.x / CHANNEL_BLOCKS;
    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        fence_barrier_init();
        prefetch_map(input_map);
        prefetch_map(output_map);
        wait_for_previous_launch();
        load_window(shared_address(stage), input_map, full, Tile(first), block_channel);
    }
    if (!weights_ready) wait_for_previous_launch();
    load_weights(taps, biases, weight, bias, block_channel);
    wait_for_previous_launch();
    __syncthreads();
    u32 bands[TOGETHER][FILTER_HEIGHT][2];
    make_bands(bands, taps + channel_of(threadIdx.x) * FILTER_HEIGHT * TAP_PITCH);

    u32 parity = 0;
#pragma unroll 1
    for (int index = first; index < tiles; index += step, parity ^= 1) {
        barrier_wait(full, parity);
        transpose_window(shared_address(stage), planes);
        if (threadIdx.x == 0) tma_store_wait_read<0>();
        __syncthreads();  // planes are complete; the stage and the previous outputs have been read
        if (threadIdx.x == 0 && index + step < tiles)
            load_window(shared_address(stage), input_map, full, Tile(index + step), block_channel);
#pragma unroll 1
        for (int group = thread_number() / 32 / PARTS; group < GROUPS; group += SHARES)
            multiply_group(group, bands, planes, taps, biases, outputs);
        fence_async_proxy();
        __syncthreads();
        if (threadIdx.x == 0) {
            const Tile tile(index);
            tma_store_4d(output_map, shared_address(outputs), block_channel, tile.column, tile.row, tile.image);
        }
    }
    if (threadIdx.x == 0) tma_store_wait_read<0>();
}
