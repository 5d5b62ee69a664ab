// The part of the image that a CTA's tile of a stem reads, staged as pixels of four 16-bit channels.
//
// The prelude of the including file defines, besides the needs of tile.cuh, FILTER_HEIGHT, FILTER_WIDTH (at most 8),
// STRIDE_H, STRIDE_W and TILE_ROWS (rows of y).
#pragma once

#include "stem/tile.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int STRIDE_H = 1;   // problem.stride[0]
constexpr int STRIDE_W = 1;   // problem.stride[1]
constexpr int TILE_ROWS = 8;  // tiling.rows: rows of y per tile
#endif

constexpr int STEPS_IN_ROW = (FILTER_WIDTH + 3) / 4;  // of k, 4 taps each
constexpr int STEPS = FILTER_HEIGHT * STEPS_IN_ROW;
constexpr int CONV_ROWS = POOL == 3 ? 2 * TILE_ROWS + 1 : POOL_STRIDE * TILE_ROWS;
constexpr int STAGED_ROWS = (CONV_ROWS - 1) * STRIDE_H + FILTER_HEIGHT;
constexpr int STAGED_COLUMNS = ((COLUMNS - 1) * STRIDE_W + STEPS_IN_ROW * 4 + 1) / 2 * 2;  // aligns rows to 16 bytes
constexpr bool DEAD_TAPS = FILTER_WIDTH % 4 != 0;  // their weights are zero, but zero times infinity is NaN
constexpr bool MAY_OVERFLOW = NORMALISE || sizeof(Source) > 1;  // a staged pixel may be infinite or NaN

__device__ __forceinline__ Tile tile_of_block(const StemShape& shape) {
    const int row_number = blockIdx.x / shape.column_tiles;
    return Tile(row_number / shape.row_tiles, row_number % shape.row_tiles * TILE_ROWS,
                blockIdx.x % shape.column_tiles);
}

// True if either half is infinite or NaN: its exponent is all ones, and adding one carries into the sign.
__device__ __forceinline__ bool not_finite(u32 pair) {
    return ((pair & 0x7FFF7FFF) + Pairs<Element>::LAST_EXPONENT_BIT) & 0x80008000;
}

using Pixel = Pack<u32, 2>;  // four channels

// Stages the inputs of the tile's windows, rows of STAGED_COLUMNS pixels: converted, normalized, zero outside the
// image. A warp takes one or more rows, 32 pixels at a time, and issues all loads before it uses the first. Returns
// true if this thread met a non-finite pixel.
template <int WARPS>
__device__ __forceinline__ bool stage(Pixel* staged, const Source* __restrict__ x, const float* __restrict__ scale,
                                      const float* __restrict__ shift, const Tile& tile, const StemShape& shape) {
    constexpr int AT_ONCE = SOURCE_NHWC && CHANNELS != 3 ? CHANNELS : 1;  // channels per load
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

    bool non_finite = false;
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
                    if (exists) channels[c] = normalized(values[i][part][c], c, scales, shifts);
                const Pixel pixel = {{pair_of(channels[0], channels[1]), pair_of(channels[2], channels[3])}};
                non_finite |= not_finite(pixel.at[0]) || not_finite(pixel.at[1]);
                if (first + i < STAGED_ROWS && part * 32 + lane < STAGED_COLUMNS)
                    staged[(first + i) * STAGED_COLUMNS + part * 32 + lane] = pixel;
            }
    }
    return non_finite;
}
