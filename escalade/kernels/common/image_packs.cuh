// Packs of VECTOR adjacent elements of dense NCHW images, one per thread in linear order. Whatever the width, accesses
// are aligned and those of adjacent lanes are adjacent: a pack that straddles the end of a row continues in the next.
#pragma once

#include "common/elements.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;            // problem.dtype
constexpr int VECTOR = 4;         // packs.vector: elements per pack
constexpr bool STRADDLES = true;  // packs.straddles: rows are not whole packs
#endif

struct Reciprocal {
    u32 multiplier, increment, shift;

    // n / size, for every n of 32 bits.
    __device__ __forceinline__ u32 quotient(u32 n) const {
        return static_cast<u32>((1ULL * n * multiplier + increment) >> 32) >> shift;
    }
};

struct PackShape {  // filled by escalade/ops/shared/image_packs.py, in this order
    u32 packs;
    int last;           // elements of the last pack
    int height, width;  // rows of a plane, and elements of a row; packs of it unless they straddle rows
    Reciprocal by_height, by_width;
};

struct PackPosition {  // of the pack's first element
    u32 pack, plane;
    int row, column;
    bool there;

    __device__ __forceinline__ explicit PackPosition(const PackShape& shape) {
        pack = blockIdx.x * blockDim.x + threadIdx.x;
        there = pack < shape.packs;
        const u32 at = STRADDLES ? pack * VECTOR : pack;
        const u32 line = shape.by_width.quotient(at);
        plane = shape.by_height.quotient(line);
        row = line - plane * shape.height;
        column = (at - line * shape.width) * (STRADDLES ? 1 : VECTOR);
    }
};

// The elements of a row from `column` on, one by one.
template <class Source>
__device__ __forceinline__ Pack<Element, VECTOR> gathered(const Source& source, int column) {
    Pack<Element, VECTOR> values;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) values.at[e] = source[column + e];
    return values;
}

// Store this thread's pack of y. `source.seek(plane, row)` selects a row of y, of which `source[column]` is an element
// and `source.pack(column)` a pack inside the row.
template <class Source>
__device__ __forceinline__ void gather_pack(Source source, Element* y, const PackShape& shape) {
    PackPosition at(shape);
    wait_for_previous_launch();
    if (!at.there) return;
    y += 1LL * at.pack * VECTOR;
    source.seek(at.plane, at.row);
    if constexpr (!STRADDLES) {
        store_pack(y, source.pack(at.column));
        return;
    }
    const int count = at.pack + 1 == shape.packs ? shape.last : VECTOR;
    Pack<Element, VECTOR> values;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e, ++at.column) {
        if (at.column == shape.width) {
            if (e >= count) break;
            if (++at.row == shape.height) at.row = 0, ++at.plane;
            at.column = 0;
            source.seek(at.plane, at.row);
        }
        values.at[e] = source[at.column];
    }
    if (count == VECTOR) {
        store_pack(y, values);
        return;
    }
#pragma unroll
    for (int e = 0; e < VECTOR; ++e)
        if (e < count) y[e] = values.at[e];
}
