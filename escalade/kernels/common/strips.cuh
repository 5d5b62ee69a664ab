// Strips of an NCHW image's planes: some adjacent outputs along a row per thread, and ROWS of them, one below the other.
//
// A CTA has the packs of outputs `across` of one or more planes, all in the same rows, so that what depends on the row is
// uniform.
#pragma once

#include "common/pool_shape.cuh"
#include "common/ptx.cuh"

struct StripShape {
    int across;  // packs of outputs per plane and CTA
    int chunks;  // CTAs side by side
    int groups;  // CTAs below each other
};

template <int ROWS, int COLUMNS>
struct Strip {
    int first_row, rows;  // of y
    u32 plane;
    int first_column;
    bool there;

    __device__ __forceinline__ Strip(const PoolShape& shape, const StripShape& strips) {
        const u32 chunk = blockIdx.x % strips.chunks, above = blockIdx.x / strips.chunks;
        first_row = above % strips.groups * ROWS;
        rows = min(ROWS, shape.output_height - first_row);
        const u32 planes = blockDim.x / strips.across, plane_in_block = threadIdx.x / strips.across;
        plane = above / strips.groups * planes + plane_in_block;
        first_column = (chunk * strips.across + threadIdx.x - plane_in_block * strips.across) * COLUMNS;
        there = plane_in_block < planes && plane < static_cast<u32>(shape.batch) * shape.channels &&
                first_column < shape.output_width;
    }

    // Offset of the strip's first output.
    __device__ __forceinline__ long long output(const PoolShape& shape) const {
        return (1LL * plane * shape.output_height + first_row) * shape.output_width + first_column;
    }
};
