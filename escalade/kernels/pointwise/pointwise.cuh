// What the kernels of pointwise programs share: the tensors, and where an element of each lies.
//
// A program's prelude names the tensors. PARAMETERS declares them, INPUTS is INPUT(number, access) for each that is
// read, RESULTS is RESULT(number) for each that is written; In0, Out0, … are their types. Results are dense. An input is
// dense as well, or has a stride along each dimension of the result: 0 where it is broadcast.
#pragma once

#include "common/elements.cuh"
#include "common/expression.cuh"
#include "common/ptx.cuh"

// How an input is read: DENSE as the result lies; else by its strides, a pack of neighbours at a time (ALONG), one for
// the pack (SAME), those of a pack with a stride between them (APART), or each element by its own place (EACH).
enum Access { DENSE, ALONG, SAME, APART, EACH };

__device__ __forceinline__ float to_float(unsigned char value) { return value; }

struct Walk {  // sizes of the result and strides of the inputs, the innermost dimension last
    unsigned size[RANK];
    unsigned magic[RANK];  // n / size is (n * magic >> 32) >> shift for n below 2^31, where size is not 1
    unsigned shift[RANK];
    int stride[EXPRESSION_INPUTS][RANK];
};

struct Place {  // of an element, or of a pack of them whose innermost index counts packs
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

    // Elements from an input's first to the one at this place, of which the innermost index stands for `unit`.
    __device__ __forceinline__ long long offset(const int (&stride)[RANK], int unit) const {
        long long sum = 1LL * index[RANK - 1] * unit * stride[RANK - 1];
#pragma unroll
        for (int d = 0; d < RANK - 1; ++d) sum += 1LL * index[d] * stride[d];
        return sum;
    }
};
