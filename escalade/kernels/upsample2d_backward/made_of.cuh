// Outputs that depend on a pixel of x, and its weights in them, along one dimension: the inverse of
// upsample2d/places.cuh.
#pragma once

#include "upsample2d/places.cuh"

// Half-open range [first, end).
struct DependentOutputs {
    int first, end;
};

// First output at or after `guess` whose pixels are not all before `pixel`, or (PAST) are all after it. The pixels of
// an output never precede those of the previous output; the guess is off by rounding only.
template <bool PAST>
__device__ __forceinline__ int first_output(int pixel, int size, int outputs, float step) {
    const auto reached = [&](int at) {
        const SourceTaps found = source_taps(at, size, step);
        if (PAST) return found.at[0] > pixel;
        // Before the image, the second of two taps has no weight; counting it would give the pixel many outputs.
        const bool counts = TAPS != 2 || found.weight[TAPS - 1] > 0.f;
        return found.at[0] >= pixel || (counts && found.at[TAPS - 1] >= pixel);
    };
    // The first tap is at the coordinate rounded down, or with four taps one before it.
    const float place = pixel + (PAST ? TAPS / 4 + 1 : TAPS / 4 + 1 - TAPS);
    const float guess = step > 0.f ? (CORNERS || TAPS == 1 ? place / step : (place + 0.5f) / step - 0.5f) : 0.f;
    int at = static_cast<int>(fminf(fmaxf(guess, 0.f), outputs));
    while (at > 0 && reached(at - 1)) --at;
    while (at < outputs && !reached(at)) ++at;
    return at;
}

__device__ __forceinline__ DependentOutputs dependent_outputs(int pixel, int size, int outputs, float step) {
    return {first_output<false>(pixel, size, outputs, step), first_output<true>(pixel, size, outputs, step)};
}

// Weight of a pixel in an output: near an edge several taps may be the same pixel.
__device__ __forceinline__ float weight_in(int at, int pixel, int size, float step) {
    const SourceTaps found = source_taps(at, size, step);
    float weight = 0.f;
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap)
        if (found.at[tap] == pixel) weight += found.weight[tap];
    return weight;
}
