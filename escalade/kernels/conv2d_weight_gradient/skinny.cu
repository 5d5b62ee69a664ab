// parts[part][w][tap][n] = sum over the part's pixels q of wide[q][w] * narrow[window(q, tap)][n], in NHWC
//
// A GEMM with one skinny operand: few channels (a network's first layer) or few filters (an autoencoder's last). The
// wide tensor, gradients of many filters or an image of many channels, is read once, directly from global memory into
// mma.sync registers: the mapping of channels to rows and pixels to k is free, so a lane's 16 bytes of a pixel are rows
// of several MMAs. The narrow tensor's windows are in smem, a band of rows at a time; the columns of the MMA are taps
// times its channels.
//
// With 16 bits a register holds two numbers along k: the same column in two adjacent rows. So a *unit* is one 32-bit
// row or two 16-bit rows, and words of the band hold one number, or it and the one STRIDE_H rows below.
//   SWAPPED   the narrow tensor is the gradient; the taps are reversed
//   HAS_BIAS  the bias gradient is one more column of ones; if SWAPPED, one more MMA of ones with the columns of
//             BIAS_TAP, which covers every gradient once
//   PRODUCTS  3: fp32 accuracy, operands split into two TF32 parts; tensor cores round toward zero, so the sums of each
//             step are added to fp32 accumulators
// Limiter: memory, the wide tensor's bytes; with split operands nearly the tensor cores too.
//
// Rung: `skinny`.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;            // problem.dtype
constexpr bool HAS_BIAS = false;  // problem.bias
constexpr int PRODUCTS = 3;       // products
constexpr bool SWAPPED = false;   // roles.swapped
constexpr int NARROW = 1;         // roles.narrow
constexpr int FILTER_HEIGHT = 3;  // rows.taps
constexpr int FILTER_WIDTH = 3;   // columns.taps
constexpr int STRIDE_H = 1;       // rows.stride
constexpr int STRIDE_W = 1;       // columns.stride
constexpr int DILATION_H = 1;     // rows.dilation
constexpr int DILATION_W = 1;     // columns.dilation
constexpr int BIAS_TAP = 4;       // roles.bias_tap or 0
constexpr int BAND = 1;           // config.band: units per band
constexpr bool RAGGED = true;     // bands.ragged
constexpr int WARPS_M = 1;        // config.warps_m: warps along the channels
constexpr int WARPS_K = 8;        // config.warps_k
constexpr int BLOCKS_PER_SM = 2;  // bands.blocks_per_sm
#endif

#include "common/elements.cuh"
#include "common/mma_tile.cuh"
#include "common/ptx.cuh"

struct SkinnyShape {  // filled by escalade/ops/conv2d_weight_gradient/rungs/skinny.py, in this order
    int batch, height, width, channels;             // of the wide tensor
    int narrow_height, narrow_width, pad_h, pad_w;  // of the narrow one, and where the first window begins
    int bands, steps;                               // of an image: bands down, steps of 8 columns across
    int pitch;                                      // words of a row of the band
};

constexpr bool PAIRED = sizeof(Element) == 2;
constexpr int UNIT = PAIRED ? 2 : 1;
constexpr int STEP = 8;                     // columns per MMA
constexpr int LANE = 16 / sizeof(Element);  // adjacent channels per lane
constexpr int CHANNELS = 8 * LANE;          // per warp: one line of a pixel
constexpr int TILES_M = CHANNELS / 16;
constexpr int DEPTH = PAIRED ? 1 : 2;  // steps in flight
constexpr int TAPS = FILTER_HEIGHT * FILTER_WIDTH;
constexpr int TAP_COLUMNS = TAPS * NARROW;
constexpr bool ONES_COLUMN = HAS_BIAS && !SWAPPED, ONES_ROWS = HAS_BIAS && SWAPPED;
constexpr int TILES_N = (TAP_COLUMNS + ONES_COLUMN + 7) / 8;
constexpr int BAND_ROWS = (BAND - 1) * UNIT * STRIDE_H + (FILTER_HEIGHT - 1) * DILATION_H + 1;
constexpr int THREADS = WARPS_M * WARPS_K * 32;
constexpr int STAGED = 8;  // words of a band that a thread loads before it stores them
constexpr int FIRST_BIAS_TILE = ONES_ROWS ? BIAS_TAP * NARROW / 8 : 0;
constexpr int BIAS_TILES = ONES_ROWS ? (BIAS_TAP * NARROW + NARROW - 1) / 8 - FIRST_BIAS_TILE + 1 : 1;

