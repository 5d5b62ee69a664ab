// y[pixel][filter] = finish(sum over k of window[pixel][k] * weight[filter][k])      (conv2d/finish.cuh)
//
// For channel counts that 16-byte copies do not divide (the first layer's few, odd numbers anywhere) and for few
// filters. A CTA copies the window of a tile of output pixels to smem, as stored in x or with a GAP after each pixel
// that keeps adjacent pixels in different banks: x needs no padded copy, and each input is read about once. Lanes load
// mma.sync operands from there in units of UNIT elements, which divides every pixel (conv2d/ragged.cuh).
// Weights are packed in fragment order and read through L1. Results leave through smem, reusing the window, because the
// filters of adjacent pixels are contiguous in y whatever their number. PRODUCTS 3: fp32 operands split into two TF32
// parts, as in conv2d/fused_epilogue.cu.
// Limiter: memory; with several taps, smem reads.
//
// Rung: `ragged`.
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                  // problem.dtype
constexpr int CHANNELS = 8;             // problem.channels
constexpr int FILTER_HEIGHT = 3;        // problem.filter_height
constexpr int FILTER_WIDTH = 3;         // problem.filter_width
constexpr int DILATION_W = 1;           // problem.dilation[1]
constexpr int GAP = 8;                  // gap
using Output = float;                   // problem.dtype
using Bias = float;                     // problem.dtype
constexpr int STRIDE_H = 1;             // problem.stride[0]
constexpr int STRIDE_W = 1;             // problem.stride[1]
constexpr int DILATION_H = 1;           // problem.dilation[0]
constexpr int UNIT = 2;                 // unit
constexpr int X_STEP = 8;               // problem.x_pitch or problem.channels
constexpr int Y_STEP = 16;              // problem.y_pitch or problem.filters
constexpr int WARPS = 4;                // warps
constexpr int TILES_M = 1;              // config.tiles_m: 16-pixel blocks per warp
constexpr int TILES_N = 2;              // config.tiles_n: 8-filter blocks per warp
constexpr int TILE_ROWS = 9;            // config.rows
constexpr int TILE_COLUMNS = 1;         // config.columns
constexpr int BLOCKS_PER_SM = 3;        // config.blocks_per_sm
constexpr int PRODUCTS = 3;             // products
constexpr bool FILTERS_ALIGNED = true;  // filters_aligned
constexpr bool FILTERS_EVEN = true;     // problem.filters % 2 == 0
constexpr bool HAS_MASK = false;        // False
constexpr bool HAS_BIAS = false;        // problem.bias
constexpr bool HAS_RESIDUAL = false;    // problem.residual
constexpr bool HAS_RELU = false;        // problem.relu
#endif

#include "common/mma_tile.cuh"
#include "conv2d/finish.cuh"
#include "conv2d/ragged.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int PIXELS = TILE_ROWS * TILE_COLUMNS;
constexpr int WINDOW_ROWS = (TILE_ROWS - 1) * STRIDE_H + (FILTER_HEIGHT - 1) * DILATION_H + 1;
constexpr int WINDOW_COLUMNS = (TILE_COLUMNS - 1) * STRIDE_W + (FILTER_WIDTH - 1) * DILATION_W + 1;
constexpr int PIXEL = CHANNELS + GAP, PITCH = WINDOW_COLUMNS * PIXEL;  // elements between pixels and between rows
constexpr int PROMOTED = 4;  // k-steps between promotions, where operands are split
constexpr int STAGED_PITCH = TILES_N * 8 + (TILES_N % 2 ? 0 : 8);  // four rows written at once avoid bank conflicts
static_assert(PIXELS <= WARPS * TILES_M * 16, "every pixel has a warp");
static_assert(CHANNELS % UNIT == 0 && GAP % UNIT == 0 && LANE % UNIT == 0, "pixels and lanes are whole units");
using Accumulators = float[TILES_M][TILES_N][4];

struct Tile {  // first output pixel
    int image, row, column;
};

__device__ __forceinline__ bool is_between(int value, int end) {
    return static_cast<unsigned>(value) < static_cast<unsigned>(end);  // a negative value wraps to a large one
}

__device__ __forceinline__ void copy_window(Element* window, const Element* __restrict__ x, Tile tile,
                                            const ConvShape& shape) {
    const int first_row = tile.row * STRIDE_H - shape.pad_h, first_column = tile.column * STRIDE_W - shape.pad_w;
    const Element* const corner =
        x + ((1LL * tile.image * shape.height + first_row) * shape.width + first_column) * X_STEP;
    constexpr int PIXEL_UNITS = CHANNELS / UNIT, ROW_UNITS = WINDOW_COLUMNS * PIXEL_UNITS;
#pragma unroll 8
    for (int i = threadIdx.x; i < WINDOW_ROWS * ROW_UNITS; i += THREADS) {
        const int row = i / ROW_UNITS, unit = i % ROW_UNITS, column = unit / PIXEL_UNITS;
        Pack<Element, UNIT> pack = {};
        if (is_between(first_row + row, shape.height) && is_between(first_column + column, shape.width))
            pack = load_pack<Element, UNIT>(corner + 1LL * row * shape.width * X_STEP + unit * UNIT +
                                            column * (X_STEP - CHANNELS));
        store_pack(window + i * UNIT + (row * WINDOW_COLUMNS + column) * GAP, pack);
    }
}

