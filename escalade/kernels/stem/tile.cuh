// A block's tile of a stem: the image staged as pixels of four 16-bit channels, and rows of sums turned into y.
//
// Sums come as mma and wgmma leave them when filters are the rows and pixels the columns: with group = lane / 4 and
// member = lane % 4, a lane has pixels 2*member and 2*member + 1 of every 8, and for each block of 16 filters two that
// lie side by side in y (see pack.cu). So a pooling window of stride 2 has two of its columns in one lane and at most
// one in the lane's neighbour: pooling takes one shuffle for each 8 pixels, and no shared memory.
//
// The including file's prelude defines, besides what shape.cuh needs, Element, FILTER_HEIGHT, FILTER_WIDTH (at most 8),
// STRIDE_H, STRIDE_W, HAS_RELU, POOL (0: none, 2: 2x2 stride 2, 3: 3x3 stride 2 padding 1), TILE_ROWS (rows of y),
// COLUMNS (of the convolution, a multiple of 8), HALO (neighbouring tiles overlap by a column: pooling, several tiles
// in a row of y) and MASK_COLUMNS (tiles reach over the edge).
#pragma once

#include "common/ptx.cuh"
#include "stem/shape.cuh"

constexpr int STEPS_IN_ROW = (FILTER_WIDTH + 3) / 4;  // of k, 4 taps each
constexpr int STEPS = FILTER_HEIGHT * STEPS_IN_ROW;
constexpr int POOL_STRIDE = POOL ? 2 : 1;
constexpr int CONV_ROWS = POOL == 3 ? 2 * TILE_ROWS + 1 : POOL_STRIDE * TILE_ROWS;
constexpr int STAGED_ROWS = (CONV_ROWS - 1) * STRIDE_H + FILTER_HEIGHT;
constexpr int STAGED_COLUMNS = ((COLUMNS - 1) * STRIDE_W + STEPS_IN_ROW * 4 + 1) / 2 * 2;  // so that rows are 16 bytes
constexpr int TILE_COLUMNS = COLUMNS / POOL_STRIDE - HALO;                                 // of y
constexpr bool DEAD_TAPS = FILTER_WIDTH % 4 != 0;  // their weights are zeros, but zero times infinity is NaN
constexpr bool MAY_OVERFLOW = NORMALISE || sizeof(Source) > 1;  // a staged pixel may be infinite or NaN

// Two elements in a register, the lower filter in the lower half.
template <class T>
struct Pairs;
#ifdef __CUDA_FP16_H__
template <>
struct Pairs<__half> {
    using Two = __half2;
    static constexpr u32 LOWEST = 0xFC00FC00, LAST_EXPONENT_BIT = 0x04000400;  // minus infinities
    __device__ __forceinline__ static Two of(float low, float high) { return __floats2half2_rn(low, high); }
};
#endif
#ifdef __CUDA_BF16_H__
template <>
struct Pairs<__nv_bfloat16> {
    using Two = __nv_bfloat162;
    static constexpr u32 LOWEST = 0xFF80FF80, LAST_EXPONENT_BIT = 0x00800080;
    __device__ __forceinline__ static Two of(float low, float high) { return __floats2bfloat162_rn(low, high); }
};
#endif
using Two = Pairs<Element>::Two;
constexpr u32 LOWEST = Pairs<Element>::LOWEST;

__device__ __forceinline__ u32 pair_of(float low, float high) {
    const Two two = Pairs<Element>::of(low, high);
    return reinterpret_cast<const u32&>(two);
}

// Of each half; a NaN wins, as in PyTorch.
__device__ __forceinline__ u32 larger(u32 a, u32 b) {
    const Two two = __hmax2_nan(reinterpret_cast<const Two&>(a), reinterpret_cast<const Two&>(b));
    return reinterpret_cast<const u32&>(two);
}

// Whether a half is infinite or NaN: its exponent is all ones, and one more carries into the sign.
__device__ __forceinline__ bool not_finite(u32 pair) {
    return ((pair & 0x7FFF7FFF) + Pairs<Element>::LAST_EXPONENT_BIT) & 0x80008000;
}

// ------------------------------------------------------------------ where a block is

struct Tile {
    long long image;
    int row, column;            // of y, the first
    int conv_row, conv_column;  // the first computed; outside the convolution perhaps

