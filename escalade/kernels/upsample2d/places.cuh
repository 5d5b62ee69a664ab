// PyTorch's rules for the source pixels of an output and their weights, along one dimension.
#pragma once

#include "common/pool_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int TAPS = 2;          // problem.taps: pixels along each dimension per output
constexpr bool EXACT = false;    // problem.mode == "nearest_exact"
constexpr bool CORNERS = false;  // problem.corners
#endif

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

__device__ __forceinline__ SourceTaps source_taps(int at, int size, float step) {
    SourceTaps found;
    if constexpr (TAPS == 1) {
        const int nearest = static_cast<int>(floorf((EXACT ? at + 0.5f : static_cast<float>(at)) * step));
        found.at[0] = min(nearest, size - 1);
        found.weight[0] = 1.f;
    } else if constexpr (TAPS == 2) {
        const float place = fmaxf(source(at, step), 0.f);
        const int first = min(static_cast<int>(place), size - 1);
        found.at[0] = first;
        found.at[1] = min(first + 1, size - 1);
        found.weight[1] = place - first;
        found.weight[0] = 1.f - found.weight[1];
    } else {
        const float place = source(at, step);
        const float first = floorf(place);
        const float past = place - first;
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap)
            found.at[tap] = min(max(static_cast<int>(first) - 1 + tap, 0), size - 1);
        found.weight[0] = cubic_far(past + 1.f);
        found.weight[1] = cubic_near(past);
        found.weight[2] = cubic_near(1.f - past);
        found.weight[3] = cubic_far(2.f - past);
    }
    return found;
}
