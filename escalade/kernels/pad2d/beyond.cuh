// Padding of an image along one dimension.
#pragma once

constexpr int CONSTANT = 0, REFLECT = 1, REPLICATE = 2;  // else circular; behind it their gradients
constexpr bool ADDS = MODE > 3;

// Pixel of x, of `size`, at padded position `at`, which is less than a whole image outside; -1: none.
__device__ __forceinline__ int source(int at, int size) {
    if (ADDS) return at;
    if (MODE == REFLECT) return min(abs(at), 2 * (size - 1) - abs(at));
    if (MODE == REPLICATE) return min(max(at, 0), size - 1);
    if (at >= 0 && at < size) return at;
    if (MODE == CONSTANT) return -1;
    return at < 0 ? at + size : at - size;
}

// Positions in a padded row of x, `size` elements and `before` more in front of them, that are copies of element `at`,
// without the element itself. Padding by a whole row or less copies an element once on either side, but for the elements
// at the ends of replicated rows.
struct Copies {
    int before_first, before_count, after_first, after_count;

    __device__ __forceinline__ Copies(int at, int size, int before, int after) {
        constexpr int PADDING = MODE - 3;
        const int end = before + size;  // of the elements themselves
        before_first = PADDING == REFLECT ? before - at : PADDING == REPLICATE ? 0 : before + at - size;
        after_first = PADDING == REFLECT ? end + size - 2 - at : end + (PADDING == REPLICATE ? 0 : at);
        before_count = before_first >= 0 && before_first < before;
        after_count = after_first >= end && after_first < end + after;
        if (PADDING == REPLICATE) before_count = at == 0 ? before : 0, after_count = at == size - 1 ? after : 0;
    }
    __device__ __forceinline__ int count() const { return before_count + after_count; }
    __device__ __forceinline__ int operator[](int index) const {
        return index < before_count ? before_first + index : after_first + index - before_count;
    }
};
