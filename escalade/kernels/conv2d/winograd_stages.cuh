// First and last stage of the three-stage Winograd convolution, as functions of a CTA index, shared by launches of one
// stage and of several:
//   input:  V[point][tile][channel] = (B' d B)[point] of the tile's patch of x
//   output: y of a tile = A' (M[point][tile][filter]) A, then bias, residual and ReLU
//
// A thread takes one tile and VECTOR adjacent channels (or filters). The lanes of a warp run along channels in NHWC; in
// NCHW along tiles too, so that both sides move whole 32-byte sectors. All loads of a thread are independent. Limiter:
// memory.
//
// V and M have channels and filters padded to multiples of 4, for 16-byte copies, and tiles to whole GEMM blocks; the
// input stage writes the zeros of that padding.
#pragma once

#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                 // problem.dtype
constexpr bool NHWC = false;           // problem.layout == "nhwc"
constexpr int TILE = 2;                // tiles.tile: outputs per side of a tile
constexpr int STAGE_THREADS = 128;     // threads
constexpr int VECTOR = 1;              // config.vector: channels per thread
constexpr int INPUT_LANES = 4;         // input_lanes: threads along channels
constexpr int OUTPUT_LANES = 4;        // output_lanes: threads along filters
constexpr bool WHOLE_CHANNELS = true;  // problem.channels % config.vector == 0
constexpr bool WHOLE_FILTERS = true;   // problem.filters % config.vector == 0
constexpr bool HAS_BIAS = false;       // problem.bias
constexpr bool HAS_RESIDUAL = false;   // problem.residual
constexpr bool HAS_RELU = false;       // problem.relu
#endif

#include "common/epilogue.cuh"
#include "common/winograd.cuh"

constexpr int PATCH = Winograd<TILE>::PATCH;
// Tiles per CTA, with INPUT_LANES or OUTPUT_LANES adjacent threads per tile.
constexpr int INPUT_TILES = STAGE_THREADS / INPUT_LANES;
constexpr int OUTPUT_TILES = STAGE_THREADS / OUTPUT_LANES;

__device__ __forceinline__ int round_up_to_4(int count) { return (count + 3) / 4 * 4; }

// VECTOR adjacent channels of one pixel; zero from `valid` on.
template <bool WHOLE>
__device__ __forceinline__ void load_adjacent(const Element* from, int stride, int valid, float (&values)[VECTOR]) {
    if (WHOLE) {
        const Pack<Element, VECTOR> pack = load_pack<Element, VECTOR>(from);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) values[v] = to_float(pack.at[v]);
    } else {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) values[v] = v < valid ? to_float(from[v * stride]) : 0.f;
    }
}

__device__ __forceinline__ void input_stage(int block, int channel_blocks, const Element* __restrict__ x,
                                            float* __restrict__ transformed, const ConvShape& shape,
                                            const TileGrid& tiles) {
    constexpr bool WHOLE = NHWC && WHOLE_CHANNELS;
    const int channels = round_up_to_4(shape.channels);
    const int tile = block / channel_blocks * INPUT_TILES + threadIdx.x / INPUT_LANES;
    const int channel = (block % channel_blocks * INPUT_LANES + threadIdx.x % INPUT_LANES) * VECTOR;
    if (tile >= tiles.room || channel >= channels) return;

    const bool exists = tile < tiles.count;
    const TilePosition position = position_of<TILE>(tiles, exists ? tile : 0);
    const int first_row = position.output_row - shape.pad_h, first_column = position.output_column - shape.pad_w;
    const int plane = shape.height * shape.width;
    const int channel_stride = NHWC ? 1 : plane, pixel_stride = NHWC ? shape.channels : 1;
    const Element* image = x + 1LL * position.image * shape.channels * plane + 1LL * channel * channel_stride;
    const int valid = shape.channels - channel;

    float patch[VECTOR][PATCH][PATCH];
#pragma unroll
    for (int i = 0; i < PATCH; ++i)
#pragma unroll
        for (int j = 0; j < PATCH; ++j) {
            const int row = first_row + i, column = first_column + j;
            float values[VECTOR] = {};
            if (exists && unsigned(row) < unsigned(shape.height) && unsigned(column) < unsigned(shape.width))
                load_adjacent<WHOLE>(image + (row * shape.width + column) * pixel_stride, channel_stride, valid,
                                     values);
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) patch[v][i][j] = values[v];
        }
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) transform_input(patch[v]);

    float* to = transformed + 1LL * tile * channels + channel;
    const long long point_stride = 1LL * tiles.room * channels;
#pragma unroll
    for (int i = 0; i < PATCH; ++i)
#pragma unroll
        for (int j = 0; j < PATCH; ++j, to += point_stride) {
            Pack<float, VECTOR> pack;
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) pack.at[v] = patch[v][i][j];
            store_pack(to, pack);
        }
}

__device__ __forceinline__ void output_stage(int block, int filter_blocks, const float* __restrict__ products,
                                             const Element* __restrict__ bias, const Element* __restrict__ residual,
                                             Element* __restrict__ y, const ConvShape& shape, const TileGrid& tiles) {
    constexpr bool WHOLE = NHWC && WHOLE_FILTERS;
    const int filters = round_up_to_4(shape.filters);
    const int tile = block / filter_blocks * OUTPUT_TILES + threadIdx.x / OUTPUT_LANES;
    const int filter = (block % filter_blocks * OUTPUT_LANES + threadIdx.x % OUTPUT_LANES) * VECTOR;
    if (tile >= tiles.count || filter >= shape.filters) return;

    float sums[VECTOR][PATCH][PATCH];
    const float* from = products + 1LL * tile * filters + filter;
    const long long point_stride = 1LL * tiles.room * filters;
#pragma unroll
    for (int i = 0; i < PATCH; ++i)
#pragma unroll
        for (int j = 0; j < PATCH; ++j, from += point_stride) {
            const Pack<float, VECTOR> pack = load_pack<float, VECTOR>(from);
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) sums[v][i][j] = pack.at[v];
        }
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) transform_output(sums[v]);

    const TilePosition position = position_of<TILE>(tiles, tile);
    const int plane = shape.output_height * shape.output_width;
    const int filter_stride = NHWC ? 1 : plane, pixel_stride = NHWC ? shape.filters : 1;
    const long long first = 1LL * position.image * shape.filters * plane + 1LL * filter * filter_stride;
    const int valid = shape.filters - filter;
    float shift[VECTOR] = {};
    if (HAS_BIAS) load_adjacent<WHOLE>(bias + filter, 1, valid, shift);
#pragma unroll
    for (int i = 0; i < TILE; ++i)
#pragma unroll
        for (int j = 0; j < TILE; ++j) {
            const int row = position.output_row + i, column = position.output_column + j;
            if (row >= shape.output_height || column >= shape.output_width) continue;
            const long long at = first + 1LL * (row * shape.output_width + column) * pixel_stride;
            float added[VECTOR] = {};
            if (HAS_RESIDUAL) load_adjacent<WHOLE>(residual + at, filter_stride, valid, added);
            Pack<Element, VECTOR> results;
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                const float sum = sums[v][i][j] + shift[v];
                results.at[v] = from_float<Element>(activated<true, HAS_RELU>(sum, added[v]));
            }
            if (WHOLE) {
                store_pack(y + at, results);
            } else {
#pragma unroll
                for (int v = 0; v < VECTOR; ++v)
                    if (v < valid) y[at + v * filter_stride] = results.at[v];
            }
        }
}