    __device__ __forceinline__ explicit Tile(const StemShape& shape) {
        const int in_row = blockIdx.x % shape.column_tiles;
        const int row_number = blockIdx.x / shape.column_tiles;
        image = row_number / shape.row_tiles;
        row = row_number % shape.row_tiles * TILE_ROWS;
        column = in_row * TILE_COLUMNS;
        conv_row = row * POOL_STRIDE - (POOL == 3);
        conv_column = (column - HALO) * POOL_STRIDE;
    }
};

// ------------------------------------------------------------------ the image

using Pixel = Pack<u32, 2>;  // four channels

__device__ __forceinline__ bool inside(int position, int size) {
    return static_cast<unsigned>(position) < static_cast<unsigned>(size);
}

// What the tile's windows see, rows of STAGED_COLUMNS pixels: converted, normalised, zeros outside the image. A warp
// takes a row or several, 32 pixels at a time, and loads all of them before it looks at the first.
// Returns whether this thread met a pixel that is not finite.
template <int WARPS>
__device__ __forceinline__ bool stage(Pixel* staged, const Source* __restrict__ x, const float* __restrict__ scale,
                                      const float* __restrict__ shift, const Tile& tile, const StemShape& shape) {
    constexpr int AT_ONCE = SOURCE_NHWC && CHANNELS != 3 ? CHANNELS : 1;  // channels a load
    constexpr int PARTS = (STAGED_COLUMNS + 31) / 32;
    constexpr int ROWS = PARTS >= 6 ? 1 : PARTS >= 3 ? 2 : 4;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Source* image = x + tile.image * CHANNELS * shape.height * shape.width;
    const int first_row = tile.conv_row * STRIDE_H - shape.pad_h;
    const int column = tile.conv_column * STRIDE_W - shape.pad_w + lane;
    float scales[CHANNELS], shifts[CHANNELS];
    if (NORMALISE) {
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) scales[c] = scale[c], shifts[c] = shift[c];
    }

    bool strange = false;
#pragma unroll 1
    for (int first = warp * ROWS; first < STAGED_ROWS; first += WARPS * ROWS) {
        Source values[ROWS][PARTS][CHANNELS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int row = first_row + first + i;
#pragma unroll
            for (int c = 0; c < CHANNELS; c += AT_ONCE) {
                const Source* source = image + source_offset(row, column, c, shape);
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    Pack<Source, AT_ONCE> loaded = {};
                    if (inside(row, shape.height) && inside(column + 32 * part, shape.width))
                        loaded = load_pack<Source, AT_ONCE>(source + 32 * part * (SOURCE_NHWC ? CHANNELS : 1));
#pragma unroll
                    for (int e = 0; e < AT_ONCE; ++e) values[i][part][c + e] = loaded.at[e];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const bool exists = !NORMALISE || (inside(first_row + first + i, shape.height) &&
                                                   inside(column + 32 * part, shape.width));
                float channels[4] = {};
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c)
                    if (exists) channels[c] = normalised(values[i][part][c], c, scales, shifts);
                const Pixel pixel = {{pair_of(channels[0], channels[1]), pair_of(channels[2], channels[3])}};
                strange |= not_finite(pixel.at[0]) || not_finite(pixel.at[1]);
                if (first + i < STAGED_ROWS && part * 32 + lane < STAGED_COLUMNS)
                    staged[(first + i) * STAGED_COLUMNS + part * 32 + lane] = pixel;
            }
    }
    return strange;
}

// ------------------------------------------------------------------ y

// The sums of a row of the convolution on their way into y, for a warp with BLOCKS blocks of 16 filters: bias, ReLU,
// rounding, and pooling with the rows before, of which `best` is the maximum so far.
template <int BLOCKS, int COLUMN_BLOCKS>
struct RowWriter {
    using Sums = float[COLUMN_BLOCKS][BLOCKS][4];

    const StemShape& shape;
    Element* y;  // this lane's first filter of the image's first pixel
    float bias[BLOCKS][2];
    int first_column;                 // of y, this lane's in the first column block
    int column_offset, column_limit;  // column i of y is the tile's if i - column_offset is in [0, column_limit)
    int conv_column;                  // of the convolution, this lane's first
    u32 best[COLUMN_BLOCKS][BLOCKS];

