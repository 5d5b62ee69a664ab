// Inputs that may be quantized, in kernels that compute in wider types: sums of bytes, and the scale of a tensor.
#pragma once

#include "common/bytes.cuh"

// A value of a tensor of `Stored`: if these are bytes, it is multiplied by the tensor's scale.
template <class Stored>
__device__ __forceinline__ float scaled(float value, const float* scale) {
    return sizeof(Stored) == 1 ? value * *scale : value;
}

// Adds the elements of a pack to running sums. Packs of bytes have no elements to name: they are converted by words.
template <class T, int COUNT>
__device__ __forceinline__ void add_pack(float (&sums)[COUNT], const Pack<T, COUNT>& pack) {
    if constexpr (sizeof(T) > 1) {
#pragma unroll
        for (int e = 0; e < COUNT; ++e) sums[e] += to_float(pack.at[e]);
    } else {
        float values[COUNT];
        to_floats(values, pack);
#pragma unroll
        for (int e = 0; e < COUNT; ++e) sums[e] += values[e];
    }
}
