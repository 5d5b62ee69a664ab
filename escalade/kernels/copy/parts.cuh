// Parts of a copy: boxes of elements with a stride along every dimension of both sides. A CTA works on one part, found
// by its block index.
#pragma once

#include "common/elements.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = unsigned;  // element: an integer of the element's size
constexpr int PARTS = 1;   // parts: parts per launch
constexpr int RANK = 3;    // rank: most dimensions of a part
#endif

struct Addresses {  // of each part's first element
    const Element* x[PARTS];
    Element* y[PARTS];
};

struct Part {  // filled by escalade/ops/copy.py, in this order
    unsigned first_block;
    unsigned count;   // of what the sizes are of
    unsigned vector;  // elements that are moved at once
    unsigned size[RANK];
    unsigned magic[RANK];  // n / size is (n * magic >> 32) >> shift for n below 2^31, where size is not 1
    unsigned shift[RANK];
    int x_stride[RANK], y_stride[RANK];
};

struct Parts {
    Part at[PARTS];
};

struct Offsets {  // elements from a part's first
    long long x, y;
};

__device__ __forceinline__ int part_of_block(const Parts& parts, unsigned block) {
    int found = 0;
#pragma unroll
    for (int part = 1; part < PARTS; ++part) found += block >= parts.at[part].first_block;
    return found;
}

__device__ __forceinline__ Offsets offsets_of(const Part& part, unsigned at) {
    Offsets found = {0, 0};
#pragma unroll
    for (int d = RANK - 1; d >= 0; --d) {
        const unsigned high = static_cast<unsigned>(1ULL * at * part.magic[d] >> 32) >> part.shift[d];
        const unsigned above = d == 0 ? 0 : part.size[d] == 1 ? at : high;
        const unsigned index = at - above * part.size[d];
        found.x += 1LL * index * part.x_stride[d];
        found.y += 1LL * index * part.y_stride[d];
        at = above;
    }
    return found;
}