using Word = Pack<Element, UNIT>;

struct Accumulators {
    float of[TILES_M][TILES_N][4] = {};
    float of_ones[BIAS_TILES][4] = {};
};

// A step of a warp: 8 adjacent columns of a unit of a band.
struct Cursor {
    int band, unit, step;

    __device__ __forceinline__ void advance(int steps) {
        for (step += WARPS_K; step >= steps; step -= steps)
            if (++unit == BAND) unit = 0, ++band;
    }
};

// A lane's part of the wide tensor at two columns, four apart: 16 bytes of every row of a unit.
struct Wide {
    Pack<u32, 4> at[2][UNIT];

    __device__ __forceinline__ void load(const Element* wide, const SkinnyShape& shape, const Cursor& cursor, int end,
                                         int first_channel) {
        const int lane = threadIdx.x % 32, channel = first_channel + lane / 4 * LANE;
        const int n = cursor.band / shape.bands, row = (cursor.band % shape.bands * BAND + cursor.unit) * UNIT;
        const bool inside = cursor.band < end && channel < shape.channels;
#pragma unroll
        for (int side = 0; side < 2; ++side)
#pragma unroll
            for (int e = 0; e < UNIT; ++e) {
                const int column = cursor.step * STEP + lane % 4 + side * 4;
                const long long pixel = (1LL * n * shape.height + row + e) * shape.width + column;
                const Pack<Element, LANE> pack =
                    load_pack_if<Element, LANE>(inside && row + e < shape.height && column < shape.width,
                                                wide + pixel * shape.channels + channel);
                at[side][e] = reinterpret_cast<const Pack<u32, 4>&>(pack);
            }
    }

    // Rows of MMA i, two adjacent channels; with 16 bits, a pair along k of each.
    __device__ __forceinline__ void rows(u32 (&a)[4], int i) const {
#pragma unroll
        for (int side = 0; side < 2; ++side)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                a[side * 2 + half] =
                    PAIRED ? __byte_perm(at[side][0].at[i], at[side][UNIT - 1].at[i], half == 0 ? 0x5410 : 0x7632)
                           : at[side][0].at[(2 * i + half) % 4];
    }
};

// Channel, relative to the warp's first, of row `lane / 4 + 8 * half` of MMA i.
__device__ __forceinline__ int channel_of(int i, int half) { return threadIdx.x % 32 / 4 * LANE + 2 * i + half; }

// Stages a band of the narrow tensor, zero outside it; a thread has STAGED loads in flight.
__device__ __forceinline__ void stage(Word* words, const Element* narrow, const SkinnyShape& shape, int band) {
    const int n = band / shape.bands, first_row = band % shape.bands * BAND * UNIT * STRIDE_H - shape.pad_h;
    const int row_elements = shape.narrow_width * NARROW, all = BAND_ROWS * shape.pitch;
    const Element* image = narrow + 1LL * n * shape.narrow_height * row_elements;
    for (int first = threadIdx.x; first < all; first += STAGED * THREADS) {
        Word staged[STAGED];
#pragma unroll
        for (int i = 0; i < STAGED; ++i) {
            const int row = (first + i * THREADS) / shape.pitch, column = (first + i * THREADS) - row * shape.pitch;
            const int at = column - shape.pad_w * NARROW;
#pragma unroll
            for (int e = 0; e < UNIT; ++e) {
                const int h = first_row + row + e * STRIDE_H;
                const bool inside = 0 <= h && h < shape.narrow_height && 0 <= at && at < row_elements;
                staged[i].at[e] = inside ? image[1LL * h * row_elements + at] : from_float<Element>(0.f);
            }
        }
#pragma unroll
        for (int i = 0; i < STAGED; ++i)
            if (first + i * THREADS < all) words[first + i * THREADS] = staged[i];
    }
}

struct Columns {
    int offsets[TILES_N];  // of this lane's columns, in words

    __device__ __forceinline__ explicit Columns(const SkinnyShape& shape) {
#pragma unroll
        for (int j = 0; j < TILES_N; ++j) {
            const int column = j * 8 + threadIdx.x % 32 / 4;
            const int tap = column < TAP_COLUMNS ? column / NARROW : 0;  // other columns are unused
            offsets[j] = tap / FILTER_WIDTH * DILATION_H * shape.pitch + tap % FILTER_WIDTH * DILATION_W * NARROW +
                         column % NARROW;
        }
    }

