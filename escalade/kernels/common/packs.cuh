// A thread's share of one long array: PACKS packs of VECTOR elements, THREADS apart.
#pragma once

#include "common/elements.cuh"
#include "common/ptx.cuh"

using Values = Pack<Element, VECTOR>;

struct Packs {
    const long long whole;  // packs in the array; CTA 0 handles the remaining elements
    const long long first;  // pack of this thread

    __device__ __forceinline__ explicit Packs(long long elements)
        : whole(elements / VECTOR), first(1LL * blockIdx.x * (THREADS * PACKS) + threadIdx.x) {}

    // All loads of x and the residual are in flight before the first value is used.
    __device__ __forceinline__ void load(Values (&values)[PACKS], Values (&others)[PACKS], const Element* x,
                                         const Element* residual) const {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const long long pack = first + i * THREADS;
            if (pack >= whole) continue;
            values[i] = load_pack<Element, VECTOR>(x + pack * VECTOR);
            if (HAS_RESIDUAL) others[i] = load_pack<Element, VECTOR>(residual + pack * VECTOR);
        }
    }
};
