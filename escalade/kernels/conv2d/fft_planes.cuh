// Maps transformed tiles to pixels of a tensor. A plane is one channel of one tile of one image; planes are numbered
// channel first, then tile, then image. Overlap-save: input tiles overlap by the filter's reach, output tiles abut;
// both are `step` pixels apart.
#pragma once

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;        // problem.dtype
constexpr bool NHWC = false;  // problem.layout == "nhwc"
constexpr int TILE = 2;       // config.tile: side of a tile in pixels
constexpr int PLANES = 3;     // config.planes: tiles per CTA
constexpr int THREADS = 256;  // config.threads
#endif

#include "common/elements.cuh"
#include "common/fft.cuh"

using Tiles = FftTiles<TILE, PLANES, THREADS>;

struct FftPlanes {  // filled by escalade/ops/conv2d/rungs/fft.py, in this order
    int planes, channels, height, width;
    int pad_h, pad_w;
    int tiles_h, tiles_w, step_h, step_w;
    int first_tile;
};

struct PlanePosition {
    long long image;  // offset of its first element
    int channel;
    int row, column;  // of the tile's first pixel; outside the image in the padding
};

// Positions of the CTA's planes, computed once. A plane past the last one is placed below every image.
__device__ __forceinline__ void find_positions(PlanePosition* positions, const FftPlanes& shape) {
    if (threadIdx.x >= PLANES) return;
    const long long plane = 1LL * blockIdx.x * PLANES + threadIdx.x;
    PlanePosition position{0, 0, shape.height, 0};
    if (plane < shape.planes) {
        const int tile = shape.first_tile + static_cast<int>(plane) / shape.channels;
        const int image = tile / (shape.tiles_h * shape.tiles_w);
        position.image = 1LL * image * shape.channels * shape.height * shape.width;
        position.channel = static_cast<int>(plane) % shape.channels;
        position.row = tile / shape.tiles_w % shape.tiles_h * shape.step_h - shape.pad_h;
        position.column = tile % shape.tiles_w * shape.step_w - shape.pad_w;
    }
    positions[threadIdx.x] = position;
}

__device__ __forceinline__ long long element_at(const FftPlanes& shape, const PlanePosition& position, int row,
                                                int column) {
    const int pixel = row * shape.width + column;
    return position.image +
           (NHWC ? pixel * shape.channels + position.channel : position.channel * shape.height * shape.width + pixel);
}

__device__ __forceinline__ int column_stride(const FftPlanes& shape) { return NHWC ? shape.channels : 1; }

// Pixels of the tiles of `source`; zero outside the image.
struct PixelSource {
    const Element* source;
    const FftPlanes& shape;
    const PlanePosition* positions;
    float scale;

    struct Line {
        const Element* source;
        long long first;
        int stride, column, width;
        float scale;

        __device__ __forceinline__ float operator()(int offset) const {
            // As unsigned, a column left of the image is past its right edge.
            if (static_cast<unsigned>(column + offset) >= static_cast<unsigned>(width)) return 0.f;
            return scale * to_float(source[first + offset * stride]);
        }
    };

    __device__ __forceinline__ Line line(int plane, int tile_row, int tile_column) const {
        const PlanePosition& position = positions[plane];
        const int row = position.row + tile_row, column = position.column + tile_column;
        const int width = row >= 0 && row < shape.height ? shape.width : 0;
        return {source, element_at(shape, position, row, column), column_stride(shape), column, width, scale};
    }
};