    // `filter` is the warp's first.
    __device__ __forceinline__ RowWriter(const StemShape& shape, const Tile& tile, Element* out, const Element* biases,
                                         int filter)
        : shape(shape) {
        const int lane = threadIdx.x % 32, group = lane / 4;
        filter += 2 * BLOCKS * group;
        y = out + tile.image * shape.output_height * shape.output_width * shape.filters + filter;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
            for (int half = 0; half < 2; ++half) bias[b][half] = to_float(biases[filter + 2 * b + half]);
        column_offset = tile.column;
        column_limit = min(TILE_COLUMNS, shape.output_width - tile.column);
    }

    // To the columns of the convolution from `column` on, which is even; nothing is pooled yet.
    __device__ __forceinline__ void move_to(int column) {
        const int member = threadIdx.x % 4;
        conv_column = column + 2 * member;
        first_column = POOL ? column / 2 + member : conv_column;
#pragma unroll
        for (int j = 0; j < COLUMN_BLOCKS; ++j)
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) best[j][b] = LOWEST;
    }

    // Adds a row. With `completes` the maxima are row `row` of y, and those of the next one begin. `edge` is what
    // lanes of member 3 found in the last column before the first, then what they find in the last.
    __device__ __forceinline__ void add(const Sums& sums, u32 (&edge)[BLOCKS], bool completes, int row) {
        const int lane = threadIdx.x % 32, member = lane % 4;
        u32 latest[COLUMN_BLOCKS][BLOCKS];
#pragma unroll
        for (int j = 0; j < COLUMN_BLOCKS; ++j) {
            u32 pairs[2][BLOCKS];
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int b = 0; b < BLOCKS; ++b) {
                    u32 pair = pair_of(sums[j][b][i] + bias[b][0], sums[j][b][2 + i] + bias[b][1]);
                    if (HAS_RELU) pair = larger(pair, 0);
                    if (MASK_COLUMNS && !inside(conv_column + 8 * j + i, shape.conv_width)) pair = LOWEST;
                    pairs[i][b] = pair;
                }
            if constexpr (POOL == 0) {
                store(pairs[0], row, j * 8);
                store(pairs[1], row, j * 8 + 1);
            } else {
#pragma unroll
                for (int b = 0; b < BLOCKS; ++b) {
                    u32 now = larger(pairs[0][b], pairs[1][b]);
                    if (POOL == 3) {
                        // The column to the left is the left neighbour's second; member 0's is in the block before.
                        const u32 offered = member == 3 ? edge[b] : pairs[1][b];
                        now = larger(now, __shfl_sync(~0u, offered, member == 0 ? lane + 3 : lane - 1));
                        edge[b] = pairs[1][b];
                    }
                    best[j][b] = larger(best[j][b], now);
                    latest[j][b] = now;
                }
            }
        }
        if (POOL && completes) complete(row);
        if (POOL == 3 && completes) {
#pragma unroll
            for (int j = 0; j < COLUMN_BLOCKS; ++j)
#pragma unroll
                for (int b = 0; b < BLOCKS; ++b) best[j][b] = latest[j][b];
        }
    }

    // A row that the convolution does not have: only pooling windows reach over its edge.
    __device__ __forceinline__ void add_nothing(bool completes, int row) {
        if (completes) complete(row);
    }

private:
    __device__ __forceinline__ void complete(int row) {
#pragma unroll
        for (int j = 0; j < COLUMN_BLOCKS; ++j) {
            store(best[j], row, j * (8 / POOL_STRIDE));
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) best[j][b] = LOWEST;
        }
    }

    __device__ __forceinline__ void store(const u32 (&pairs)[BLOCKS], int row, int offset) {
        Pack<u32, BLOCKS> pack;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) pack.at[b] = pairs[b];
        Element* pixel = y + ((row * shape.output_width + first_column) * shape.filters + offset * shape.filters);
        if (inside(first_column - column_offset + offset, column_limit))
            store_pack(reinterpret_cast<u32*>(pixel), pack);
    }
};

// Row `local` of a tile's convolution rows, or of a band's in it, ends the pooling window of a row of y...
__device__ __forceinline__ bool completes(int local) {
    return POOL == 3 ? local > 0 && local % 2 == 0 : POOL == 2 ? local % 2 == 1 : true;
}

// ... whose number, from the band's first, is
__device__ __forceinline__ int completed(int local) { return POOL == 3 ? local / 2 - 1 : local / POOL_STRIDE; }

// How many rows of the convolution `rows` rows of y take.
__device__ __forceinline__ int conv_rows(int rows) { return rows * POOL_STRIDE + (POOL == 3); }
