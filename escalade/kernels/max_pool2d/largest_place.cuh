// Which pixel of a window its maximum comes from, by PyTorch's rule: the first of equals, the last of NaNs.
#pragma once

#include "common/elements.cuh"
#include "common/pool_shape.cuh"
#include "max_pool2d/windows.cuh"

constexpr int NOWHERE = 255;  // stored as the place of a maximum that a ReLU in front of the pool has cut off

// A maximum and its place: the row in the window times the window's width, plus the column.
struct Largest {
    float value;
    int place;

    __device__ __forceinline__ void meet(float other, int at) {
        if (other > value || other != other) value = other, place = at;
    }
    // Behind a ReLU no gradient goes to what is not positive; it does to a NaN.
    __device__ __forceinline__ bool is_cut_off() const { return value <= 0.f; }
};

template <bool BEHIND_RELU>
__device__ __forceinline__ unsigned char stored_place(const Largest& largest) {
    return BEHIND_RELU && largest.is_cut_off() ? NOWHERE : largest.place;
}

// The first tap along one dimension that is inside the image, of a window that begins at a place of the padding.
__device__ __forceinline__ int first_inside(int begin, int dilation) {
    return begin < 0 ? (dilation - 1 - begin) / dilation : 0;
}

__device__ __forceinline__ Largest largest_in_window(const Element* plane, int step, int output_row, int output_column,
                                                     const PoolShape& shape, const Windows& windows) {
    const int top = output_row * windows.stride_h - windows.pad_h;
    const int left = output_column * windows.stride_w - windows.pad_w;
    const int first_r = first_inside(top, windows.dilation_h), first_s = first_inside(left, windows.dilation_w);
    Largest largest{__int_as_float(0xFF800000), first_r * windows.kernel_w + first_s};  // -inf
    for (int r = first_r; r < windows.kernel_h; ++r) {
        const int row = top + r * windows.dilation_h;
        if (row >= shape.height) break;
        for (int s = first_s; s < windows.kernel_w; ++s) {
            const int column = left + s * windows.dilation_w;
            if (column >= shape.width) break;
            largest.meet(to_float(plane[(row * shape.width + column) * step]), r * windows.kernel_w + s);
        }
    }
    return largest;
}
