// The outputs that are made of a pixel of x, and by what weight, along one dimension: what upsample2d/places.cuh
// has, turned round.
#pragma once

#include "upsample2d/places.cuh"

// From the first up to, but not including, the end.
struct MadeOf {
    int first, end;
};

// The first output at or behind `guess` steps whose pixels are not all in front of `pixel`, or are all behind it
// (PAST). Pixels of an output never lie in front of those of the output before it; the guess is off by a rounding.
template <bool PAST>
__device__ __forceinline__ int first_output(int pixel, int size, int outputs, float step) {
    const auto reached = [&](int at) {
        const Places found = places(at, size, step);
        if (PAST) return found.at[0] > pixel;
        // At a place in front of the image the second pixel of two has no weight, which would make many outputs its own.
        const bool counts = TAPS != 2 || found.weight[TAPS - 1] > 0.f;
        return found.at[0] >= pixel || (counts && found.at[TAPS - 1] >= pixel);
    };
    // The tap in front of a place is at the place rounded down, or one before it with four of them.
    const float place = pixel + (PAST ? TAPS / 4 + 1 : TAPS / 4 + 1 - TAPS);
    const float guess = step > 0.f ? (CORNERS || TAPS == 1 ? place / step : (place + 0.5f) / step - 0.5f) : 0.f;
    int at = static_cast<int>(fminf(fmaxf(guess, 0.f), outputs));
    while (at > 0 && reached(at - 1)) --at;
    while (at < outputs && !reached(at)) ++at;
    return at;
}

__device__ __forceinline__ MadeOf made_of(int pixel, int size, int outputs, float step) {
    return {first_output<false>(pixel, size, outputs, step), first_output<true>(pixel, size, outputs, step)};
}

// The weight of a pixel in an output: near an edge several taps are the same pixel.
__device__ __forceinline__ float weight_in(int at, int pixel, int size, float step) {
    const Places found = places(at, size, step);
    float weight = 0.f;
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap)
        if (found.at[tap] == pixel) weight += found.weight[tap];
    return weight;
}
