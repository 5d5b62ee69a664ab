// Shared by the kernels of pointwise programs: the tensors, and the offset of an element in each.
//
// The prelude of a program names the tensors. PARAMETERS declares them, INPUTS is INPUT(number, access) for each that
// is read, RESULTS is RESULT(number) for each that is written; In0, Out0, … are their types. Results are dense. An
// input is dense as well, or has a stride along each dimension of the result: 0 where it is broadcast.
#pragma once

#include "common/elements.cuh"
#include "common/expression.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int RANK = 1;  // len(problem.shape)
#endif

// Access to an input: DENSE like the result; else strided, a contiguous pack at a time (ALONG), one value for the pack
// (SAME), a pack with a stride between its elements (APART), or each element by its own position (EACH).
enum Access { DENSE, ALONG, SAME, APART, EACH };

__device__ __forceinline__ float to_float(unsigned char value) { return value; }

struct Walk {  // sizes of the result and strides of the inputs, the innermost dimension last
    unsigned size[RANK];
    unsigned magic[RANK];  // n / size is (n * magic >> 32) >> shift for n below 2^31, where size is not 1
    unsigned shift[RANK];
    int stride[EXPRESSION_INPUTS][RANK];
};

struct Place {  // position of an element, or of a pack whose innermost index counts packs
    unsigned index[RANK];

    __device__ __forceinline__ Place(const Walk& walk, unsigned at) {
#pragma unroll
        for (int d = RANK - 1; d > 0; --d) {
            const unsigned high = static_cast<unsigned>(1ULL * at * walk.magic[d] >> 32) >> walk.shift[d];
            const unsigned above = walk.size[d] == 1 ? at : high;
            index[d] = at - above * walk.size[d];
            at = above;
        }
        index[0] = at;
    }

    // Offset in an input of the element at this position; the innermost index counts `unit` elements.
    __device__ __forceinline__ long long offset(const int (&stride)[RANK], int unit) const {
        long long sum = 1LL * index[RANK - 1] * unit * stride[RANK - 1];
#pragma unroll
        for (int d = 0; d < RANK - 1; ++d) sum += 1LL * index[d] * stride[d];
        return sum;
    }
};
