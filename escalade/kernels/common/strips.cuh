// Strips of an NCHW image's planes: some adjacent outputs along a row per thread, and ROWS of them, one below the other.
//
// A CTA has the packs of outputs `across` of one or more planes, all in the same rows, so that what depends on the row is
// uniform.
#pragma once

#include "common/pool_shape.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr bool ONE_CHUNK = true;  // strips.chunks == 1
constexpr bool ONE_PLANE = true;  // strips.planes == 1
#endif

struct StripShape {
    int across;  // packs of outputs per plane and CTA
    int planes;  // per CTA
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
        const u32 above = ONE_CHUNK ? blockIdx.x : blockIdx.x / strips.chunks;
        const u32 chunk = ONE_CHUNK ? 0 : blockIdx.x - above * strips.chunks;
        const u32 planes = above / strips.groups;
        first_row = (above - planes * strips.groups) * ROWS;
        rows = min(ROWS, shape.output_height - first_row);
        const u32 plane_in_block = ONE_PLANE ? 0 : threadIdx.x / strips.across;
        const u32 pack = threadIdx.x - plane_in_block * strips.across;
        plane = planes * strips.planes + plane_in_block;
        first_column = (chunk * strips.across + pack) * COLUMNS;
        there = pack < static_cast<u32>(strips.across) && plane_in_block < static_cast<u32>(strips.planes) &&
                plane < static_cast<u32>(shape.batch) * shape.channels && first_column < shape.output_width;
    }

    // Offset of the strip's first output.
    __device__ __forceinline__ long long output(const PoolShape& shape) const {
        return (1LL * plane * shape.output_height + first_row) * shape.output_width + first_column;
    }
};
