// PyTorch's rules for the source pixels of an output and their weights, along one dimension.
#pragma once

#include "common/pool_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int TAPS = 2;          // problem.taps: pixels along each dimension per output
constexpr bool EXACT = false;    // problem.mode == "nearest_exact"
constexpr bool CORNERS = false;  // problem.corners
#endif

__device__ __forceinline__ int clamped(int at, int size) { return min(max(at, 0), size - 1); }

// TAPS adjacent pixels, of which those outside of the image are its first or last.
struct Taps {
    int first;
    float weight[TAPS];

    __device__ __forceinline__ int at(int tap, int size) const { return clamped(first + tap, size); }
};

struct SourceTaps {
    int at[TAPS];
    float weight[TAPS];
};

// Source coordinate of output `at`.
__device__ __forceinline__ float source(int at, float step) {
    if (CORNERS) return at * step;
    return fmaf(at + 0.5f, step, -0.5f);
}

// Keys' cubic with PyTorch's slope of -0.75, within one pixel and between one and two pixels away.
__device__ __forceinline__ float cubic_near(float away) { return (1.25f * away - 2.25f) * away * away + 1.f; }
__device__ __forceinline__ float cubic_far(float away) {
    return ((-0.75f * away + 3.75f) * away - 6.f) * away + 3.f;
}

__device__ __forceinline__ Taps taps_of(int at, int size, float step) {
    Taps found;
    if constexpr (TAPS == 1) {
        const int nearest = static_cast<int>(floorf((EXACT ? at + 0.5f : static_cast<float>(at)) * step));
        found.first = min(nearest, size - 1);
        found.weight[0] = 1.f;
    } else if constexpr (TAPS == 2) {
        const float place = fmaxf(source(at, step), 0.f);
        found.first = min(static_cast<int>(place), size - 1);
        found.weight[1] = place - found.first;
        found.weight[0] = 1.f - found.weight[1];
    } else {
        const float place = source(at, step);
        const float before = floorf(place);
        const float past = place - before;
        found.first = static_cast<int>(before) - 1;
        found.weight[0] = cubic_far(past + 1.f);
        found.weight[1] = cubic_near(past);
        found.weight[2] = cubic_near(1.f - past);
        found.weight[3] = cubic_far(2.f - past);
    }
    return found;
}

__device__ __forceinline__ SourceTaps source_taps(int at, int size, float step) {
    const Taps taps = taps_of(at, size, step);
    SourceTaps found;
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) found.at[tap] = taps.at(tap, size), found.weight[tap] = taps.weight[tap];
    return found;
}