// A lane's adjacent elements along k, starting at `k` of a segment; the last step stops at the segment's end.
template <bool LAST>
__device__ __forceinline__ void read_lane(u32& low, u32& high, const Element* from, int k) {
    Pack<Element, LANE> lane = {};
#pragma unroll
    for (int unit = 0; unit < LANE; unit += UNIT)
        if (!LAST || k + unit < LENGTH) {
            const Pack<Element, UNIT> pack = load_pack<Element, UNIT>(from + unit);
#pragma unroll
            for (int e = 0; e < UNIT; ++e) lane.at[unit + e] = pack.at[e];
        }
    u32 words[2];
    memcpy(words, &lane, 8);
    low = words[0], high = words[1];
}

__device__ __forceinline__ void add(Accumulators& acc, Accumulators& more) {
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int j = 0; j < TILES_N; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[m][j][e] += more[m][j][e], more[m][j][e] = 0.f;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    conv2d_ragged(const Element* __restrict__ x, const uint2* __restrict__ weight, const Bias* __restrict__ bias,
                  const Element* __restrict__ residual, Output* __restrict__ y, ConvShape shape) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Element* const window = reinterpret_cast<Element*>(shared_memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    const int filter_blocks = (shape.filters + TILES_N * 8 - 1) / (TILES_N * 8);
    const int across = (shape.output_width + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int down = (shape.output_height + TILE_ROWS - 1) / TILE_ROWS;
    const int number = blockIdx.x / filter_blocks, first_block = blockIdx.x % filter_blocks * TILES_N;
    const Tile tile = {number / across / down, number / across % down * TILE_ROWS, number % across * TILE_COLUMNS};
    const int all_blocks = filter_blocks * TILES_N;

    wait_for_previous_launch();
    copy_window(window, x, tile, shape);

    int pixels[TILES_M][2];  // start of a lane's pixels in the window
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int pixel = (warp * TILES_M + m) * 16 + half * 8 + lane / 4;
            if (pixel >= PIXELS) pixel = 0;  // not stored
            pixels[m][half] = pixel / TILE_COLUMNS * STRIDE_H * PITCH + pixel % TILE_COLUMNS * STRIDE_W * PIXEL +
                              lane % 4 * LANE;
        }
    __syncthreads();

    __align__(16) Accumulators acc = {}, recent = {};  // aligned for the CPU, which clears 16 bytes at once
    const uint2* weights = weight + first_block * 32 + lane;
#pragma unroll 1
    for (int segment = 0; segment < SEGMENTS; ++segment) {
        const int row = JOINED ? segment : segment / FILTER_WIDTH, column = JOINED ? 0 : segment % FILTER_WIDTH;
        const Element* const taps = window + row * DILATION_H * PITCH + column * DILATION_W * PIXEL;
#pragma unroll
        for (int step = 0; step < STEPS; ++step, weights += all_blocks * 32) {
            constexpr bool PARTIAL = LENGTH % STEP != 0;
            Fragments<TILES_M, TILES_N> now;
#pragma unroll
            for (int j = 0; j < TILES_N; ++j) {
                const uint2 pair = weights[j * 32];
                now.b[j][0] = pair.x, now.b[j][1] = pair.y;
            }
#pragma unroll
            for (int m = 0; m < TILES_M; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const Element* const from = taps + pixels[m][half] + step * STEP;
                    if (PARTIAL && step == STEPS - 1)
                        read_lane<true>(now.a[m][half], now.a[m][half + 2], from, step * STEP + lane % 4 * LANE);
                    else
                        read_lane<false>(now.a[m][half], now.a[m][half + 2], from, 0);
                }
            if constexpr (PRODUCTS == 3) {
                multiply_add_split(recent, now);
                if (step % PROMOTED == PROMOTED - 1 || step == STEPS - 1) add(acc, recent);
            } else {
                if (sizeof(Element) == 4) now.round_to_tf32();
                multiply_add<Element>(acc, now.a, now.b);
            }
        }
    }

    __syncthreads();  // the window has been read: accumulators reuse its smem
    float* const staged = reinterpret_cast<float*>(shared_memory);
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int pixel = (warp * TILES_M + m) * 16 + half * 8 + lane / 4;
            if (pixel >= PIXELS) continue;
#pragma unroll
            for (int j = 0; j < TILES_N; ++j)
                store_pack(staged + pixel * STAGED_PITCH + j * 8 + lane % 4 * 2,
                           Pack<float, 2>{acc[m][j][half * 2], acc[m][j][half * 2 + 1]});
        }
    __syncthreads();
    const Finish finish{bias, nullptr, nullptr, residual, shape.filters};
    constexpr int PAIRS = TILES_N * 4;
#pragma unroll 4
    for (int i = threadIdx.x; i < PIXELS * PAIRS; i += THREADS) {
        const int pixel = i / PAIRS, filter = first_block * 8 + i % PAIRS * 2;
        const int row = tile.row + pixel / TILE_COLUMNS, column = tile.column + pixel % TILE_COLUMNS;
        if (filter >= shape.filters || row >= shape.output_height || column >= shape.output_width) continue;
        const Pack<float, 2> two = load_pack<float, 2>(staged + pixel * STAGED_PITCH + i % PAIRS * 2);
        const long long at = (1LL * tile.image * shape.output_height + row) * shape.output_width + column;
        finish.store_pair(two.at[0], two.at[1], filter, at * Y_STEP, y);
    }
}