    // Pixels of a step outside the wide tensor are zeroed here too: its zeros times an infinity would be NaN.
    __device__ __forceinline__ void load(u32 (&b)[TILES_N][2], const Word* words, const SkinnyShape& shape,
                                         const Cursor& cursor) const {
        const int column = cursor.step * STEP + threadIdx.x % 4;
        const int row = (cursor.band % shape.bands * BAND + cursor.unit) * UNIT;
        const int first = cursor.unit * UNIT * STRIDE_H * shape.pitch + column * STRIDE_W * NARROW;
#pragma unroll
        for (int j = 0; j < TILES_N; ++j)
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                Word word = words[first + side * 4 * STRIDE_W * NARROW + offsets[j]];
#pragma unroll
                for (int e = 0; e < UNIT; ++e)
                    if (RAGGED && (column + side * 4 >= shape.width || row + e >= shape.height))
                        word.at[e] = from_float<Element>(0.f);
                if (ONES_COLUMN && j == TAP_COLUMNS / 8 && threadIdx.x % 32 / 4 == TAP_COLUMNS % 8) word = ones();
                b[j][side] = reinterpret_cast<const u32&>(word);
            }
    }

    __device__ __forceinline__ static Word ones() {
        Word word;
#pragma unroll
        for (int e = 0; e < UNIT; ++e) word.at[e] = from_float<Element>(1.f);
        return word;
    }
};

