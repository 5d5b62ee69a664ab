// Padding of an image along one dimension.
#pragma once

constexpr int CONSTANT = 0, REFLECT = 1, REPLICATE = 2;  // else circular

// Pixel of x, of `size`, at padded position `at`, which is less than a whole image outside; -1: none.
__device__ __forceinline__ int source(int at, int size) {
    if (MODE == REFLECT) return min(abs(at), 2 * (size - 1) - abs(at));
    if (MODE == REPLICATE) return min(max(at, 0), size - 1);
    if (at >= 0 && at < size) return at;
    if (MODE == CONSTANT) return -1;
    return at < 0 ? at + size : at - size;
}
