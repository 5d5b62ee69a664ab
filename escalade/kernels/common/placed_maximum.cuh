// Max with its index in a window, by PyTorch's rule: the first of equals, the last of NaNs.
#pragma once

#include "common/ptx.cuh"

constexpr int NOWHERE = 255;  // index stored for a maximum that the ReLU before the pool made inactive

// Max and argmax; the index is the row in the window times the window's width, plus the column.
struct Largest {
    float value;
    int index;

    __device__ __forceinline__ void update(float other, int at) {
        if (other > value || other != other) value = other, index = at;
    }
    // Fewer instructions; after a NaN only the value is right, not the index.
    __device__ __forceinline__ void update_number(float other, int at) {
        if (other > value) index = at;
        value = max_nan(value, other);
    }
    // A ReLU passes no gradient to values that are not positive, but passes it to NaN.
    __device__ __forceinline__ bool is_inactive() const { return value <= 0.f; }
};

template <bool BEHIND_RELU>
__device__ __forceinline__ unsigned char stored_index(const Largest& largest) {
    return BEHIND_RELU && largest.is_inactive() ? NOWHERE : largest.index;
}
