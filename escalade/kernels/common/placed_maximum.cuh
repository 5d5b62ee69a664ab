// A maximum with its place in a window, by PyTorch's rule: the first of equals, the last of NaNs.
#pragma once

#include "common/ptx.cuh"

constexpr int NOWHERE = 255;  // stored as the place of a maximum that a ReLU in front of the pool has cut off

// A maximum and its place: the row in the window times the window's width, plus the column.
struct Largest {
    float value;
    int place;

    __device__ __forceinline__ void meet(float other, int at) {
        if (other > value || other != other) value = other, place = at;
    }
    // The same in fewer instructions, where the value alone counts if a NaN is met.
    __device__ __forceinline__ void meet_number(float other, int at) {
        if (other > value) place = at;
        value = max_nan(value, other);
    }
    // Behind a ReLU no gradient goes to what is not positive; it does to a NaN.
    __device__ __forceinline__ bool is_cut_off() const { return value <= 0.f; }
};

template <bool BEHIND_RELU>
__device__ __forceinline__ unsigned char stored_place(const Largest& largest) {
    return BEHIND_RELU && largest.is_cut_off() ? NOWHERE : largest.place;
}