// sums[j] += a * b[j]; in fp32, b is the high part and `lower` the low part, and a is split here.
template <int COUNT>
__device__ __forceinline__ void multiply(float (*acc)[4], u32 (&a)[4], const u32 (*b)[2], const u32 (*lower)[2]) {
    if constexpr (PRODUCTS == 3) {
        u32 lower_a[4];
        float recent[COUNT][4] = {};
#pragma unroll
        for (int e = 0; e < 4; ++e) lower_a[e] = split_off_low_fast(a[e]);
#pragma unroll
        for (int j = 0; j < COUNT; ++j) multiply_add<Element>(recent[j], lower_a, b[j]);
#pragma unroll
        for (int j = 0; j < COUNT; ++j) multiply_add<Element>(recent[j], a, lower[j]);
#pragma unroll
        for (int j = 0; j < COUNT; ++j) multiply_add<Element>(recent[j], a, b[j]);
#pragma unroll
        for (int j = 0; j < COUNT; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[j][e] += recent[j][e];
    } else {
#pragma unroll
        for (int e = 0; !PAIRED && e < 4; ++e) a[e] = to_tf32(__uint_as_float(a[e]));
#pragma unroll
        for (int j = 0; j < COUNT; ++j) multiply_add<Element>(acc[j], a, b[j]);
    }
}

__device__ __forceinline__ void multiply_step(Accumulators& acc, const Wide& wide, u32 (&b)[TILES_N][2],
                                              bool with_ones) {
    u32 lower[TILES_N][2];
    if constexpr (!PAIRED) {
#pragma unroll
        for (int j = 0; j < TILES_N; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (PRODUCTS == 3) lower[j][e] = split_off_low_fast(b[j][e]);
                else b[j][e] = to_tf32(__uint_as_float(b[j][e]));
            }
    }
    u32 a[4];
#pragma unroll
    for (int i = 0; i < TILES_M; ++i) {
        wide.rows(a, i);
        multiply<TILES_N>(acc.of[i], a, b, lower);
    }
    if (ONES_ROWS && with_ones) {
        const Word word = Columns::ones();
#pragma unroll
        for (int e = 0; e < 4; ++e) a[e] = reinterpret_cast<const u32&>(word);
        multiply<BIAS_TILES>(acc.of_ones, a, b + FIRST_BIAS_TILE, lower + FIRST_BIAS_TILE);
    }
}

// Offset of a sum in smem: as in the part, in rows of the CTA's channels or of their columns.
constexpr int BLOCK_CHANNELS = WARPS_M * CHANNELS;
__device__ __forceinline__ int offset_of(int channel, int column) {
    if (column >= TAP_COLUMNS) return BLOCK_CHANNELS * TAP_COLUMNS + channel;
    return SWAPPED ? (column % NARROW * TAPS + TAPS - 1 - column / NARROW) * BLOCK_CHANNELS + channel
                   : channel * TAP_COLUMNS + column;
}

// Reduces the accumulators of warps with the same channels in smem, in order.
__device__ __forceinline__ void add_up(const Accumulators& acc, float* scratch, int warp_m, int warp_k,
                                       bool with_ones) {
    const int pair = threadIdx.x % 4 * 2;
    for (int turn = 0; turn < WARPS_K; ++turn) {
        __syncthreads();
        if (warp_k != turn) continue;
#pragma unroll
        for (int i = 0; i < TILES_M; ++i)
#pragma unroll
            for (int j = 0; j < TILES_N; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int channel = warp_m * CHANNELS + channel_of(i, e / 2), column = j * 8 + pair + e % 2;
                    if (column >= TAP_COLUMNS + ONES_COLUMN) continue;
                    float& sum = scratch[offset_of(channel, column)];
                    sum = turn == 0 ? acc.of[i][j][e] : sum + acc.of[i][j][e];
                }
        if constexpr (ONES_ROWS) {  // all its rows are equal
#pragma unroll
            for (int j = 0; j < BIAS_TILES; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int filter = (FIRST_BIAS_TILE + j) * 8 + pair + e - BIAS_TAP * NARROW;
                    if (!with_ones || threadIdx.x % 32 >= 4 || filter < 0 || filter >= NARROW) continue;
                    float& sum = scratch[BLOCK_CHANNELS * TAP_COLUMNS + filter];
                    sum = turn == 0 ? acc.of_ones[j][e] : sum + acc.of_ones[j][e];
                }
        }
    }
    __syncthreads();
}

__device__ __forceinline__ void store(const float* scratch, float* part, const SkinnyShape& shape, int first_channel) {
    const int channels = min(BLOCK_CHANNELS, shape.channels - first_channel);
    for (int at = threadIdx.x; at < channels * TAP_COLUMNS; at += THREADS) {
        if (SWAPPED) {
            const int row = at / channels, channel = at - row * channels;
            part[row * shape.channels + first_channel + channel] = scratch[row * BLOCK_CHANNELS + channel];
        } else {
            part[1LL * first_channel * TAP_COLUMNS + at] = scratch[at];
        }
    }
    if (!HAS_BIAS || (SWAPPED && first_channel > 0)) return;
    float* biases = part + 1LL * shape.channels * TAP_COLUMNS + (SWAPPED ? 0 : first_channel);
    for (int at = threadIdx.x; at < (SWAPPED ? NARROW : channels); at += THREADS)
        biases[at] = scratch[BLOCK_CHANNELS * TAP_COLUMNS + at];
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    conv2d_weight_gradient_skinny(const Element* __restrict__ wide, const Element* __restrict__ narrow,
                                  float* __restrict__ parts, SkinnyShape shape, int part_bands) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    wait_for_previous_launch();
    const int warp = threadIdx.x / 32, warp_m = warp % WARPS_M, warp_k = warp / WARPS_M;
    const int first_channel = (blockIdx.x * WARPS_M + warp_m) * CHANNELS;
    const bool with_ones = first_channel == 0;
    const int end = min(shape.batch * shape.bands, static_cast<int>(blockIdx.y + 1) * part_bands);
    Word* words = reinterpret_cast<Word*>(shared_memory);
    const Columns columns(shape);
    Accumulators acc;
    Cursor at{static_cast<int>(blockIdx.y) * part_bands, 0, warp_k - WARPS_K};
    at.advance(shape.steps);
    Cursor ahead = at;
    Wide next[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
        next[i].load(wide, shape, ahead, end, first_channel);
        ahead.advance(shape.steps);
    }
    for (int band = blockIdx.y * part_bands; band < end; ++band) {
        __syncthreads();
        stage(words, narrow, shape, band);
        __syncthreads();
        while (at.band == band) {
            const Wide now = next[0];
#pragma unroll
            for (int i = 1; i < DEPTH; ++i) next[i - 1] = next[i];
            next[DEPTH - 1].load(wide, shape, ahead, end, first_channel);
            u32 b[TILES_N][2];
            columns.load(b, words, shape, at);
            at.advance(shape.steps), ahead.advance(shape.steps);
            multiply_step(acc, now, b, with_ones);
        }
    }
    float* scratch = reinterpret_cast<float*>(shared_memory);
    add_up(acc, scratch, warp_m, warp_k, with_ones);
    const long long elements = 1LL * shape.channels * TAP_COLUMNS + (HAS_BIAS ? (SWAPPED ? NARROW : shape.channels) : 0);
    store(scratch, parts + blockIdx.y * elements, shape, blockIdx.x * BLOCK_CHANNELS);
}
